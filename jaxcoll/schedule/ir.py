"""The schedule form: a collective as edges of a time-expanded network (TEN).

A vertex of the network is (step, position); an edge is one flow from (step, src) to (step + 1, dst) (REACT, section
5.1). Data is cut into chunks; a chunk graph is a set of edges over chunks that no other graph touches. Positions are
places in the pattern; a `Table` says which rank stands at each. Everything here is immutable, and construction checks
ranges only: whether a schedule computes its collective is the verifier's question.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.columns import NONE, ChunkColumns, EdgeColumns, IntArray

MAX_RANKS = 32767  # ranks and positions travel as i16
MAX_U16 = 65535
MAX_WEIGHT = 2**32 - 1
ALIGNED_ELEMENTS = 16  # chunk boundaries fall on multiples of this many elements once chunks are long


class Kind(enum.IntEnum):
    """What a collective computes; the values are part of the binary form."""

    ALL_REDUCE = 0
    REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    ALL_TO_ALL = 5
    PERMUTE = 6

    @property
    def label(self) -> str:
        """The name in user-facing text and in the text form, e.g. `all_reduce`."""
        return self.name.lower()

    @property
    def reduces(self) -> bool:
        """Whether a result combines the contributions of all ranks (otherwise it is a copy of one)."""
        return self in (Kind.ALL_REDUCE, Kind.REDUCE, Kind.REDUCE_SCATTER)

    @property
    def rooted(self) -> bool:
        return self in (Kind.REDUCE, Kind.BROADCAST)

    @property
    def has_src(self) -> bool:
        """Whether a chunk names the position that contributes it."""
        return self in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.PERMUTE)

    @property
    def has_dst(self) -> bool:
        """Whether a chunk names the position that receives it."""
        return self in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.PERMUTE)

    @staticmethod
    def parse(value: Kind | str | int) -> Kind:
        """A kind from itself, its name in any case, or its number; `ScheduleError` lists the known ones."""
        try:
            return Kind[value.strip().upper()] if isinstance(value, str) else Kind(value)
        except (KeyError, ValueError):
            known = ", ".join(k.label for k in Kind)
            raise ScheduleError(f"unknown collective {value!r}; known are {known}") from None


class Op(enum.IntEnum):
    """What an edge does at its destination: replace the value there, or combine with it."""

    COPY = 0
    REDUCE = 1


def _in_range(what: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ScheduleError(f"{what} is {value!r}; it must be a whole number")
    if not low <= value <= high:
        raise ScheduleError(f"{what} is {value}; it must lie in {low}..{high}")


def _check_name(what: str, name: str) -> None:
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise ScheduleError(f"{what} is {name!r}, which can't be written as UTF-8; choose another") from None
    if size > MAX_U16:
        raise ScheduleError(f"{what} is longer than {MAX_U16} bytes; shorten it")


@dataclass(frozen=True, slots=True)
class Collective:
    """What is to be computed: kind, number of ranks, and the root for `reduce` and `broadcast` (None otherwise)."""

    kind: Kind
    nranks: int
    root: int | None = None

    def __post_init__(self) -> None:
        _in_range("the number of ranks", self.nranks, 1, MAX_RANKS)
        if self.kind.rooted:
            if self.root is None:
                raise ScheduleError(f"{self.kind.label} needs a root; give root=0..{self.nranks - 1}")
            _in_range("root", self.root, 0, self.nranks - 1)
        elif self.root is not None:
            raise ScheduleError(f"{self.kind.label} has no root; leave root out (it is {self.root})")

    @property
    def input_blocks(self) -> int:
        """Equal blocks in one rank's input."""
        return self.nranks if self.kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1

    @property
    def output_blocks(self) -> int:
        """Equal blocks in one rank's output."""
        return self.nranks if self.kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) else 1


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a block: the positions it comes from and goes to (where the kind names them), and its share."""

    src: int | None
    dst: int | None
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Edge:
    """One flow from (step, src) to (step + 1, dst), in positions; `chunks` are indices into `Schedule.chunks`."""

    step: int
    src: int
    dst: int
    op: Op
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class ChunkGraph:
    """Edges over chunks that no other graph touches, kept in step order (the order inside a step is the caller's)."""

    edges: tuple[Edge, ...]
    name: str = ""

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.edges, key=lambda e: e.step))  # stable: a reduction's order is kept
        object.__setattr__(self, "edges", ordered)

    @staticmethod
    def of_columns(columns: EdgeColumns, begin: int, end: int, name: str = "") -> ChunkGraph:
        """The graph of rows begin..end, which must be in step order; its `edges` are made when first asked for."""
        graph = object.__new__(ChunkGraph)
        graph.__dict__.update(name=name, source=(columns, begin, end))
        return graph

    if not TYPE_CHECKING:  # a type checker would take any attribute for granted

        def __getattr__(self, name: str) -> Any:
            if name != "edges" or "source" not in self.__dict__:
                raise AttributeError(name)
            self.__dict__["edges"] = edges = _edges_of(*self.__dict__["source"])
            return edges

    @property
    def size(self) -> int:
        """The number of edges."""
        source: tuple[EdgeColumns, int, int] | None = self.__dict__.get("source")
        return len(self.edges) if source is None else source[2] - source[1]

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """The chunks that move in this graph, increasing."""
        return tuple(sorted({c for e in self.edges for c in e.chunks}))


def _edges_of(columns: EdgeColumns, begin: int, end: int) -> tuple[Edge, ...]:
    rows = slice(begin, end)
    first = columns.first[begin : end + 1].tolist()
    chunk = columns.chunk[first[0] : first[-1]].tolist()
    carried = (tuple(chunk[a - first[0] : b - first[0]]) for a, b in pairwise(first))
    ends = (column[rows].tolist() for column in (columns.step, columns.src, columns.dst))
    return tuple(map(Edge, *ends, map(Op, columns.op[rows].tolist()), carried))


@dataclass(frozen=True, slots=True, eq=False)
class Flows:
    """All edges as int64 columns, a row per (edge, chunk), by step; those of step t are `starts[t]:starts[t + 1]`."""

    edge: IntArray  # index in `Schedule.edges`
    graph: IntArray
    step: IntArray
    src: IntArray
    dst: IntArray
    op: IntArray
    chunk: IntArray
    starts: IntArray

    def at(self, step: int) -> slice:
        return slice(int(self.starts[step]), int(self.starts[step + 1]))


@dataclass(frozen=True)
class Schedule:
    """A collective's TEN.

    `steps` is the number of steps, `pipeline` the number of lanes into which an executor cuts every chunk again. With
    `canonical`, the contributions that meet in one vertex (its own included) are combined in increasing position of
    their sender instead of own-first, so that vertices which sum the same set in parallel get the same bits.
    """

    name: str
    collective: Collective
    steps: int
    chunks: tuple[Chunk, ...]
    graphs: tuple[ChunkGraph, ...]
    pipeline: int = 1
    canonical: bool = False

    @staticmethod
    def of_columns(
        name: str,
        collective: Collective,
        steps: int,
        chunks: ChunkColumns,
        edges: EdgeColumns,
        graphs: tuple[ChunkGraph, ...],
        pipeline: int = 1,
    ) -> Schedule:
        """A schedule from arrays. `graphs` cut `edges` in their order, without gaps (`ChunkGraph.of_columns`).

        Equal to one that was made from objects; `chunks` and `graphs[i].edges` are made when first asked for.
        """
        schedule = object.__new__(Schedule)
        schedule.__dict__.update(name=name, collective=collective, steps=steps, graphs=graphs, pipeline=pipeline)
        schedule.__dict__.update(canonical=False, chunk_columns=chunks, columns=edges)
        schedule._check_frame(len(chunks))
        chunks.check(collective.kind.has_src, collective.kind.has_dst, collective.nranks, MAX_WEIGHT)
        fault = edges.fault(steps, collective.nranks, len(chunks))
        if fault or sum(graph.size for graph in graphs) != len(edges):
            raise ScheduleError(fault or f"the graphs don't cover the {len(edges)} edges")
        return schedule

    def renamed(self, name: str) -> Schedule:
        """The same schedule under another name."""
        schedule = object.__new__(Schedule)
        schedule.__dict__.update(self.__dict__, name=name)
        schedule.__dict__.pop("_hash", None)
        schedule._check_frame(len(self.chunk_columns))
        return schedule

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name != "chunks" or "chunk_columns" not in self.__dict__:
                raise AttributeError(name)
            columns = self.__dict__["chunk_columns"]
            ends = ([None if p == NONE else p for p in column.tolist()] for column in (columns.src, columns.dst))
            self.__dict__["chunks"] = chunks = tuple(map(Chunk, *ends, columns.weight.tolist()))
            return chunks

    def __post_init__(self) -> None:
        self._check_frame(len(self.chunks))
        for i, chunk in enumerate(self.chunks):
            self._check_chunk(i, chunk)
        for g, graph in enumerate(self.graphs):
            _check_name(f"the name of graph {g}", graph.name)
            for i, edge in enumerate(graph.edges):
                self._check_edge(f"edge {i} of graph {g}", edge)

    def _check_frame(self, chunks: int) -> None:
        _in_range("steps", self.steps, 0, MAX_U16)
        _in_range("pipeline", self.pipeline, 1, MAX_U16)
        _in_range("the number of chunk graphs", len(self.graphs), 0, MAX_U16)
        _check_name("the schedule's name", self.name)
        if not chunks and self.kind is not Kind.PERMUTE:  # an empty permutation is all zeros, and fine
            raise ScheduleError(
                f"schedule {self.name!r} has no chunks; even for one rank a chunk says where its data lies"
            )

    def _check_chunk(self, i: int, chunk: Chunk) -> None:
        kind = self.collective.kind
        for end, wanted in (("src", kind.has_src), ("dst", kind.has_dst)):
            position: int | None = getattr(chunk, end)
            if wanted != (position is not None):
                rule = "must name" if wanted else "must not name"
                raise ScheduleError(f"chunk {i}: a chunk of {kind.label} {rule} a {end} position (it is {position})")
            if position is not None:
                _in_range(f"{end} of chunk {i}", position, 0, self.nranks - 1)
        _in_range(f"weight of chunk {i}", chunk.weight, 0, MAX_WEIGHT)

    def _check_edge(self, where: str, edge: Edge) -> None:
        last = self.nranks - 1
        if not 0 <= edge.step < self.steps:
            raise ScheduleError(f"{where}: step is {edge.step}, but the schedule has {self.steps} steps")
        _in_range(f"{where}: src", edge.src, 0, last)
        _in_range(f"{where}: dst", edge.dst, 0, last)
        if not edge.chunks:
            raise ScheduleError(f"{where} carries no chunk; leave it out")
        _in_range(f"{where}: chunk", min(edge.chunks), 0, len(self.chunks) - 1)
        _in_range(f"{where}: chunk", max(edge.chunks), 0, len(self.chunks) - 1)
        if len(set(edge.chunks)) != len(edge.chunks):
            raise ScheduleError(f"{where} carries a chunk twice: {edge.chunks}")

    def __hash__(self) -> int:
        return self._hash  # computed once: schedules are the keys of caches, and have thousands of edges

    @cached_property
    def _hash(self) -> int:
        # Of the arrays, so that it is the same however the schedule was made.
        edges, chunks = self.columns, self.chunk_columns
        arrays = (edges.step, edges.src, edges.dst, edges.op, edges.first, edges.chunk)
        data = tuple(a.tobytes() for a in (*arrays, chunks.src, chunks.dst, chunks.weight))
        sizes = tuple(graph.size for graph in self.graphs)
        return hash((self.name, self.collective, self.steps, self.pipeline, self.canonical, sizes, data))

    @property
    def nranks(self) -> int:
        return self.collective.nranks

    @property
    def kind(self) -> Kind:
        return self.collective.kind

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, graph by graph: the order of the binary form and of records."""
        return tuple(e for g in self.graphs for e in g.edges)

    @cached_property
    def columns(self) -> EdgeColumns:
        """`edges` as arrays."""
        edges = self.edges
        rows = np.array([(e.step, e.src, e.dst, e.op) for e in edges], dtype=np.int64).reshape(-1, 4)
        step, src, dst, op = np.ascontiguousarray(rows.T)
        first = np.zeros(len(edges) + 1, np.int64)
        np.cumsum([len(e.chunks) for e in edges], out=first[1:])
        chunk = np.fromiter(chain.from_iterable(e.chunks for e in edges), np.int64, int(first[-1]))
        return EdgeColumns(step, src, dst, op, first, chunk)

    @cached_property
    def chunk_columns(self) -> ChunkColumns:
        """`chunks` as arrays."""
        rows = [(NONE if c.src is None else c.src, NONE if c.dst is None else c.dst, c.weight) for c in self.chunks]
        return ChunkColumns(*np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 3).T))

    @cached_property
    def edge_graph(self) -> IntArray:
        """For each of `edges`, its graph."""
        return np.repeat(np.arange(len(self.graphs)), [g.size for g in self.graphs]).astype(np.int64)

    @cached_property
    def flows(self) -> Flows:
        """The edges as columns, for the verifier and everything else that is hot."""
        c = self.columns
        edge = np.repeat(np.arange(len(c), dtype=np.int64), c.fan)
        order = np.argsort(c.step[edge], kind="stable")
        edge, chunk = edge[order], c.chunk[order]
        step, src, dst, op = c.step[edge], c.src[edge], c.dst[edge], c.op[edge]
        starts = np.searchsorted(step, np.arange(self.steps + 1))
        return Flows(edge, self.edge_graph[edge], step, src, dst, op, chunk, starts)

    @cached_property
    def blocks(self) -> dict[tuple[int | None, int | None], tuple[int, ...]]:
        """The chunks of each block in their order: those with the same (src, dst)."""
        found: dict[tuple[int | None, int | None], list[int]] = {}
        for i, chunk in enumerate(self.chunks):
            found.setdefault((chunk.src, chunk.dst), []).append(i)
        return {key: tuple(ids) for key, ids in found.items()}

    def ranges(self, n: int) -> IntArray:
        """Where each chunk lies in its block of `n` elements: int64 [nchunks, 2] of begin and end.

        Weights cut the block in the chunks' order; boundaries are aligned once a block has 64 elements a chunk.
        """
        if n < 0:
            raise ScheduleError(f"a block of {n} elements; the number can't be negative")
        out = np.zeros((len(self.chunks), 2), dtype=np.int64)
        for ids in self.blocks.values():
            bounds = _boundaries(n, [self.chunks[i].weight for i in ids])
            out[list(ids), 0] = bounds[:-1]
            out[list(ids), 1] = bounds[1:]
        return out


def _boundaries(n: int, weights: list[int]) -> list[int]:
    total = sum(weights)
    if total == 0:
        raise ScheduleError("all weights of a block are 0; give at least one chunk a weight")
    quantum = ALIGNED_ELEMENTS if n >= 64 * len(weights) else 1
    bounds, done = [0], 0
    for weight in weights[:-1]:
        done += weight
        # Once all weight is placed the end is exact, so that trailing chunks of weight 0 stay empty.
        bounds.append(n if done == total else n * done // total // quantum * quantum)
    return [*bounds, n]


def independent_graphs(edges: Iterable[Edge], name: str = "", limit: int = MAX_U16) -> tuple[ChunkGraph, ...]:
    """Splits edges into the finest chunk graphs: chunks that ride on one edge belong together.

    If that makes more than `limit` graphs, neighbours are put together.
    """
    edges = list(edges)
    parent: dict[int, int] = {}

    def find(c: int) -> int:
        root = c
        while parent.setdefault(root, root) != root:
            root = parent[root]
        while parent[c] != root:
            parent[c], c = root, parent[c]
        return root

    for edge in edges:
        for c in edge.chunks[1:]:
            parent[find(c)] = find(edge.chunks[0])
    groups: dict[int, list[Edge]] = {}
    for edge in edges:
        groups.setdefault(find(edge.chunks[0]), []).append(edge)
    parts = list(groups.values())
    if len(parts) > limit:
        merged: list[list[Edge]] = [[] for _ in range(limit)]
        for i, part in enumerate(parts):
            merged[i * limit // len(parts)] += part
        parts = merged
    return tuple(ChunkGraph(tuple(part), f"{name}{i}") for i, part in enumerate(parts))


def joined_edges(graph: ChunkGraph) -> ChunkGraph:
    """The graph with one edge where several of one operation join the same two vertices."""
    chunks: dict[tuple[int, int, int, Op], list[int]] = {}
    for e in graph.edges:
        chunks.setdefault((e.step, e.src, e.dst, e.op), []).extend(e.chunks)
    return ChunkGraph(tuple(Edge(*key, tuple(sorted(ids))) for key, ids in chunks.items()), graph.name)


def home_chunks(collective: Collective, per_block: int = 1) -> tuple[Chunk, ...]:
    """The chunks of a collective with `per_block` equal chunks in every block, block by block.

    `permute` has no such default: its chunks are the pairs of the permutation.
    """
    ends = list(_block_ends(collective))
    return tuple(Chunk(src, dst) for src, dst in ends for _ in range(per_block))


def _block_ends(collective: Collective) -> Iterator[tuple[int | None, int | None]]:
    n, kind = collective.nranks, collective.kind
    if kind is Kind.PERMUTE:
        raise ScheduleError("permute has no default chunks; build it with perm=[(src, dst), ...]")
    sources: Iterable[int | None] = range(n) if kind.has_src else (None,)
    for src in sources:
        dests: Iterable[int | None] = range(n) if kind.has_dst else (None,)
        for dst in dests:
            yield src, dst
