"""The rank-permutation table of a schedule: which rank stands at each vertex. It is data, swapped at run time."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.ir import MAX_RANKS, Schedule

_MAGIC = b"JXCT"
_FORMAT = 1
_PREFIX = struct.Struct("<4sHHII")  # magic, format, scope, total bytes, crc of what follows
_BODY = struct.Struct("<QHHHH")  # table version, nranks, ngraphs, steps, reserved
SCOPE_PROGRAM, SCOPE_GRAPH, SCOPE_VERTEX = 0, 1, 2

_Perm = npt.NDArray[np.int16]


@dataclass(frozen=True, eq=False)
class Table:
    """`home[p]`: the rank that position p's chunks belong to; `vertex[g][t][p]`: the rank at vertex (t, p) of graph g.

    `vertex` is int16 [graphs][steps + 1][ranks], read-only; every row and `home` are permutations of the ranks.
    """

    home: tuple[int, ...]
    vertex: _Perm = field(repr=False)
    version: int = 0

    def __post_init__(self) -> None:
        n = len(self.home)
        vertex = np.array(self.vertex, dtype=np.int16)
        if not 1 <= n <= MAX_RANKS or vertex.ndim != 3 or vertex.shape[1] < 1 or vertex.shape[2] != n:
            raise ScheduleError(
                f"table: home has {n} ranks and vertex the shape {vertex.shape}; wanted [graphs, steps + 1, ranks]"
            )
        if not 0 <= self.version < 2**64:
            raise ScheduleError(f"table: version {self.version} is not a 64-bit number")
        ranks = np.arange(n)
        if not np.array_equal(np.sort(np.asarray(self.home)), ranks):
            raise ScheduleError(f"table: home {self.home} is no permutation of 0..{n - 1}")
        bad = np.argwhere((np.sort(vertex, axis=2) != ranks).any(axis=2))
        if len(bad):
            g, t = bad[0]
            raise ScheduleError(f"table: vertex[{g}][{t}] = {vertex[g, t].tolist()} is no permutation of 0..{n - 1}")
        self._freeze(vertex)

    def _freeze(self, vertex: _Perm) -> None:
        vertex.setflags(write=False)
        object.__setattr__(self, "vertex", vertex)
        object.__setattr__(self, "home", tuple(int(r) for r in self.home))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return NotImplemented
        same = self.home == other.home and self.version == other.version
        return same and np.array_equal(self.vertex, other.vertex)

    def __hash__(self) -> int:
        return hash((self.home, self.version, self.vertex.shape, self.vertex.tobytes()))

    @property
    def nranks(self) -> int:
        return len(self.home)

    @property
    def scope(self) -> int:
        """How fine the permutations are: one for the program, one a graph, or one a vertex row."""
        v = self.vertex
        if (v == v[:1, :1]).all():
            return SCOPE_PROGRAM
        return SCOPE_GRAPH if (v == v[:, :1]).all() else SCOPE_VERTEX

    @staticmethod
    def identity(schedule: Schedule, version: int = 0) -> Table:
        """Rank r at position r, everywhere."""
        return Table.uniform(schedule, range(schedule.nranks), version)

    @staticmethod
    def uniform(schedule: Schedule, perm: Sequence[int], version: int = 0) -> Table:
        """One permutation for the whole program, home included: rank perm[p] at position p."""
        shape = (len(schedule.graphs), schedule.steps + 1, schedule.nranks)
        return Table(tuple(perm), np.broadcast_to(np.asarray(perm, dtype=np.int16), shape), version)

    def with_version(self, version: int) -> Table:
        return self._derived(self.home, np.array(self.vertex), version)

    def swap_global(self, a: int, b: int) -> Table:
        """Ranks a and b exchanged everywhere, home included (REACT 5.3.1, transform 1)."""
        names = np.arange(self.nranks, dtype=np.int16)
        self._check_ranks(a, b)
        names[[a, b]] = names[[b, a]]
        return self._derived(tuple(int(names[r]) for r in self.home), names[self.vertex], self.version)

    def swap_graph(self, g: int, a: int, b: int) -> Table:
        """Ranks a and b exchanged in graph g (REACT 5.3.1, transform 2)."""
        self._check_graph(g)
        return self._swapped(g, slice(None), a, b)

    def swap_vertex(self, g: int, t: int, a: int, b: int) -> Table:
        """Ranks a and b exchanged at step t of graph g (REACT 5.3.1, transform 3)."""
        self._check_graph(g)
        if not 0 <= t < self.vertex.shape[1]:
            raise ScheduleError(f"step {t} has no vertices; the table has steps 0..{self.vertex.shape[1] - 1}")
        return self._swapped(g, slice(t, t + 1), a, b)

    def _check_graph(self, g: int) -> None:
        if not 0 <= g < self.vertex.shape[0]:
            raise ScheduleError(f"graph {g} doesn't exist; the table has {self.vertex.shape[0]} graphs")

    def _check_ranks(self, a: int, b: int) -> None:
        for r in (a, b):
            if not 0 <= r < self.nranks:
                raise ScheduleError(f"rank {r} doesn't exist; the table has {self.nranks} ranks")

    def _swapped(self, g: int, steps: slice, a: int, b: int) -> Table:
        self._check_ranks(a, b)
        vertex = np.array(self.vertex)
        part = vertex[g, steps]
        is_a, is_b = part == a, part == b
        part[is_a], part[is_b] = b, a
        return self._derived(self.home, vertex, self.version)

    @staticmethod
    def _derived(home: tuple[int, ...], vertex: _Perm, version: int) -> Table:
        # A swap keeps every row a permutation, so the checks of construction (a sort of everything) are left out.
        table = object.__new__(Table)
        object.__setattr__(table, "home", home)
        object.__setattr__(table, "version", version)
        table._freeze(vertex)
        return table

    def to_bytes(self) -> bytes:
        """The binary form, in the coarsest scope that holds this table."""
        graphs, rows, n = self.vertex.shape
        scope = self.scope
        perms = {SCOPE_PROGRAM: self.vertex[:1, :1], SCOPE_GRAPH: self.vertex[:, :1], SCOPE_VERTEX: self.vertex}[scope]
        if graphs == 0:  # nothing moves, but the reader still expects one permutation
            perms = np.asarray(self.home, dtype=np.int16)
        payload = _BODY.pack(self.version, n, graphs, rows - 1, 0)
        payload += np.asarray(self.home, dtype="<i2").tobytes() + np.ascontiguousarray(perms, dtype="<i2").tobytes()
        return _PREFIX.pack(_MAGIC, _FORMAT, scope, _PREFIX.size + len(payload), zlib.crc32(payload)) + payload

    @staticmethod
    def from_bytes(data: bytes) -> Table:
        """Reads the binary form; `ScheduleError` says which part of it is wrong."""
        scope = _check_prefix(data)
        version, n, graphs, steps, _ = _BODY.unpack_from(data, _PREFIX.size)
        shape = {SCOPE_PROGRAM: (1, 1, n), SCOPE_GRAPH: (graphs, 1, n), SCOPE_VERTEX: (graphs, steps + 1, n)}[scope]
        start = _PREFIX.size + _BODY.size
        expected = start + 2 * (n + int(np.prod(shape)))
        if len(data) != expected:
            raise ScheduleError(f"table: {len(data)} bytes, but its header asks for {expected}")
        values = np.frombuffer(data, dtype="<i2", offset=start)
        vertex = np.broadcast_to(values[n:].reshape(shape), (graphs, steps + 1, n))
        return Table(tuple(values[:n].tolist()), vertex.astype(np.int16), version)


def _check_prefix(data: bytes) -> int:
    if len(data) < _PREFIX.size + _BODY.size:
        raise ScheduleError(f"table: {len(data)} bytes are too few for a header")
    magic, form, scope, total, crc = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise ScheduleError(f"table: starts with {magic!r}, not with {_MAGIC!r}; this is no table")
    if form != _FORMAT:
        raise ScheduleError(f"table: format {form}; this version reads format {_FORMAT}")
    if scope > SCOPE_VERTEX:
        raise ScheduleError(f"table: scope {scope}; known are 0 (program), 1 (graph), 2 (vertex)")
    if total != len(data):
        raise ScheduleError(f"table: {len(data)} bytes, but its header says {total}; it was cut or extended")
    if zlib.crc32(data[_PREFIX.size :]) != crc:
        raise ScheduleError("table: checksum differs; the bytes were damaged")
    return scope
