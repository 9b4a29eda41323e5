"""Trees become schedules of the common form.

Every distinct tree is a chunk graph of its own, its chunk weighted by the tree's multiplicity. A tree edge runs at the
step that is its parent's depth, so a schedule takes as many steps as its deepest tree; with lanes (`pipeline`) the
steps of one tree overlap, which is what makes a deep tree as fast as a shallow one on long messages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from jaxcoll.errors import SynthesisError
from jaxcoll.schedule.columns import NONE, ChunkColumns, EdgeColumns, IntArray
from jaxcoll.schedule.ir import MAX_WEIGHT, Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule, independent_graphs
from jaxcoll.synth.trees import Tree, depths

LANES = 8  # for trees of more than one hop, unless the caller says otherwise


def default_lanes(depth: int) -> int:
    """Lanes that hide most of the depth without cutting chunks into crumbs."""
    return 1 if depth <= 1 else LANES


def weights(trees: Sequence[Tree]) -> dict[int, list[int]]:
    """Per root, the weights of its trees in their order, divided by what all have in common."""
    counts: dict[int, list[int]] = {}
    for tree in trees:
        counts.setdefault(tree.root, []).append(tree.count)
    common = math.gcd(*(count for row in counts.values() for count in row))
    largest = max(count for row in counts.values() for count in row) // common
    if largest > MAX_WEIGHT:
        raise SynthesisError(
            f"the optimal trees need weights up to {largest}, more than a schedule's 32 bits; "
            "fix the number of trees (chunks=) or round the capacities"
        )
    return {root: [count // common for count in row] for root, row in counts.items()}


def all_gather_schedule(trees: Sequence[Tree], ranks: int, name: str, lanes: int | None = None) -> Schedule:
    """Every rank's block runs down its trees. `trees` sorted by root."""
    depth = depths(trees, ranks)
    ends = _ends(trees, ranks)
    step = np.take_along_axis(depth, ends[:, :, 0], axis=1)
    columns = (step, ends[:, :, 0], ends[:, :, 1], Op.COPY)
    return _schedule(Kind.ALL_GATHER, trees, ranks, name, columns, int(depth.max()), lanes)


def reduce_scatter_schedule(trees: Sequence[Tree], ranks: int, name: str, lanes: int | None = None) -> Schedule:
    """The trees turned round: `trees` were grown on the reversed network, contributions run from the leaves up."""
    depth = depths(trees, ranks)
    ends = _ends(trees, ranks)
    step = depth.max(axis=1)[:, None] - np.take_along_axis(depth, ends[:, :, 1], axis=1)
    columns = (step, ends[:, :, 1], ends[:, :, 0], Op.REDUCE)
    return _schedule(Kind.REDUCE_SCATTER, trees, ranks, name, columns, int(depth.max()), lanes)


def _ends(trees: Sequence[Tree], ranks: int) -> IntArray:
    """(parent, child) of all edges, int64 [trees, ranks - 1, 2]."""
    return np.stack([tree.edges for tree in trees]).astype(np.int64).reshape(len(trees), ranks - 1, 2)


def _schedule(
    kind: Kind,
    trees: Sequence[Tree],
    ranks: int,
    name: str,
    columns: tuple[IntArray, IntArray, IntArray, Op],
    steps: int,
    lanes: int | None,
) -> Schedule:
    """A graph a tree; `columns`: step, src, dst int64 [trees, ranks - 1], and what all edges do."""
    step, src, dst, op = columns
    if (step[:, 1:] < step[:, :-1]).any():  # trees mostly come breadth first; those that don't are sorted, stably
        order = np.argsort(step.astype(np.int16 if steps < 2**15 else np.int64), axis=1, kind="stable")
        step, src, dst = (np.take_along_axis(column, order, axis=1) for column in (step, src, dst))
    each, shares = ranks - 1, weights(trees)
    count = len(trees) * each
    edges = EdgeColumns(
        step.ravel(),
        src.ravel(),
        dst.ravel(),
        np.full(count, int(op)),
        np.arange(count + 1),
        np.repeat(np.arange(len(trees)), each),
    )
    root = np.array([tree.root for tree in trees], np.int64)
    weight = np.array([weight for rank in range(ranks) for weight in shares[rank]], np.int64)
    none = np.full(len(trees), NONE)
    cut = ChunkColumns(*((root, none) if kind.has_src else (none, root)), weight)
    graphs = tuple(
        ChunkGraph.of_columns(edges, i * each, (i + 1) * each, f"tree{tree.root}")
        for i, tree in enumerate(trees if each else ())
    )
    return Schedule.of_columns(name, Collective(kind, ranks), steps, cut, edges, graphs, lanes or default_lanes(steps))


def all_reduce_schedule(reduce_scatter: Schedule, all_gather: Schedule, name: str) -> Schedule:
    """A ReduceScatter followed by an AllGather, from any two schedules of the same ranks (REACT and MCCL alike).

    The block of a rank may be cut in different places by the two phases; every piece between two neighbouring cuts
    becomes a chunk, which takes the way of the chunk that it lies in, first in the one phase, then in the other.

    Raises:
        SynthesisError: other kinds, or different numbers of ranks.
    """
    ranks = all_gather.nranks
    if reduce_scatter.kind is not Kind.REDUCE_SCATTER or all_gather.kind is not Kind.ALL_GATHER:
        raise SynthesisError(
            f"an all_reduce is made of a reduce_scatter and an all_gather, not of {reduce_scatter.kind.label} and "
            f"{all_gather.kind.label}"
        )
    if reduce_scatter.nranks != ranks:
        raise SynthesisError(f"the phases have {reduce_scatter.nranks} and {ranks} ranks; give schedules of one world")
    first = _shares(reduce_scatter, "dst")
    second = _shares(all_gather, "src")
    pieces: list[tuple[Fraction, int, int]] = []
    for rank in range(ranks):
        pieces += _common_pieces(first[rank], second[rank])
    scale = math.lcm(*(size.denominator for size, _, _ in pieces))
    sizes = [int(size * scale) for size, _, _ in pieces]
    common = math.gcd(*sizes)
    if max(sizes) // common > MAX_WEIGHT:
        raise SynthesisError("the phases cut their blocks so differently that weights exceed 32 bits; use fewer chunks")
    of_first: dict[int, list[int]] = {}
    of_second: dict[int, list[int]] = {}
    for i, (_, one, other) in enumerate(pieces):
        of_first.setdefault(one, []).append(i)
        of_second.setdefault(other, []).append(i)
    moved = [_moved(edge, 0, of_first) for edge in reduce_scatter.edges]
    moved += [_moved(edge, reduce_scatter.steps, of_second) for edge in all_gather.edges]
    graphs = _graphs([edge for edge in moved if edge.chunks], len(pieces))
    chunks = tuple(Chunk(None, None, size // common) for size in sizes)
    steps = reduce_scatter.steps + all_gather.steps
    lanes = max(reduce_scatter.pipeline, all_gather.pipeline)
    return Schedule(name, Collective(Kind.ALL_REDUCE, ranks), steps, chunks, graphs, lanes)


def _shares(schedule: Schedule, end: str) -> list[list[tuple[Fraction, int]]]:
    """Per rank, its chunks in block order, each with its part of the block."""
    homes: list[list[int]] = [[] for _ in range(schedule.nranks)]
    for i, chunk in enumerate(schedule.chunks):
        home: int = getattr(chunk, end)
        homes[home].append(i)
    shares: list[list[tuple[Fraction, int]]] = []
    for ids in homes:
        total = sum(schedule.chunks[i].weight for i in ids)
        shares.append([(Fraction(schedule.chunks[i].weight, total), i) for i in ids if schedule.chunks[i].weight])
    return shares


def _common_pieces(
    first: list[tuple[Fraction, int]], second: list[tuple[Fraction, int]]
) -> list[tuple[Fraction, int, int]]:
    """(size, chunk of the first phase, chunk of the second) for the common refinement of two divisions of one block."""
    ends = [list(itertools.accumulate(size for size, _ in shares)) for shares in (first, second)]
    pieces: list[tuple[Fraction, int, int]] = []
    i = j = 0
    done = Fraction(0)
    while i < len(first) and j < len(second):
        end = min(ends[0][i], ends[1][j])
        pieces.append((end - done, first[i][1], second[j][1]))
        i, j, done = i + (ends[0][i] == end), j + (ends[1][j] == end), end
    return pieces


def _moved(edge: Edge, later: int, pieces: dict[int, list[int]]) -> Edge:
    chunks = tuple(piece for chunk in edge.chunks for piece in pieces.get(chunk, ()))
    return Edge(edge.step + later, edge.src, edge.dst, edge.op, chunks)


def _graphs(edges: list[Edge], pieces: int) -> tuple[ChunkGraph, ...]:
    """A graph per piece where that is affordable (finer graphs give a tuner more to choose from)."""
    if sum(len(edge.chunks) for edge in edges) > 2 * len(edges) or pieces > 65535:
        return independent_graphs(edges)
    apart: dict[int, list[Edge]] = {}
    for edge in edges:
        for chunk in edge.chunks:
            apart.setdefault(chunk, []).append(Edge(edge.step, edge.src, edge.dst, edge.op, (chunk,)))
    return tuple(ChunkGraph(tuple(part), f"piece{chunk}") for chunk, part in apart.items())
