"""A batch of epochs as arrays over the edges of the program that ran."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxcoll.schedule import Schedule, Table
from jaxcoll.schedule.stats import Stats, stats
from jaxcoll.sim.plan import Plan, plan
from jaxcoll.telemetry import Epoch, epoch_seconds, lateness

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEAST_S = 1e-9
"""What an epoch takes at least, seconds: where nobody could time anything a ratio of two times is still a number."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pattern:
    """A schedule under a table at one size: its edges as ranks, their bytes and degrees."""

    plan: Plan
    degree: Ints
    send_degree: Ints
    recv_degree: Ints

    @property
    def carries(self) -> npt.NDArray[np.bool_]:
        """Edges that carry bytes at all."""
        return self.plan.size > 0


def pattern_of(schedule: Schedule, table: Table, nbytes: int) -> Pattern:
    """The pattern, cached."""
    return _pattern(_Key(schedule, table), nbytes)


class _Key:
    """By identity of both: they are immutable, and hashing their contents would cost more than the work."""

    def __init__(self, schedule: Schedule, table: Table):
        self.schedule, self.table = schedule, table

    def __hash__(self) -> int:
        return hash((id(self.schedule), id(self.table)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.schedule is self.schedule and other.table is self.table


@functools.lru_cache(maxsize=512)
def _pattern(key: _Key, nbytes: int) -> Pattern:
    found: Stats = stats(key.schedule, key.table, nbytes, itemsize=1)
    flows = plan(key.schedule, key.table, nbytes)
    return Pattern(flows, found.edge_degree, found.send_degree, found.recv_degree)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """B epochs of one program under one table.

    `fct` is seconds, [epochs][edges] in the order of `Schedule.edges`; NaN for an edge of which no record came, or
    which nobody could time.
    `seconds` is each epoch's time without the waiting for late ranks, `lateness` each rank's in seconds,
    [epochs][ranks], `now_ns` the wall clock of the last record.
    """

    pattern: Pattern
    fct: Floats
    seconds: Floats
    lateness: Floats
    now_ns: int

    @property
    def late(self) -> Floats:
        """Each rank's median lateness, seconds."""
        return np.median(self.lateness, axis=0)

    def after(self, before: Batch, most: int) -> Batch:
        """This batch with the last epochs of one before it, which ran the same pattern: `most` epochs in all."""
        first = max(0, len(before.seconds) + len(self.seconds) - most)
        fields = {
            name: np.concatenate([getattr(before, name)[first:], getattr(self, name)])
            for name in ("fct", "seconds", "lateness")
        }
        return dataclasses.replace(self, **fields)

    @property
    def time(self) -> float:
        """Mean seconds of an epoch."""
        return max(float(self.seconds.mean()), LEAST_S)

    @property
    def throughput(self) -> Floats:
        """Bytes per second, [epochs][edges]; NaN where an edge carried nothing or wasn't seen."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.pattern.carries, self.pattern.plan.size / np.maximum(self.fct, 1e-12), np.nan)


def batch_of(epochs: Sequence[Epoch], pattern: Pattern, nranks: int) -> Batch:
    """The batch of `epochs`, which must all have run `pattern`; records that fit none of its edges are left out."""
    flows = pattern.plan
    keys = _edge_keys(flows.graph, flows.step, flows.src, flows.dst, nranks)
    order = np.argsort(keys, kind="stable")
    fct = np.full((len(epochs), len(keys)), np.nan)
    late = np.zeros((len(epochs), nranks))
    seconds = np.zeros(len(epochs))
    now = 0
    for i, epoch in enumerate(epochs):
        rows = epoch.receiver
        graph, step, src, dst = (rows[name].astype(np.int64) for name in ("graph", "step", "src", "dst"))
        found = _edge_keys(graph, step, src, dst, nranks)
        at = np.minimum(np.searchsorted(keys[order], found), max(len(keys) - 1, 0))
        fits = keys[order][at] == found if len(keys) else np.zeros(len(found), bool)
        timed = rows["transfer_ns"] > 0
        fct[i, order[at[fits]]] = np.where(timed, rows["transfer_ns"] / 1e9, np.nan)[fits]
        late[i] = lateness(epoch, nranks) / 1e9
        seconds[i] = epoch_seconds(epoch)
        ends = epoch.records["start_ns"] + epoch.records["wait_ns"] + epoch.records["transfer_ns"]
        now = max(now, int(ends.max()))
    return Batch(pattern, fct, seconds, late, now)


def _edge_keys(graph: Ints, step: Ints, src: Ints, dst: Ints, nranks: int) -> Ints:
    return ((graph * 65536 + step) * nranks + src) * nranks + dst
