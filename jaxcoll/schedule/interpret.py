"""Runs a schedule in NumPy, to the letter of the schedule form: the oracle for every executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import ScheduleError, ScheduleInvalid
from jaxcoll.schedule.ir import Edge, Kind, Op, Schedule
from jaxcoll.schedule.table import Table

Array = npt.NDArray[Any]


def _maximum(a: Array, b: Array) -> Array:
    """Of two zeros +0 is the larger one, in whatever order they come."""
    largest = np.maximum(a, b)
    return np.where(a == b, np.copysign(a, np.where(np.signbit(a), b, a)), largest) if a.dtype.kind == "f" else largest


def _minimum(a: Array, b: Array) -> Array:
    return -_maximum(-a, -b) if a.dtype.kind == "f" else np.minimum(a, b)


_COMBINE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": _maximum,
    "min": _minimum,
}
_NARROW_FLOATS = ("float16", "bfloat16", "float8_", "float6_", "float4_")  # by name: their package isn't imported here
_NARROW_INTS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4}


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which partial results of `dtype` are kept: float32 for narrower floats, int32 for sub-byte ints."""
    if dtype.name.startswith(_NARROW_FLOATS):
        return np.dtype(np.float32)
    return np.dtype(np.int32) if dtype.name in _NARROW_INTS else dtype


def _narrowed(value: Array, dtype: np.dtype[Any]) -> Array:
    if dtype.name in _NARROW_INTS:  # wrap, as the wider integers do
        bits = _NARROW_INTS[dtype.name]
        value = value & ((1 << bits) - 1)
        if not dtype.name.startswith("u"):
            value = np.where(value >= 1 << (bits - 1), value - (1 << bits), value)
    return value.astype(dtype)


def interpret(
    schedule: Schedule, inputs: Sequence[Array], reduce: str = "sum", table: Table | None = None
) -> list[Array]:
    """The result of every rank.

    `inputs`: one 1-D array a rank, its blocks one behind the other, all of one dtype and length; `reduce`: sum, prod,
    max or min (ignored where nothing is reduced). Returns one 1-D array a rank in the inputs' dtype, blocks likewise;
    ranks that get no result (all but the root of a reduce, the rest of a permutation) get zeros. Floats narrower than
    float32 are summed in float32 and rounded once, when the value is complete; -0 is less than +0. Raises
    `ScheduleInvalid` where the schedule can't run on: a rank sends or must return what it doesn't hold, or a copy meets
    another write.
    """
    return _Run(schedule, inputs, reduce, table or Table.identity(schedule)).result()


class _Run:
    def __init__(self, schedule: Schedule, inputs: Sequence[Array], reduce: str, table: Table):
        self.schedule, self.table = schedule, table
        self.n = _block_length(schedule, inputs)
        self.dtype = inputs[0].dtype
        self.ranges = schedule.ranges(self.n)
        self.combine = _combiner(reduce)
        if table.vertex.shape != (len(schedule.graphs), schedule.steps + 1, schedule.nranks):
            raise ScheduleError("the table belongs to another schedule; use Table.identity(schedule) and its swaps")
        self.values: dict[tuple[int, int], Array] = {}  # (chunk, rank) -> value, replaced and never written into
        for c, rank in self._sources():
            begin, end = self._place(c, self.schedule.chunks[c].dst if schedule.collective.input_blocks > 1 else None)
            self.values[c, rank] = inputs[rank][begin:end].astype(wide_dtype(self.dtype))

    def _sources(self) -> list[tuple[int, int]]:
        kind, home = self.schedule.kind, self.table.home
        pairs: list[tuple[int, int]] = []
        for c, chunk in enumerate(self.schedule.chunks):
            if kind.reduces:
                pairs += [(c, r) for r in range(self.schedule.nranks)]
            else:
                position = self.schedule.collective.root if chunk.src is None else chunk.src
                pairs.append((c, home[position or 0]))
        return pairs

    def _place(self, chunk: int, block_position: int | None) -> tuple[int, int]:
        """Begin and end of a chunk in a buffer; blocks are numbered by the rank that the position belongs to."""
        offset = 0 if block_position is None else self.table.home[block_position] * self.n
        begin, end = self.ranges[chunk].tolist()
        return offset + begin, offset + end

    def result(self) -> list[Array]:
        for t in range(self.schedule.steps):
            for g, graph in enumerate(self.schedule.graphs):
                self._step(g, t, [e for e in graph.edges if e.step == t])
        blocks = self.schedule.collective.output_blocks
        outputs = [np.zeros(self.n * blocks, dtype=self.dtype) for _ in range(self.schedule.nranks)]
        for c, chunk in enumerate(self.schedule.chunks):
            begin, end = self._place(c, chunk.src if blocks > 1 else None)
            for rank in self._dests(c):
                if begin < end:
                    outputs[rank][begin:end] = _narrowed(self._held(c, rank, "must return"), self.dtype)
        return outputs

    def _dests(self, chunk: int) -> list[int]:
        kind, home = self.schedule.kind, self.table.home
        if kind.has_dst:
            return [home[self.schedule.chunks[chunk].dst or 0]]
        return [home[self.schedule.collective.root or 0]] if kind is Kind.REDUCE else list(range(self.schedule.nranks))

    def _held(self, chunk: int, rank: int, verb: str) -> Array:
        value = self.values.get((chunk, rank))
        if value is None:
            raise ScheduleInvalid(f"rank {rank} {verb} chunk {chunk}, which it doesn't hold; `verify` lists all faults")
        return value

    def _step(self, g: int, t: int, edges: list[Edge]) -> None:
        # Graphs share no chunk, so running a step graph by graph reads nothing that another graph wrote in this step.
        before, after = self.table.vertex[g, t], self.table.vertex[g, t + 1]
        arrivals: dict[tuple[int, int], list[tuple[Edge, Array]]] = {}
        for e in edges:
            for c in e.chunks:
                arrivals.setdefault((c, e.dst), []).append((e, self._held(c, int(before[e.src]), "sends")))
        for (c, position), incoming in arrivals.items():
            self._arrive((c, int(after[position])), position, incoming)

    def _arrive(self, at: tuple[int, int], position: int, incoming: list[tuple[Edge, Array]]) -> None:
        if any(e.op is Op.COPY for e, _ in incoming):
            if len(incoming) > 1:
                step = incoming[0][0].step
                raise ScheduleInvalid(f"chunk {at[0]} of rank {at[1]}: a copy meets another write in step {step}")
            self.values[at] = incoming[0][1]
            return
        terms = [(e.src, value) for e, value in incoming]
        if at in self.values:
            terms.insert(0, (position, self.values[at]))
        if self.schedule.canonical:
            terms.sort(key=lambda term: term[0])
        value = terms[0][1]
        for _, other in terms[1:]:
            value = self.combine(value, other)
        self.values[at] = value


def _combiner(reduce: str) -> Callable[[Array, Array], Array]:
    if reduce not in _COMBINE:
        raise ScheduleError(f"unknown reduction {reduce!r}; known are {', '.join(_COMBINE)}")
    return _COMBINE[reduce]


def _block_length(schedule: Schedule, inputs: Sequence[Array]) -> int:
    blocks = schedule.collective.input_blocks
    if len(inputs) != schedule.nranks:
        raise ScheduleError(f"{len(inputs)} inputs for {schedule.nranks} ranks; give one a rank")
    first = inputs[0]
    for rank, array in enumerate(inputs):
        if array.ndim != 1 or array.shape != first.shape or array.dtype != first.dtype:
            raise ScheduleError(
                f"the input of rank {rank} is {array.dtype}{list(array.shape)}, that of rank 0 "
                f"{first.dtype}{list(first.shape)}; all must be 1-D, of one dtype and length"
            )
    if len(first) % blocks:
        raise ScheduleError(f"{len(first)} elements a rank can't be cut into {blocks} equal blocks")
    return len(first) // blocks
