"""Minimum cuts: one question, two engines. The native library answers it fast, scipy anywhere.

The question (`FlowGraph.cuts`): which targets can't be sent `limit` units from all demands at once, and what cut stands
in the way? Everything in tree packing is asked in this form: the optimal rate, how much may be split off at a switch,
how many trees may take an edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from jaxcoll.errors import SynthesisError
from jaxcoll.synth import native

INFINITE = 1 << 60


@dataclass(frozen=True)
class Cut:
    """A target that receives only `value`. `small`, `large`: the least and greatest sink side, as node bit masks."""

    value: int
    target: int
    small: int
    large: int


@dataclass(frozen=True)
class Query:
    """What `FlowGraph.cuts` is asked; see `jc_flow_cuts` in ffi/src/flow/flow.h for the words.

    capacity: per arc; demand: per node; groups: (amount, nodes) demands that any of the nodes serves.
    """

    capacity: Sequence[int] | NDArray[np.int64]
    demand: Sequence[int]
    limit: int
    targets: Sequence[int] = ()
    sources: Sequence[int] = ()
    sinks: Sequence[int] = ()
    groups: Sequence[tuple[int, Sequence[int]]] = ()
    max_cuts: int = 1


class FlowGraph:
    """A fixed set of arcs over nodes 0..nodes-1, asked for cuts under varying capacities."""

    def __init__(self, nodes: int, tails: Sequence[int], heads: Sequence[int]):
        self.nodes = nodes
        self.tails = np.ascontiguousarray(tails, dtype=np.int32)
        self.heads = np.ascontiguousarray(heads, dtype=np.int32)
        library = native.load()
        self._native = native.Flow(library, nodes, self.tails, self.heads) if library else None

    def cuts(self, query: Query) -> list[Cut]:
        """At most `max_cuts` targets (in order) that receive less than `limit`, each with its minimum cut."""
        total = sum(query.demand) + sum(amount for amount, _ in query.groups)
        widest = int(max(query.capacity)) if len(query.capacity) else 0
        if max(total, query.limit, widest * len(self.tails)) >= INFINITE:
            raise SynthesisError(
                "capacities need numbers beyond 2^60 when brought to a common unit; round them "
                "(Topology.with_capacity, from_measurements(bits=...)) or fix the number of trees (chunks=)"
            )
        if self._native is None:
            return scipy_cuts(self, query)
        found = self._native.cuts(query)
        return [Cut(value, target, mask_of(side & 1), mask_of(side & 2)) for value, target, side in found]


def mask_of(flags: NDArray[Any]) -> int:
    """The bit mask of the non-zero entries."""
    return int.from_bytes(np.packbits(flags != 0, bitorder="little").tobytes(), "little")


def members_of(mask: int) -> list[int]:
    """The set bits of a mask, rising."""
    result: list[int] = []
    while mask:
        low = mask & -mask
        result.append(low.bit_length() - 1)
        mask ^= low
    return result


def scipy_cuts(graph: FlowGraph, query: Query) -> list[Cut]:
    """The same by scipy where the numbers fit its 32 bits, by networkx beyond."""
    found: list[Cut] = []
    for target in query.targets or (-1,):
        arcs = _arcs(graph, query, target)
        source, sink = graph.nodes, graph.nodes + 1
        flow = _small_flow if query.limit < 2**31 - 1 else _big_flow
        value, residual = flow(arcs, source, sink, graph.nodes + 2 + len(query.groups), query.limit)
        if value < query.limit:
            small, large = _sides(residual, source, sink)
            keep = (1 << graph.nodes) - 1
            found.append(Cut(value, target, small & keep, ~large & keep))
            if len(found) == query.max_cuts:
                break
    return found


def _arcs(graph: FlowGraph, query: Query, target: int) -> dict[tuple[int, int], int]:
    """All arcs with super source, super sink and group nodes; nothing above `limit`, which keeps numbers small."""
    source, sink, limit = graph.nodes, graph.nodes + 1, query.limit
    arcs: dict[tuple[int, int], int] = {}

    def add(tail: int, head: int, amount: int) -> None:
        if amount > 0:
            arcs[tail, head] = min(limit, arcs.get((tail, head), 0) + amount)

    for tail, head, amount in zip(graph.tails.tolist(), graph.heads.tolist(), list(query.capacity), strict=True):
        add(tail, head, int(amount))
    for node, amount in enumerate(query.demand):
        add(source, node, int(amount))
    for position, (amount, group) in enumerate(query.groups):
        add(source, sink + 1 + position, amount)
        for node in group:
            add(sink + 1 + position, node, limit)
    for node in query.sources:
        add(source, node, limit)
    for node in (*query.sinks, *((target,) if target >= 0 else ())):
        add(node, sink, limit)
    return arcs


Residual = dict[int, dict[int, int]]


def _residual(arcs: dict[tuple[int, int], int], flow: dict[tuple[int, int], int]) -> Residual:
    left: Residual = {}
    for (tail, head), amount in arcs.items():
        net = flow.get((tail, head), 0)
        left.setdefault(tail, {})
        left.setdefault(head, {})
        left[tail][head] = left[tail].get(head, 0) + amount - max(net, 0)
        left[head][tail] = left[head].get(tail, 0) + max(net, 0)
    return left


def _small_flow(
    arcs: dict[tuple[int, int], int], source: int, sink: int, nodes: int, limit: int
) -> tuple[int, Residual]:
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import maximum_flow

    if not any(head == sink for _, head in arcs) or not any(tail == source for tail, _ in arcs):
        return 0, _residual(arcs, {})
    # A first hop caps the value at `limit`, so nothing overflows 32 bits.
    ends = np.array([*arcs, (nodes, source)], dtype=np.int32)
    amounts = np.array([*arcs.values(), limit], dtype=np.int32)
    matrix = csr_matrix((amounts, (ends[:, 0], ends[:, 1])), shape=(nodes + 1, nodes + 1))
    result: Any = maximum_flow(matrix, nodes, sink)
    rows = result.flow.tocoo()
    flow = {(int(a), int(b)): int(f) for a, b, f in zip(rows.row, rows.col, rows.data, strict=True) if f > 0}
    return int(result.flow_value), _residual(arcs, flow)


def _big_flow(arcs: dict[tuple[int, int], int], source: int, sink: int, nodes: int, limit: int) -> tuple[int, Residual]:
    network: Any = nx.DiGraph()
    network.add_nodes_from(range(nodes + 1))
    network.add_edges_from((tail, head, {"capacity": amount}) for (tail, head), amount in arcs.items())
    network.add_edge(nodes, source, capacity=limit)
    value, flows = nx.maximum_flow(network, nodes, sink)
    return int(value), _residual(arcs, {(a, b): f for a, out in flows.items() for b, f in out.items() if f > 0})


def _sides(residual: Residual, source: int, sink: int) -> tuple[int, int]:
    """(nodes that still reach the sink, nodes that the source still reaches), as masks."""
    reach = [0, 0]
    back: Residual = {}
    for tail, heads in residual.items():
        for head, amount in heads.items():
            if amount > 0:
                back.setdefault(head, {})[tail] = amount
    for which, (start, near) in enumerate(((sink, back), (source, residual))):
        stack, seen = [start], {start}
        while stack:
            for node, amount in near.get(stack.pop(), {}).items():
                if amount > 0 and node not in seen:
                    seen.add(node)
                    stack.append(node)
        reach[which] = sum(1 << node for node in seen)
    return reach[0], reach[1]
