"""The binary form of a schedule (version 1, little-endian), the one that the native executor loads."""

from __future__ import annotations

import itertools
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.columns import IntArray
from jaxcoll.schedule.ir import Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule

MAGIC = b"JXCP"
VERSION = 1
FLAG_CANONICAL = 1

_PREFIX = struct.Struct("<4sHHII")  # magic, version, flags, total bytes, crc of what follows
_HEADER = struct.Struct("<BBHhHHHIII")  # kind, -, nranks, root, steps, graphs, pipeline, chunks, edges, refs
_NAME_LEN = struct.Struct("<H")
_CHUNK = np.dtype([("src", "<i2"), ("dst", "<i2"), ("weight", "<u4")])
_GRAPH = np.dtype([("first", "<u4"), ("count", "<u4")])
_EDGE = np.dtype(
    [("step", "<u2"), ("src", "<u2"), ("dst", "<u2"), ("op", "u1"), ("pad", "u1"), ("first", "<u4"), ("count", "<u4")]
)
_REF = np.dtype("<u4")


def _opt(position: int | None) -> int:
    return -1 if position is None else position


def _table(dtype: np.dtype[np.void], **columns: IntArray) -> npt.NDArray[np.void]:
    rows = np.zeros(len(next(iter(columns.values()))), dtype)
    for name, column in columns.items():
        rows[name] = column
    return rows


def encode(schedule: Schedule) -> bytes:
    """The schedule's bytes. Names of chunk graphs aren't part of the binary form."""
    s, edges, cut = schedule, schedule.columns, schedule.chunk_columns
    sizes = np.array([g.size for g in s.graphs], dtype=np.int64)
    refs = edges.chunk.astype(_REF)
    root, sizes_of = _opt(s.collective.root), (len(cut), len(edges), len(refs))
    header = _HEADER.pack(s.kind, 0, s.nranks, root, s.steps, len(s.graphs), s.pipeline, *sizes_of)
    name = s.name.encode()
    head = header + _NAME_LEN.pack(len(name)) + name
    head += b"\0" * (-(_PREFIX.size + len(head)) % 4)
    chunks = _table(_CHUNK, src=cut.src, dst=cut.dst, weight=cut.weight)
    graphs = _table(_GRAPH, first=np.cumsum(sizes) - sizes, count=sizes)
    ends = {"step": edges.step, "src": edges.src, "dst": edges.dst, "op": edges.op}
    table = _table(_EDGE, **ends, first=edges.first[:-1], count=edges.fan)
    payload = head + chunks.tobytes() + graphs.tobytes() + table.tobytes() + refs.tobytes()
    flags = FLAG_CANONICAL if s.canonical else 0
    return _PREFIX.pack(MAGIC, VERSION, flags, _PREFIX.size + len(payload), zlib.crc32(payload)) + payload


@dataclass
class _Reader:
    """Takes parts off the bytes, and says which part is missing when they run out."""

    data: bytes
    at: int

    def unpack(self, form: struct.Struct, what: str) -> tuple[int, ...]:
        self._need(form.size, what)
        values = form.unpack_from(self.data, self.at)
        self.at += form.size
        return values

    def bytes(self, size: int, what: str) -> bytes:
        self._need(size, what)
        self.at += size
        return self.data[self.at - size : self.at]

    def array(self, dtype: np.dtype[np.void] | np.dtype[np.uint32], count: int, what: str) -> npt.NDArray[np.generic]:
        self._need(dtype.itemsize * count, what)
        values = np.frombuffer(self.data, dtype=dtype, count=count, offset=self.at)
        self.at += dtype.itemsize * count
        return values

    def _need(self, size: int, what: str) -> None:
        if size > len(self.data) - self.at:
            raise ScheduleError(
                f"schedule: the bytes end inside the {what} (offset {self.at}, {len(self.data)} bytes in all)"
            )


def decode(data: bytes) -> Schedule:
    """Reads `encode`'s bytes, trusting none of them; `ScheduleError` names the part that is wrong."""
    flags = _check_prefix(data)
    reader = _Reader(data, _PREFIX.size)
    kind, _, nranks, root, steps, ngraphs, pipeline, nchunks, nedges, nrefs = reader.unpack(_HEADER, "header")
    name = _read_name(reader)
    chunks = reader.array(_CHUNK, nchunks, "chunks").tolist()
    graphs = reader.array(_GRAPH, ngraphs, "graphs").tolist()
    rows = reader.array(_EDGE, nedges, "edges").tolist()
    refs = reader.array(_REF, nrefs, "chunk references").tolist()
    if reader.at != len(data):
        raise ScheduleError(f"schedule: {len(data) - reader.at} bytes too many after its last part")
    edges = _edges(rows, refs)
    return Schedule(
        name,
        Collective(Kind.parse(kind), nranks, None if root == -1 else root),
        steps,
        tuple(Chunk(None if s == -1 else s, None if d == -1 else d, w) for s, d, w in chunks),
        _graphs(graphs, edges),
        pipeline,
        bool(flags & FLAG_CANONICAL),
    )


def _check_prefix(data: bytes) -> int:
    if len(data) < _PREFIX.size:
        raise ScheduleError(f"schedule: {len(data)} bytes are too few for a header")
    magic, version, flags, total, crc = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise ScheduleError(f"schedule: starts with {magic!r}, not with {MAGIC!r}; this is no binary schedule")
    if version != VERSION:
        raise ScheduleError(f"schedule: binary version {version}; this version of jaxcoll reads version {VERSION}")
    if flags & ~FLAG_CANONICAL:
        raise ScheduleError(f"schedule: unknown flags {flags:#x}; it comes from a newer jaxcoll")
    if total != len(data):
        raise ScheduleError(f"schedule: {len(data)} bytes, but its header says {total}; it was cut or extended")
    if zlib.crc32(data[_PREFIX.size :]) != crc:
        raise ScheduleError("schedule: checksum differs; the bytes were damaged")
    return flags


def _read_name(reader: _Reader) -> str:
    (length,) = reader.unpack(_NAME_LEN, "name")
    raw = reader.bytes(length, "name")
    reader.bytes(-reader.at % 4, "padding after the name")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ScheduleError("schedule: its name isn't UTF-8") from None


def _edges(rows: list[tuple[int, ...]], refs: list[int]) -> list[Edge]:
    edges: list[Edge] = []
    expected = 0
    for i, (step, src, dst, op, _, first, count) in enumerate(rows):
        if first != expected or first + count > len(refs):
            raise ScheduleError(f"schedule: edge {i} has references {first}..{first + count}, wanted {expected}..")
        if op not in (Op.COPY, Op.REDUCE):
            raise ScheduleError(f"schedule: edge {i} has the operation {op}; known are 0 (copy), 1 (reduce)")
        edges.append(Edge(step, src, dst, Op(op), tuple(refs[first : first + count])))
        expected = first + count
    if expected != len(refs):
        raise ScheduleError(f"schedule: {len(refs) - expected} chunk references belong to no edge")
    return edges


def _graphs(rows: list[tuple[int, int]], edges: list[Edge]) -> tuple[ChunkGraph, ...]:
    graphs: list[ChunkGraph] = []
    expected = 0
    for g, (first, count) in enumerate(rows):
        part = edges[first : first + count]
        if first != expected or len(part) != count:
            raise ScheduleError(f"schedule: graph {g} takes edges {first}..{first + count}, wanted from {expected}")
        if any(a.step > b.step for a, b in itertools.pairwise(part)):
            raise ScheduleError(f"schedule: the edges of graph {g} aren't in step order")
        graphs.append(ChunkGraph(tuple(part)))
        expected = first + count
    if expected != len(edges):
        raise ScheduleError(f"schedule: {len(edges) - expected} edges belong to no graph")
    return tuple(graphs)
