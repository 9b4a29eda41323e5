"""All that the default policy knows between two calls."""

from __future__ import annotations

import dataclasses

from jaxcoll.tuner.collect import Collector
from jaxcoll.tuner.measure import Batch
from jaxcoll.tuner.model import Model
from jaxcoll.tuner.params import ChoiceParams, ReactParams
from jaxcoll.tuner.past import Doubt, Measured, Trial
from jaxcoll.tuner.types import Config, Decision, ScheduleSet, Verdict


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptiveState:
    """All that the default policy knows between two calls."""

    spec: ScheduleSet
    react: ReactParams
    params: ChoiceParams
    seed: int
    config: Config
    collector: Collector = dataclasses.field(default_factory=Collector)
    version: int = 0
    round: int = 0
    model: Model | None = None
    measured: tuple[Measured, ...] = ()
    """What was in force; once a batch has been judged, the present one last."""
    trial: Trial | None = None
    calm: int = 0
    failures: int = 0
    """Moves in a row that didn't pay; looks at the start aside."""
    astray: bool = False
    """Whether the last move didn't pay and what it left is still left."""
    swaps_ns: tuple[int, ...] = ()
    """When decisions were taken, by the wall clock of the records."""
    probes: int = 0
    """Times that the start was tried again too early."""
    surprised: bool = False
    """Whether the last batch's move fell far short of what was expected of it."""
    verdict: Verdict | None = None
    """On the last move that was judged."""
    paid: bool = False
    """Whether a move has given much of what it promised, since the network has changed or the start was taken again."""
    doubt: Doubt | None = None
    """What the last move that fell far short has taught about such promises."""
    waited: bool = False
    """Whether the last batch decided nothing because it was unlike those before it."""
    worse: bool = False
    """Whether the epochs have become much slower since the last decision, which then had other grounds."""
    stragglers: tuple[int, ...] = ()
    evidence: Batch | None = None
    """The last epochs of what is in force, over several batches, as long as the network seems to be the same."""
    fitted: tuple[object, float] | None = None
    """What the last fit was to, the table and the number of epochs, and that fit's loss."""
    searched: tuple[object, ...] | None = None
    """What the last search without result began from: it isn't repeated while that stays the same."""

    @property
    def fits(self) -> object:
        """What a model is fitted to: the table in force and the number of epochs of it."""
        return self.config.key, 0 if self.evidence is None else len(self.evidence.seconds)

    @property
    def here(self) -> Measured:
        """What is in force, after a batch of it."""
        return self.measured[-1]

    @property
    def revisit_after(self) -> int:
        """Epochs after which the start is tried again, at the earliest."""
        return self.params.revisit * self.react.B * 2 ** min(self.probes, 5)

    def seconds_of(self, config: Config) -> float:
        """Measured time of a configuration, 0 if there is none."""
        return next((m.seconds for m in self.measured if m.config.key == config.key), 0.0)


Outcome = tuple[AdaptiveState, Decision | None, str]


def init_adaptive(
    spec: ScheduleSet, react: ReactParams | None = None, params: ChoiceParams | None = None, seed: int = 0
) -> AdaptiveState:
    """The state before the first epoch."""
    home = spec.home
    react, params = react or ReactParams(), params or ChoiceParams()
    return AdaptiveState(spec, react, params, seed, home, version=home.table.version)
