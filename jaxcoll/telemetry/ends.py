"""Waiting told from transferring where an end could only time both together: the GPU's records, raw.

An event pair around a send or a receive spans the wait for the peer and the copy. Both ends run the same copy once
both are there, so the shorter of the two spans is the copy, and what an end's own span has beyond it is waiting. It
takes both ends' records, whichever processes they come from, and no common clock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxcoll.telemetry.record import SENDER, TOGETHER, UNSPLIT, Records

Ints = npt.NDArray[np.int64]

_EXECUTION = ("comm", "site", "launch", "index")


def split_waits(records: Records) -> Records:
    """`records` with `transfer_ns` and `wait_ns` told apart where both ends' raw records are among them.

    Raw records (`side` has the bit UNSPLIT) whose other end is missing stay raw; all others are as they were. Edges
    that ran in one call (TOGETHER) have one transfer: the shortest span of any rank of the call, the last to come.
    """
    raw = np.flatnonzero(records["side"] & UNSPLIT)
    if not len(raw):
        return records
    out = records.copy()
    rows = out[raw]
    flow = _numbered(rows, (*_EXECUTION, "graph", "step", "src", "dst"))
    count = int(flow.max()) + 1
    ends, least = np.zeros(count, np.int64), np.full(count, np.iinfo(np.int64).max)
    np.bitwise_or.at(ends, flow, 1 << (rows["side"] & SENDER).astype(np.int64))
    np.minimum.at(least, flow, rows["transfer_ns"].astype(np.int64))
    whole = (ends == 3)[flow]
    transfer = least[flow]
    shared = np.flatnonzero(rows["side"] & TOGETHER)
    if len(shared):
        call = _calls(rows[shared])
        incomplete = np.zeros(int(call.max()) + 1, np.bool_)
        shortest = np.full(len(incomplete), np.iinfo(np.int64).max)
        np.logical_or.at(incomplete, call, ~whole[shared])
        np.minimum.at(shortest, call, transfer[shared])
        whole[shared], transfer[shared] = ~incomplete[call], shortest[call]
    own = rows["transfer_ns"].astype(np.int64)
    rows["wait_ns"] = np.where(whole, own - transfer, rows["wait_ns"])
    rows["transfer_ns"] = np.where(whole, transfer, own)
    rows["side"] = np.where(whole, rows["side"] & SENDER, rows["side"])
    out[raw] = rows
    return out


def _numbered(rows: Records, fields: tuple[str, ...]) -> Ints:
    """The same number for rows that agree in `fields`, counted from 0."""
    keys = np.stack([rows[name].astype(np.uint64).view(np.int64) for name in fields])
    return np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)


def _calls(rows: Records) -> Ints:
    """The number of the call of each row: at one step of one execution, ranks that edges join share a call."""
    moment = _numbered(rows, (*_EXECUTION, "step")).tolist()
    leader: dict[tuple[int, int], tuple[int, int]] = {}

    def find(rank: tuple[int, int]) -> tuple[int, int]:
        while (up := leader.setdefault(rank, rank)) != rank:
            rank = up
        return rank

    src, dst = rows["src"].tolist(), rows["dst"].tolist()
    for m, a, b in zip(moment, src, dst, strict=True):
        leader[find((m, a))] = find((m, b))
    number: dict[tuple[int, int], int] = {}
    return np.array([number.setdefault(find((m, a)), len(number)) for m, a in zip(moment, src, strict=True)], np.int64)
