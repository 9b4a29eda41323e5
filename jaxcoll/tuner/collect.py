"""Fills batches out of epochs that ran what is in force."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxcoll.telemetry import Epoch, epoch_seconds
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

    def settled(self, least: int, shift: float) -> Collector:
        """Without the waiting epochs before a change of the network, which the last `least` of them or more show.

        They all take `shift` times as long as all before them, or all before as long as they. A batch that began before
        the change and ends after it tells of neither.
        """
        seconds = [epoch_seconds(e) for e in self.waiting]
        for first in range(len(seconds) - least, 0, -1):
            before, after = seconds[:first], seconds[first:]
            if min(after) > shift * max(before) or min(before) > shift * max(after):
                return Collector(self.waiting[first:], self.seen)
        return self

    def cleared(self) -> Collector:
        """Without waiting epochs: they ran a table that is no longer in force."""
        return Collector((), self.seen)
