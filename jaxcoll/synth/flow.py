"""Minimum cuts: one question, two engines. The native library answers it fast, scipy anywhere.

The question (`FlowGraph.cuts`): which targets can't be sent `limit` units from all demands at once, and what cut stands
in the way? Everything in tree packing is asked in this form: the optimal rate, how much may be split off at a switch,
how many trees may take an edge.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from jaxcoll.errors import SynthesisError

INFINITE = 1 << 60
ABI = 1

CDEF = """
typedef struct jc_flow jc_flow;
int32_t jc_flow_abi(void);
jc_flow* jc_flow_new(int32_t nodes, int32_t arcs, const int32_t* tail, const int32_t* head);
void jc_flow_free(jc_flow* flow);
int32_t jc_flow_cuts(jc_flow* flow, const int64_t* capacity, const int64_t* demand, int32_t groups,
                     const int64_t* group_amount, const int32_t* group_start, const int32_t* group_nodes,
                     int32_t nsources, const int32_t* sources, int32_t nsinks, const int32_t* sinks, int32_t ntargets,
                     const int32_t* targets, int64_t limit, int32_t max_cuts, int64_t* value, int32_t* target,
                     uint8_t* side);
"""


@dataclass(frozen=True)
class Cut:
    """A target that receives only `value`. `small`, `large`: the least and the greatest sink side, as node bit masks."""

    value: int
    target: int
    small: int
    large: int


@dataclass(frozen=True)
class Query:
    """What `FlowGraph.cuts` is asked; see `jc_flow_cuts` in ffi/src/flow/flow.h for the words.

    capacity: per arc; demand: per node; groups: (amount, nodes) demands that any of the nodes serves.
    """

    capacity: Sequence[int]
    demand: Sequence[int]
    limit: int
    targets: Sequence[int] = ()
    sources: Sequence[int] = ()
    sinks: Sequence[int] = ()
    groups: Sequence[tuple[int, Sequence[int]]] = ()
    max_cuts: int = 1


def library_candidates() -> list[Path]:
    """Where the native library may lie, in order of preference."""
    named = os.environ.get("JAXCOLL_TEST_FLOW_LIBRARY") or os.environ.get("JAXCOLL_LIBRARY")
    package = Path(__file__).resolve().parents[1]
    found = [Path(named)] if named else []
    return found + sorted(package.glob("**/libjaxcoll.so"))


@functools.cache
def native() -> tuple[Any, Any] | None:
    """(cffi instance, library), or None where no native library with this interface can be loaded."""
    if os.environ.get("JAXCOLL_TEST_FLOW_LIBRARY") == "none":
        return None
    try:
        import cffi
    except ImportError:
        return None
    ffi = cffi.FFI()
    ffi.cdef(CDEF)
    for path in library_candidates():
        try:
            library: Any = ffi.dlopen(str(path))
            if library.jc_flow_abi() == ABI:
                return ffi, library
        except (OSError, AttributeError):
            continue  # another build, or one without this part: the next candidate, then scipy
    return None


class FlowGraph:
    """A fixed set of arcs over nodes 0..nodes-1, asked for cuts under varying capacities."""

    def __init__(self, nodes: int, tails: Sequence[int], heads: Sequence[int]):
        self.nodes = nodes
        self.tails = np.ascontiguousarray(tails, dtype=np.int32)
        self.heads = np.ascontiguousarray(heads, dtype=np.int32)
        bound = native()
        self._ask: Callable[[Query], list[Cut]] = self._python if bound is None else _Native(self, *bound).ask

    def cuts(self, query: Query) -> list[Cut]:
        """At most `max_cuts` targets (in order) that receive less than `limit`, each with its minimum cut."""
        total = sum(query.demand) + sum(amount for amount, _ in query.groups)
        if max(total, query.limit, max(query.capacity, default=0) * max(1, len(self.tails))) >= INFINITE:
            raise SynthesisError(
                "capacities need numbers beyond 2^60 when brought to a common unit; round them "
                "(Topology.with_capacity, from_measurements(bits=...)) or fix the number of trees (chunks=)"
            )
        return self._ask(query)

    def _python(self, query: Query) -> list[Cut]:
        return _scipy_cuts(self, query)


class _Native:
    """The native engine of one graph."""

    def __init__(self, graph: FlowGraph, ffi: Any, library: Any):
        self._graph, self._ffi, self._library = graph, ffi, library
        handle = library.jc_flow_new(
            graph.nodes, len(graph.tails), self._ints(graph.tails), self._ints(graph.heads)
        )
        if handle == ffi.NULL:
            raise SynthesisError("the native flow network can't be built: too little memory")
        self._handle = ffi.gc(handle, library.jc_flow_free)

    def _ints(self, array: NDArray[np.int32]) -> Any:
        return self._ffi.from_buffer("int32_t[]", array)

    def ask(self, query: Query) -> list[Cut]:
        ffi, nodes = self._ffi, self._graph.nodes
        capacity = np.ascontiguousarray(query.capacity, dtype=np.int64)
        demand = np.ascontiguousarray(query.demand, dtype=np.int64)
        amounts = np.array([amount for amount, _ in query.groups], dtype=np.int64)
        starts = np.cumsum([0, *(len(group) for _, group in query.groups)], dtype=np.int32)
        members = np.array([node for _, group in query.groups for node in group], dtype=np.int32)
        lists = [np.ascontiguousarray(part, dtype=np.int32) for part in (query.sources, query.sinks, query.targets)]
        value, target = np.zeros(query.max_cuts, np.int64), np.zeros(query.max_cuts, np.int32)
        side = np.zeros((query.max_cuts, nodes), np.uint8)
        found = self._library.jc_flow_cuts(
            self._handle, ffi.from_buffer("int64_t[]", capacity), ffi.from_buffer("int64_t[]", demand), len(amounts),
            ffi.from_buffer("int64_t[]", amounts), self._ints(starts), self._ints(members),
            len(lists[0]), self._ints(lists[0]), len(lists[1]), self._ints(lists[1]), len(lists[2]), self._ints(lists[2]),
            query.limit, query.max_cuts, ffi.from_buffer("int64_t[]", value), ffi.from_buffer("int32_t[]", target),
            ffi.from_buffer("uint8_t[]", side),
        )  # fmt: skip
        if found < 0:
            raise SynthesisError("the native flow engine refused its arguments (out of range, or too little memory)")
        return [
            Cut(int(value[i]), int(target[i]), mask_of(side[i] & 1), mask_of(side[i] & 2)) for i in range(found)
        ]


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


def _scipy_cuts(graph: FlowGraph, query: Query) -> list[Cut]:
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

    for tail, head, amount in zip(graph.tails.tolist(), graph.heads.tolist(), query.capacity, strict=True):
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
