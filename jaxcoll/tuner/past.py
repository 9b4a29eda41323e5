"""What the default policy remembers: times of what was in force, the move that is tried, a promise that failed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxcoll.tuner.measure import LEAST_S, Batch
from jaxcoll.tuner.types import Config

_BATCHES = 4
"""Batches of a configuration whose times are kept, as long as the network seems to be the same."""
_ANOTHER = 0.15
"""Times that differ by so much (log) are told apart."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A configuration and how long its last epochs took, seconds, until `epoch`."""

    config: Config
    epochs: tuple[float, ...]
    epoch: int

    @property
    def seconds(self) -> float:
        """Mean time of an epoch."""
        return max(float(np.mean(self.epochs)), LEAST_S)

    @staticmethod
    def of(config: Config, batch: Batch, epoch: int, before: Measured | None = None) -> Measured:
        """What the batch says, and `before` where the network is the same."""
        epochs = (*(before.epochs if before is not None else ()), *batch.seconds.tolist())
        return Measured(config, epochs[-_BATCHES * len(batch.seconds) :], epoch)

    def unlike(self, batch: Batch) -> bool:
        """Whether the batch took clearly longer, or shorter."""
        return bool(abs(np.log(batch.time / self.seconds)) >= _ANOTHER)

    def differs(self, batch: Batch) -> bool:
        """Whether the batch shows another network: unlike, and by the most of its epochs, not by a few.

        Where links are erratic one batch is easily half as long again as the next.
        """
        if not self.unlike(batch):
            return False
        (low, high), (least, most) = (np.percentile(x, [15, 85]) for x in (self.epochs, batch.seconds))
        return bool(least > high or most < low)

    @property
    def chance(self) -> float:
        """How much of the mean (log) may be chance: two standard errors."""
        spread = np.std(np.log(np.maximum(self.epochs, 1e-9)))
        return 2 * float(spread) / math.sqrt(len(self.epochs))


@dataclasses.dataclass(frozen=True)
class Trial:
    """A move whose first batch is awaited: the time of an epoch before it, seconds, and the ratio expected."""

    seconds: float
    action: str
    expected: float = 1.0


@dataclasses.dataclass(frozen=True)
class Doubt:
    """A move to another `program`, or by swaps alone, took `factor` times as long as was promised of it, at `epoch`."""

    factor: float
    program: bool
    epoch: int
