"""A schedule under a table, as flows between ranks with what each waits for."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from jaxcoll.schedule import Op, Schedule, Table

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The edges of a schedule in its own order (`Schedule.edges`), as columns.

    `src`, `dst` are ranks, `size` bytes, `lanes` the pipeline depth. Edge `child[i]` may not send (a lane) before
    `parent[i]` has brought it. `free` marks edges that wait for none.
    """

    src: IntArray
    dst: IntArray
    graph: IntArray
    step: IntArray
    size: npt.NDArray[np.float64]
    child: IntArray
    parent: IntArray
    lanes: int

    @functools.cached_property
    def free(self) -> npt.NDArray[np.bool_]:
        """Which edges depend on no other edge."""
        free = np.ones(len(self.src), bool)
        free[self.child] = False
        return free


def plan(schedule: Schedule, table: Table, nbytes: int) -> Plan:
    """The plan for blocks of `nbytes` bytes."""
    pattern = _pattern(schedule)
    src = table.vertex[pattern.graph, pattern.step, pattern.src].astype(np.int64)
    dst = table.vertex[pattern.graph, pattern.step + 1, pattern.dst].astype(np.int64)
    uniform = table.vertex.shape[1] < 2 or bool((table.vertex == table.vertex[:, :1]).all())
    child, parent = pattern.deps if uniform else _dependencies(schedule, src, dst)
    return Plan(src, dst, pattern.graph, pattern.step, _sizes(schedule, nbytes), child, parent, schedule.pipeline)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pattern:
    src: IntArray
    dst: IntArray
    graph: IntArray
    step: IntArray
    deps: tuple[IntArray, IntArray]


@functools.lru_cache(maxsize=256)
def _pattern_of(key: _ById) -> _Pattern:
    schedule = key.schedule
    src, dst, step = schedule.columns.src, schedule.columns.dst, schedule.columns.step
    # With one permutation a graph, ranks are positions renamed: what depends on what stays the same.
    return _Pattern(src, dst, schedule.edge_graph, step, _dependencies(schedule, src, dst))


@functools.lru_cache(maxsize=512)
def _sizes_of(key: _ById, nbytes: int) -> npt.NDArray[np.float64]:
    schedule = key.schedule
    ranges = schedule.ranges(nbytes)
    length = (ranges[:, 1] - ranges[:, 0]).astype(np.float64)
    flows = schedule.flows
    size = np.zeros(len(schedule.columns))
    np.add.at(size, flows.edge, length[flows.chunk])
    size.setflags(write=False)
    return size


class _ById:
    """A schedule as a cache key: by identity, since hashing all its edges at every look-up costs more than the work."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def __hash__(self) -> int:
        return id(self.schedule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.schedule is self.schedule


def _pattern(schedule: Schedule) -> _Pattern:
    return _pattern_of(_ById(schedule))


def _sizes(schedule: Schedule, nbytes: int) -> npt.NDArray[np.float64]:
    return _sizes_of(_ById(schedule), nbytes)


def _dependencies(schedule: Schedule, src: IntArray, dst: IntArray) -> tuple[IntArray, IntArray]:
    """(child, parent): an edge needs all that was written into its chunks at its sender since the last overwriting."""
    flows = schedule.flows
    writers: dict[tuple[int, int], list[int]] = {}
    pairs: set[tuple[int, int]] = set()
    copy = int(Op.COPY)
    for step in range(schedule.steps):
        rows = flows.at(step)
        edges, chunks, ops = flows.edge[rows].tolist(), flows.chunk[rows].tolist(), flows.op[rows].tolist()
        for edge, chunk in zip(edges, chunks, strict=True):
            pairs.update((edge, writer) for writer in writers.get((chunk, int(src[edge])), ()))
        for edge, chunk, op in zip(edges, chunks, ops, strict=True):
            key = (chunk, int(dst[edge]))
            if op == copy:
                writers[key] = [edge]
            else:
                writers.setdefault(key, []).append(edge)
    ordered = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return ordered[:, 0].copy(), ordered[:, 1].copy()
