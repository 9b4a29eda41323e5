"""The tuner's parameters: REACT's Table 3 by the paper's names, and those of the default policy."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Literal

from jaxcoll.errors import UsageError

Policy = Literal["jaxcoll", "react-paper"]
POLICIES: tuple[Policy, ...] = ("jaxcoll", "react-paper")


@dataclasses.dataclass(frozen=True)
class ReactParams:
    """Table 3 of the REACT paper.

    The paper gives no value for `A_max` and `K_max`, and no step by which `K_t` grows: those are our choice.
    """

    B: int = 6
    """Epochs in a batch."""
    delta1: float = 0.2
    """Steady congestion (eq. 1): how far below its likes a flow's p90 throughput must lie."""
    delta2: float = 0.15
    """Erratic congestion (eq. 2): normalised standard deviation of a flow's throughput."""
    K_t: int = 15
    """Transforms tried after a batch."""
    K_t_growth: int = 5
    """By how much K_t grows with each batch that explores."""
    K_max: int = 4
    """Transforms accepted after one batch."""
    epsilon: float = 0.05
    """Least expected improvement of the mean of the old critical paths."""
    H: int = 60
    """Epochs after which measurements are forgotten."""
    E_max: int = 5
    """Rounds that explore without finding better before resting, and rounds of rest before exploring once."""
    A_max: int = 20
    """Explorations out of rest, in a row without success, after which the tuner waits for a change: for `E_max` batches
    in a row without congestion. What comes after those is explored anew."""
    tau_r: float = 0.05
    """Least measured improvement; a transform that gives less is reverted."""

    def __post_init__(self) -> None:
        _check(self, {"K_t_growth": 0})
        if self.H < self.B:
            raise UsageError(f"H={self.H} epochs of history hold no batch of B={self.B}; make H at least B")


@dataclasses.dataclass(frozen=True)
class ChoiceParams:
    """The default policy's own parameters, beside REACT's `B`, `delta1`, `delta2`, `H`."""

    margin: float = 0.05
    """Least expected gain for which a table or program is left; twice that for the start, which was right before."""
    content: float = 0.2
    """The same where a move has paid and the network seems to be the same: what is left to explain is mostly chance. Of
    30 moves made then, those that promised less took 1.3 times as long on average."""
    keep: float = 0.02
    """Least measured gain for which the new one is kept."""
    quick: int = 3
    """Epochs after which a gain of at least `quick_gain` is taken, without waiting for the whole batch."""
    quick_gain: float = 0.2
    window_s: float = 60.0
    """Time in which at most `swaps` decisions are taken; doubles with each failure in a row."""
    swaps: int = 3
    """Decisions in a window, one of them kept for the way back, which no ration refuses."""
    worse: float = 1.3
    """How many times longer a batch must take, under the same table, to count as a new situation; how many times longer
    than expected of a move, for it to be taken back before anything else is tried."""
    shift: float = 1.2
    """How many times longer the last `quick` epochs must all take than all before them, or shorter, for those before to
    be left out of the batch: the network has changed."""
    calm: int = 2
    """Batches without congestion before the start's program and table are taken again."""
    revisit: int = 4
    """Batches after which the start is tried again, where another program betters its time then by less than `little`:
    that time may have passed. Doubles with each vain look."""
    little: float = 0.25
    simulations: int = 240
    """Executions simulated for one decision."""
    rounds: int = 4
    """Swaps put together for one decision."""
    misfit: float = 0.12
    """Mean deviation (log) between measured and modelled transfers above which the model is fitted anew."""
    alpha: float = 50e-6
    """Latency of an edge that the model assumes, seconds."""
    lateness: float = 0.25
    """A rank that is later than this part of an epoch is a straggler."""

    def __post_init__(self) -> None:
        # A swap and its way back are two; what tells a change of times must be above 1.
        _check(self, {"swaps": 2, "rounds": 0, "worse": 1, "shift": 1})


def _check(params: ReactParams | ChoiceParams, least: Mapping[str, int]) -> None:
    """UsageError for a parameter that is no number of its kind, or below its `least` (else 1 for whole numbers, 0)."""
    for field in dataclasses.fields(params):
        whole = field.type == "int"
        check_number(field.name, getattr(params, field.name), least.get(field.name, 1 if whole else 0), whole)


def check_number(name: str, value: object, least: int, whole: bool = True) -> None:
    """UsageError unless the parameter `name` is a finite number of at least `least`."""
    kind = numbers.Integral if whole else numbers.Real
    fits = not isinstance(value, bool) and isinstance(value, kind) and math.isfinite(value) and float(value) >= least
    if not fits:
        what = f"a {'whole ' if whole else ''}number of at least {least}"
        raise UsageError(f"the tuner's parameter {name} is {value!r}; it must be {what}")
