"""A routing of whole chunks as a schedule of the common form.

Hop i of every path runs in step i. A switch is crossed within its step, so an edge joins two ranks; a rank on the way
holds the foreign chunk
between two steps. Units of one pair that take the same path become one chunk with their number as its weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxcoll.schedule.columns import ChunkColumns, EdgeColumns
from jaxcoll.schedule.ir import ChunkGraph, Collective, Kind, Op, Schedule
from jaxcoll.synth.alltoall_net import IntArray, Net
from jaxcoll.synth.alltoall_round import Routing
from jaxcoll.synth.pricing import Int32Array


@dataclass(frozen=True)
class _Merged:
    """Distinct paths: `source`, `dest`, `weight` int64 [chunks]; `path` int32 [chunks, hops]."""

    source: IntArray
    dest: IntArray
    weight: IntArray
    path: Int32Array


def _merge(routing: Routing) -> _Merged:
    if routing.chunks == 1:
        return _Merged(routing.source, routing.dest, np.ones(len(routing.source), np.int64), routing.path)
    table = np.column_stack([np.arange(len(routing.source)) // routing.chunks, routing.path])
    order = np.lexsort(table.T[::-1])
    new = np.ones(len(order), dtype=bool)
    new[1:] = (table[order[1:]] != table[order[:-1]]).any(axis=1)
    first = np.flatnonzero(new)
    pick = order[first]
    return _Merged(routing.source[pick], routing.dest[pick], np.diff(np.append(first, len(order))), routing.path[pick])


def hops(net: Net, path: Int32Array) -> IntArray:
    """Rank-to-rank hops of every path, int64 [paths]."""
    return ((path >= 0) & (np.append(net.head, net.ranks)[path] < net.ranks)).sum(axis=1)


def _moves(net: Net, merged: _Merged) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(chunk, step, from rank, to rank) of every hop, int64 each."""
    holder, step = merged.source.copy(), np.zeros(len(merged.source), np.int64)
    parts: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    for column in merged.path.T:
        at = np.flatnonzero(column >= 0)
        to = net.head[column[at]]
        arrive = to < net.ranks
        at, to = at[arrive], to[arrive]
        parts.append((at, step[at].copy(), holder[at].copy(), to))
        holder[at] = to
        step[at] += 1
    return tuple(np.concatenate(p) for p in zip(*parts, strict=True))  # type: ignore[return-value]


def to_schedule(net: Net, routing: Routing, name: str) -> Schedule:
    """The schedule of `routing` under the identity table; its steps are the hops of the longest path."""
    merged = _merge(routing)
    chunk, step, src, dst = _moves(net, merged)
    order = np.lexsort((chunk, (step * net.ranks + src) * net.ranks + dst))
    chunk, step, src, dst = chunk[order] + net.ranks, step[order], src[order], dst[order]
    key = (step * net.ranks + src) * net.ranks + dst
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    edges = EdgeColumns(
        step[starts], src[starts], dst[starts], np.full(len(starts), int(Op.COPY)), np.append(starts, len(chunk)), chunk
    )
    own = np.arange(net.ranks)  # the blocks that stay where they are
    cut = ChunkColumns(
        np.concatenate([own, merged.source]),
        np.concatenate([own, merged.dest]),
        np.concatenate([np.ones(net.ranks, np.int64), merged.weight]),
    )
    graphs = (ChunkGraph.of_columns(edges, 0, len(edges)),)
    return Schedule.of_columns(name, Collective(Kind.ALL_TO_ALL, net.ranks), int(step.max()) + 1, cut, edges, graphs)
