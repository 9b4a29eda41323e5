"""A routing as a schedule of the common form.

Hop i of every path runs in step i. A switch is crossed within its step, so an edge joins two ranks; a rank on the way
holds the foreign chunk
between two steps. A bundle is a chunk, with its parts as the weight.
"""

from __future__ import annotations

import numpy as np

from jaxcoll.schedule.columns import ChunkColumns, EdgeColumns
from jaxcoll.schedule.ir import ChunkGraph, Collective, Kind, Op, Schedule
from jaxcoll.synth.alltoall_net import IntArray, Net
from jaxcoll.synth.alltoall_routing import Routing
from jaxcoll.synth.path_trees import Int32Array


def hops(net: Net, path: Int32Array) -> IntArray:
    """Rank-to-rank hops of every path, int64 [paths]."""
    return ((path >= 0) & (np.append(net.head, net.ranks)[path] < net.ranks)).sum(axis=1)


def _moves(net: Net, routing: Routing) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """(chunk, step, from rank, to rank) of every hop, int64 each."""
    holder, step = routing.source.copy(), np.zeros(len(routing.source), np.int64)
    parts: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    for column in routing.path.T:
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
    chunk, step, src, dst = _moves(net, routing)
    total = len(routing.source) + net.ranks
    # One key a hop, sorted by edge and chunk: sorting numbers is faster than finding an order.
    key = np.sort(((step * net.ranks + src) * net.ranks + dst) * total + chunk + net.ranks)
    edge, chunk = np.divmod(key, total)
    starts = np.flatnonzero(np.diff(edge, prepend=-1))
    first, dst = np.divmod(edge[starts], net.ranks)
    step, src = np.divmod(first, net.ranks)
    op = np.full(len(starts), int(Op.COPY))
    edges = EdgeColumns(step, src, dst, op, np.append(starts, len(chunk)), chunk)
    own = np.arange(net.ranks)  # the blocks that stay where they are
    cut = ChunkColumns(
        np.concatenate([own, routing.source]),
        np.concatenate([own, routing.dest]),
        np.concatenate([np.full(net.ranks, routing.parts), routing.weight]),
    )
    graphs = (ChunkGraph.of_columns(edges, 0, len(edges)),)
    return Schedule.of_columns(name, Collective(Kind.ALL_TO_ALL, net.ranks), int(step.max()) + 1, cut, edges, graphs)
