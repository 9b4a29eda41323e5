"""The native half of tree packing and of pricing (ffi/src/flow), bound with cffi.

Where it is missing, Python does the same slower.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from jaxcoll import flowlib
from jaxcoll.errors import SynthesisError
from jaxcoll.flowlib import Library, as_bytes, as_int32, as_int64

CDEF = """
typedef struct jc_flow jc_flow;
jc_flow* jc_flow_new(int32_t nodes, int32_t arcs, const int32_t* tail, const int32_t* head);
void jc_flow_free(jc_flow* flow);
int32_t jc_flow_cuts(jc_flow* flow, const int64_t* capacity, const int64_t* demand, int32_t groups,
                     const int64_t* group_amount, const int32_t* group_start, const int32_t* group_nodes,
                     int32_t nsources, const int32_t* sources, int32_t nsinks, const int32_t* sinks, int32_t ntargets,
                     const int32_t* targets, int64_t limit, int32_t max_cuts, int64_t* value, int32_t* target,
                     uint8_t* side);
typedef struct jc_pack jc_pack;
typedef int32_t (*jc_pack_tick)(double done);
jc_pack* jc_pack_new(int32_t ranks, int32_t arcs, const int32_t* tail, const int32_t* head, const int64_t* capacity,
                     int32_t ncuts, const uint8_t* cuts, int32_t max_depth);
void jc_pack_free(jc_pack* pack);
int32_t jc_pack_run(jc_pack* pack, int32_t orders, const int32_t* root, const int64_t* count, const int32_t* hint_start,
                    const int32_t* hint_tail, const int32_t* hint_head, jc_pack_tick tick);
void jc_pack_stats(const jc_pack* pack, int64_t* stats);
void jc_pack_take(const jc_pack* pack, int32_t* root, int64_t* count, int32_t* tail, int32_t* head, uint8_t* cuts);
typedef struct jc_paths jc_paths;
typedef struct jc_paths_trees jc_paths_trees;
jc_paths* jc_paths_new(int32_t ranks, int32_t nodes, int32_t arcs, const int32_t* tail, const int32_t* head);
void jc_paths_free(jc_paths* paths);
jc_paths_trees* jc_paths_grow(jc_paths* paths, int32_t steps, const double* weight, int32_t count,
                              const int32_t* source, const double* scale, const double* noise, const int64_t* offset,
                              const int64_t* want_start, const int32_t* want);
void jc_paths_trees_free(jc_paths_trees* trees);
void jc_paths_dist(const jc_paths_trees* trees, double* dist);
int64_t jc_paths_loads(jc_paths_trees* trees);
void jc_paths_loads_take(const jc_paths_trees* trees, int64_t* start, int64_t* arc, double* units);
int32_t jc_paths_longest(const jc_paths_trees* trees, int64_t count, const int64_t* tree, const int64_t* dest);
void jc_paths_take(const jc_paths_trees* trees, int64_t count, const int64_t* tree, const int64_t* dest, int32_t width,
                   int32_t* path);
"""

_DONE, _STUCK, _CANCELLED = 0, 1, 2

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
ByteArray = NDArray[np.uint8]


def load() -> Library | None:
    """The library, or None where none with this interface can be loaded."""
    return flowlib.load(CDEF)


class FlowQuery(Protocol):
    """The fields of `flow.Query` that travel."""

    @property
    def capacity(self) -> Sequence[int] | Int64Array: ...
    @property
    def demand(self) -> Sequence[int]: ...
    @property
    def limit(self) -> int: ...
    @property
    def targets(self) -> Sequence[int]: ...
    @property
    def sources(self) -> Sequence[int]: ...
    @property
    def sinks(self) -> Sequence[int]: ...
    @property
    def groups(self) -> Sequence[tuple[int, Sequence[int]]]: ...
    @property
    def max_cuts(self) -> int: ...


class Flow:
    """A native flow network."""

    def __init__(self, library: Library, nodes: int, tails: Int32Array, heads: Int32Array):
        self._library, self._nodes = library, nodes
        handle = library.lib.jc_flow_new(nodes, len(tails), as_int32(library, tails), as_int32(library, heads))
        if handle == library.ffi.NULL:
            raise SynthesisError("the native flow network can't be built: bad arcs, or too little memory")
        self._handle = library.ffi.gc(handle, library.lib.jc_flow_free)

    def cuts(self, query: FlowQuery) -> list[tuple[int, int, ByteArray]]:
        """(value, target, side uint8[nodes]) of every shortage found, as jc_flow_cuts gives them."""
        lib = self._library
        amounts = np.array([amount for amount, _ in query.groups], dtype=np.int64)
        starts = np.cumsum([0, *(len(group) for _, group in query.groups)], dtype=np.int32)
        members = np.array([node for _, group in query.groups for node in group], dtype=np.int32)
        value, target = np.zeros(query.max_cuts, np.int64), np.zeros(query.max_cuts, np.int32)
        side = np.zeros((query.max_cuts, self._nodes), np.uint8)
        lists: list[Any] = []
        for part in (query.sources, query.sinks, query.targets):
            lists += [len(part), as_int32(lib, part)]
        found = lib.lib.jc_flow_cuts(
            self._handle, as_int64(lib, query.capacity), as_int64(lib, query.demand), len(amounts),
            as_int64(lib, amounts), as_int32(lib, starts), as_int32(lib, members), *lists, query.limit, query.max_cuts,
            as_int64(lib, value), as_int32(lib, target), as_bytes(lib, side),
        )  # fmt: skip
        if found < 0:
            raise SynthesisError("the native flow engine refused its arguments (out of range, or too little memory)")
        return [(int(value[i]), int(target[i]), side[i]) for i in range(found)]


@dataclass(frozen=True)
class Packed:
    """What jc_pack_run left: trees (root, count, edges int32[ranks - 1, 2]), cuts, counts; `stuck` is -1 or not."""

    root: Int32Array
    count: Int64Array
    edges: Int32Array
    cuts: ByteArray
    checks: int
    rollbacks: int
    regrown: int
    stuck: int


def pack(
    library: Library,
    ranks: int,
    arcs: tuple[Int32Array, Int32Array, Int64Array],
    cuts: ByteArray,
    max_depth: int,
    orders: tuple[Int32Array, Int64Array, Int32Array, Int32Array, Int32Array],
    tick: Callable[[float | None], None],
) -> Packed:
    """Runs the native packer; arguments as jc_pack_new and jc_pack_run take them."""
    ffi, lib = library.ffi, library.lib
    tails, heads, capacity = arcs
    handle = lib.jc_pack_new(
        ranks, len(tails), as_int32(library, tails), as_int32(library, heads), as_int64(library, capacity),
        len(cuts), as_bytes(library, cuts), max_depth,
    )  # fmt: skip
    if handle == ffi.NULL:
        raise SynthesisError("the native packer refused its arguments (arcs not sorted, or too little memory)")
    handle = ffi.gc(handle, lib.jc_pack_free)
    stop: list[BaseException] = []

    def report(done: float) -> int:
        try:
            tick(done)
        except BaseException as error:  # carried over the C frames, raised below
            stop.append(error)
            return 1
        return 0

    root, count, start, hint_tail, hint_head = orders
    callback = ffi.callback("int32_t(double)", report)
    status = lib.jc_pack_run(
        handle, len(root), as_int32(library, root), as_int64(library, count), as_int32(library, start),
        as_int32(library, hint_tail), as_int32(library, hint_head), callback,
    )  # fmt: skip
    if stop:
        raise stop[0]
    if status not in (_DONE, _STUCK):
        raise SynthesisError("the native packer refused its orders (out of range, or too little memory)")
    return _collect(library, handle, ranks, status == _STUCK)


def _collect(library: Library, handle: Any, ranks: int, stuck: bool) -> Packed:
    stats = np.zeros(6, np.int64)
    library.lib.jc_pack_stats(handle, as_int64(library, stats))
    trees, known, checks, rollbacks, regrown, complete = stats.tolist()
    root, count = np.zeros(trees, np.int32), np.zeros(trees, np.int64)
    tail, head = np.zeros(trees * (ranks - 1), np.int32), np.zeros(trees * (ranks - 1), np.int32)
    cuts = np.zeros((known, (ranks + 7) // 8), np.uint8)
    library.lib.jc_pack_take(
        handle, as_int32(library, root), as_int64(library, count), as_int32(library, tail), as_int32(library, head),
        as_bytes(library, cuts),
    )  # fmt: skip
    edges = np.stack([tail, head], axis=1).reshape(trees, ranks - 1, 2)
    return Packed(root, count, edges, cuts, checks, rollbacks, regrown, complete if stuck else -1)
