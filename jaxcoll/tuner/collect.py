"""Fills batches out of epochs that ran what is in force."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxcoll.telemetry import Epoch
from jaxcoll.tuner.measure import Batch, batch_of, pattern_of
from jaxcoll.tuner.types import Config, ScheduleSet


@dataclasses.dataclass(frozen=True)
class Collector:
    """Epochs that wait for their batch to fill; `seen` counts all epochs ever taken, of whatever table."""

    waiting: tuple[Epoch, ...] = ()
    seen: int = 0

    def add(self, epochs: Sequence[Epoch], config: Config) -> Collector:
        """Takes the epochs that ran `config` (its program, and its table's version)."""
        fits = [e for e in epochs if e.program == config.program and e.version == config.table.version]
        return Collector((*self.waiting, *fits), self.seen + len(epochs))

    def batch(self, spec: ScheduleSet, config: Config, size: int) -> tuple[Collector, Batch | None]:
        """The oldest full batch of `size` epochs, if there is one, and the rest."""
        if len(self.waiting) < size:
            return self, None
        pattern = pattern_of(spec.by_id[config.program].schedule, config.table, spec.nbytes)
        batch = batch_of(self.waiting[:size], pattern, spec.nranks)
        return Collector(self.waiting[size:], self.seen), batch

    def cleared(self) -> Collector:
        """Without waiting epochs: they ran a table that is no longer in force."""
        return Collector((), self.seen)
