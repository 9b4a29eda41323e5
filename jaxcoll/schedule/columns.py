"""Edges and chunks as arrays: the form in which long schedules are made, checked, encoded and simulated.

A synthesiser for 512 ranks makes half a million edges; as Python objects they take longer than finding them. A
schedule made from columns builds the objects of `Schedule.chunks` and `ChunkGraph.edges` only when somebody asks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import ScheduleError

IntArray = npt.NDArray[np.int64]
NONE = -1  # in place of a position that the collective's chunks don't name


@dataclass(frozen=True, slots=True, eq=False)
class EdgeColumns:
    """Edges as int64 arrays, one row an edge; edge i carries `chunk[first[i]:first[i + 1]]`. Made read-only."""

    step: IntArray
    src: IntArray
    dst: IntArray
    op: IntArray
    first: IntArray
    chunk: IntArray

    def __post_init__(self) -> None:
        for column in (self.step, self.src, self.dst, self.op, self.first, self.chunk):
            column.setflags(write=False)

    def __len__(self) -> int:
        return len(self.step)

    @property
    def fan(self) -> IntArray:
        """Chunks on every edge."""
        return np.diff(self.first)

    def fault(self, steps: int, ranks: int, chunks: int) -> str:
        """What is out of range, or nothing: the rules of `Schedule` for its edges, for all of them at once."""
        checks = (("step", self.step, steps), ("src", self.src, ranks), ("dst", self.dst, ranks))
        for what, column, limit in (*checks, ("op", self.op, 2), ("chunk", self.chunk, chunks)):
            if len(column) and (int(column.min()) < 0 or int(column.max()) >= limit):
                wrong = int(column[(column < 0) | (column >= limit)][0])
                return f"{what} of an edge is {wrong}; it must lie in 0..{limit - 1}"
        fan = self.fan
        if len(fan) and int(fan.min()) < 1:
            return f"edge {int(fan.argmin())} carries no chunk; leave it out"
        if len(self.chunk) > len(fan):  # else there is one chunk an edge, and none can come twice
            key = np.repeat(np.arange(len(fan)), fan) * chunks + self.chunk
            if not (key[1:] > key[:-1]).all():
                key.sort()
            twice = np.flatnonzero(key[1:] == key[:-1])
            if len(twice):
                edge, chunk = divmod(int(key[twice[0]]), chunks)
                return f"edge {edge} carries chunk {chunk} twice"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkColumns:
    """Chunks as int64 arrays, one row a chunk; `src` and `dst` are `NONE` where the collective names no position."""

    src: IntArray
    dst: IntArray
    weight: IntArray

    def __post_init__(self) -> None:
        for column in (self.src, self.dst, self.weight):
            column.setflags(write=False)

    def __len__(self) -> int:
        return len(self.weight)

    def check(self, has_src: bool, has_dst: bool, ranks: int, most: int) -> None:
        """Raises ScheduleError where a chunk names positions that it must not, or numbers out of range."""
        ends = (("src", self.src, has_src), ("dst", self.dst, has_dst))
        limits = [(what, column, (0, ranks - 1) if named else (NONE, NONE)) for what, column, named in ends]
        for what, column, (low, high) in (*limits, ("weight", self.weight, (0, most))):
            bad = np.flatnonzero((column < low) | (column > high))
            if len(bad):
                raise ScheduleError(f"{what} of chunk {bad[0]} is {column[bad[0]]}; it must lie in {low}..{high}")
