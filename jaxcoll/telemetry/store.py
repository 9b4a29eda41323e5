"""Cuts record batches into epochs, and hands complete epochs to whoever tunes."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable, Mapping

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import UsageError
from jaxcoll.telemetry.ends import split_waits
from jaxcoll.telemetry.record import RECEIVER, SENDER, UNSPLIT, Records, as_records, concatenate

EpochId = tuple[int, int, int, int]
"""(comm, site, launch, index): one execution of one call site."""


@dataclasses.dataclass(frozen=True)
class Epoch:
    """All records known of one execution, with the table version and the program that it ran."""

    id: EpochId
    program: int
    version: int
    records: Records

    @property
    def receiver(self) -> Records:
        """The receivers' records: one per edge."""
        return self.records[self.records["side"] == RECEIVER]

    @property
    def start_ns(self) -> int:
        """When the first edge began, nanoseconds by the wall clock; 0 without records."""
        return int(self.records["start_ns"].min()) if len(self.records) else 0

    @property
    def span_ns(self) -> int:
        """That of the slowest receiver, nanoseconds; 0 without any."""
        rows = self.receiver
        return int(self.spans_ns(int(rows["dst"].max()) + 1).max()) if len(rows) else 0

    def spans_ns(self, nranks: int) -> npt.NDArray[np.int64]:
        """From each rank's first start as a receiver to its last byte, nanoseconds, [nranks]; 0 where it got nothing.

        Each by its own clock: those of two hosts may lie apart by more than an epoch takes.
        """
        rows = self.receiver
        end = (rows["start_ns"] + rows["wait_ns"] + rows["transfer_ns"]).astype(np.int64)
        first, last = np.full(nranks, np.iinfo(np.int64).max), np.zeros(nranks, np.int64)
        np.minimum.at(first, rows["dst"], rows["start_ns"].astype(np.int64))
        np.maximum.at(last, rows["dst"], end)
        return np.where(last > 0, last - first, 0)


@dataclasses.dataclass(frozen=True)
class Counts:
    """What went through a store: `dropped` was lost before it, `incomplete` in it."""

    pushed: int = 0
    dropped: int = 0
    incomplete: int = 0


def group_epochs(records: Records) -> list[Epoch]:
    """Cuts records into epochs, in the order in which they started; the order of records inside an epoch is kept."""
    if not len(records):
        return []
    ids = np.stack([records[name].astype(np.int64, copy=False).view(np.int64) for name in ("comm", "site", "launch")])
    keys = np.concatenate([ids, records["index"].astype(np.int64)[None]])
    _, first, inverse = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    order = np.argsort(inverse, kind="stable")
    pieces = np.split(order, np.cumsum(np.bincount(inverse, minlength=len(first)))[:-1])
    epochs = [_epoch(records[piece]) for piece in pieces]
    return sorted(epochs, key=lambda epoch: (epoch.start_ns, epoch.id))


def _epoch(records: Records) -> Epoch:
    head = records[0]
    return Epoch(
        id=(int(head["comm"]), int(head["site"]), int(head["launch"]), int(head["index"])),
        program=int(head["program"]),
        version=int(head["version"]),
        records=records,
    )


class Store:
    """Records that wait for the rest of their epochs, safe to push to from one thread and to take from in another.

    Args:
        patience: an epoch that lacks records is given up when so many newer ones of its set are complete.
    """

    def __init__(self, patience: int = 64):
        if patience < 1:
            raise UsageError(f"a store needs a patience of at least 1, got {patience}")
        self._patience = patience
        self._lock = threading.Lock()
        self._pushed = self._dropped = self._incomplete = 0
        self._keys: dict[tuple[int, int], Hashable] = {}
        self._pending: dict[Hashable, dict[EpochId, list[Records]]] = {}

    def bind(self, comm: int, site: int, key: Hashable) -> None:
        """Says which schedule set the call site `site` of communicator `comm` belongs to (default: `(comm, site)`)."""
        with self._lock:
            self._keys[(comm, site)] = key

    def push(self, batch: bytes | Records, dropped: int = 0) -> None:
        """Adds a batch (copied), and the number of records that were lost before it."""
        records = as_records(batch).copy()
        records.flags.writeable = False
        epochs = group_epochs(records)
        with self._lock:
            self._pushed += len(records)
            self._dropped += dropped
            for epoch in epochs:
                key = self._keys.get(epoch.id[:2], epoch.id[:2])
                self._pending.setdefault(key, {}).setdefault(epoch.id, []).append(epoch.records)

    def take(self, key: Hashable, expected: Mapping[int, int]) -> list[Epoch]:
        """Removes and returns the complete epochs of set `key`, oldest first; waits are told from transfers.

        Args:
            expected: receiver records per epoch by program; a program that is not named is complete with any record.
        """
        with self._lock:
            waiting = self._pending.get(key, {})
            joined = {id_: parts[0] if len(parts) == 1 else concatenate(parts) for id_, parts in waiting.items()}
            whole = {id_: _split(records, expected) for id_, records in joined.items()}
            done = [_epoch(records) for records in whole.values() if _complete(records, expected)]
            for epoch in done:
                del waiting[epoch.id]
            self._give_up(waiting, len(done))
        return sorted(done, key=lambda epoch: (epoch.start_ns, epoch.id))

    def _give_up(self, waiting: dict[EpochId, list[Records]], completed: int) -> None:
        # Insertion order is arrival order: what still lacks records while many newer epochs are whole has lost them.
        excess = len(waiting) - self._patience if completed else len(waiting) - 4 * self._patience
        for id_ in list(waiting)[: max(0, excess)]:
            self._incomplete += sum(len(part) for part in waiting.pop(id_))

    def counts(self) -> Counts:
        """How many records came, were dropped before, or given up as incomplete epochs."""
        with self._lock:
            return Counts(self._pushed, self._dropped, self._incomplete)


def _split(records: Records, expected: Mapping[int, int]) -> Records:
    """Raw records made whole, once enough are there that it may be worth it."""
    raw = records["side"][records["side"] & UNSPLIT != 0]
    senders = int(np.count_nonzero(raw & SENDER))
    want = expected.get(int(records["program"][0]), 1)
    return split_waits(records) if len(raw) and min(senders, len(raw) - senders) >= want else records


def _complete(records: Records, expected: Mapping[int, int]) -> bool:
    want = expected.get(int(records["program"][0]), 1)
    return int(np.count_nonzero(records["side"] == RECEIVER)) >= want
