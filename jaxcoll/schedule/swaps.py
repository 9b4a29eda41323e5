"""Position-equivalent swaps: which ranks may change places at one vertex step of one chunk graph (REACT 5.3.1, A.3).

The paper tries every pair of vertices with a run through the whole network. Here three facts make that cheap, and the
answer the same: chunk graphs that are equal up to the names of their ranks share one answer; two ranks that neither
receive nor send a chunk at a step change nothing for it; and all other pairs of a step run together, as one array, from
the step before the swap, dropping out as soon as they fail or are back on the unswapped course.

A rank's value is followed as the sum, modulo 2**64, of one fixed random number for each contribution in it, as often as
it is in it, beside a hash of the order in which they were combined: different values look equal with a probability of
about 2**-64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
import numpy as np
import numpy.typing as npt

from jaxcoll.schedule.ir import IntArray, Kind, Op, Schedule
from jaxcoll.schedule.orders import RankEdge, expressions, rank_edges
from jaxcoll.schedule.table import Table
from jaxcoll.schedule.verify import check, initial_counts, wanted_at

Sets = tuple[frozenset[int], ...]
State = npt.NDArray[np.uint64]

_SEED = 0x7E5C  # fixed: the same question always gets the same answer
_BATCH = 1 << 20  # elements of one batch of states
_KEPT = 64  # graphs under tables whose answers are kept; of 64 ranks in a ring one takes 8 MB


@dataclass(frozen=True, eq=False)
class _ChunkRun:
    """A chunk of a graph: its edges by step as columns (src, dst, op), the unswapped states, who must end how."""

    steps: list[IntArray]  # [edges][3]
    states: State  # [steps + 1][ranks][sum of contributions, hash of their order]
    wanted: npt.NDArray[np.bool_]  # [ranks]
    result: np.uint64  # the sum that is wanted
    edges: list[int]  # indices in the graph

    def moves_at(self, t: int) -> npt.NDArray[np.bool_]:
        """bool [ranks]: who receives this chunk in the step before t, or sends it in the step after."""
        moves = np.zeros(len(self.wanted), dtype=bool)
        if t > 0:
            moves[self.steps[t - 1][:, 1]] = True
        if t < len(self.steps):
            moves[self.steps[t][:, 0]] = True
        return moves


@dataclass(frozen=True, eq=False)
class _Graph:
    """A chunk graph with ranks for positions."""

    edges: list[RankEdge]
    nranks: int
    steps: int
    runs: list[_ChunkRun]
    canonical: bool
    same_bits: bool


class Equivalence:
    """Which ranks of one schedule may be exchanged at one vertex step (`Table.swap_vertex`), under any valid table.

    After any one such swap the schedule is still valid and, with `same_bits`, gives all ranks equal bits if it did so
    before. A swap changes what is possible at other vertices (and, rarely, for other members of its set): then ask with
    the new table. Each vertex is worked out when it is first asked for and kept, for all graphs and tables that differ
    in the names of ranks only. The table must be valid; that isn't checked here.
    """

    def __init__(self, schedule: Schedule, *, same_bits: bool = True):
        self.schedule, self.same_bits = schedule, same_bits
        self._shapes: dict[object, _Shape] = {}
        self._named: dict[tuple[int, bytes], tuple[_Shape, IntArray]] = {}

    def allows(self, table: Table, graph: int, step: int, a: int, b: int) -> bool:
        """Whether ranks a and b, of which one at least sends or receives there, may change places at that vertex."""
        shape, label = self._shape(table, graph)
        pair = {int(label[a]), int(label[b])}
        return any(pair <= s for s in shape.at(step))

    def sets(self, table: Table, graph: int, step: int) -> Sets:
        """Sets of ranks of which any two may be exchanged; those in which no rank sends or receives are left out."""
        shape, label = self._shape(table, graph)
        return _renamed(shape.at(step), np.argsort(label))

    def _shape(self, table: Table, g: int) -> tuple[_Shape, IntArray]:
        """What graphs alike share, and label[rank], this graph's names in it."""
        exact = (g, np.asarray(table.home).tobytes() + table.vertex[g].tobytes())
        if exact not in self._named:
            if len(self._named) >= _KEPT:
                self._named.clear()
                self._shapes.clear()
            key, label = _signature(self.schedule, table, g)
            if key not in self._shapes:
                self._shapes[key] = _Shape(_graph(self.schedule, table, g, self.same_bits), label)
            self._named[exact] = self._shapes[key], label
        return self._named[exact]


class _Shape:
    """Graphs that are equal up to the names of their ranks: one of them, its names, and what is known of each step."""

    def __init__(self, graph: _Graph, label: IntArray):
        self.graph, self.label = graph, label
        self.known: dict[int, Sets] = {}

    def at(self, step: int) -> Sets:
        """The sets at a step, by label."""
        if step not in self.known:
            self.known[step] = _renamed(_sets_at(self.graph, step), self.label)
        return self.known[step]


def equivalent_swaps(
    schedule: Schedule, table: Table | None = None, *, same_bits: bool = True
) -> dict[tuple[int, int], Sets]:
    """For each (graph, step): the sets of ranks of which any two may be exchanged (see `Equivalence`).

    Raises `ScheduleInvalid` if the schedule isn't valid under the table (the identity if None) to begin with.
    """
    table = table or Table.identity(schedule)
    check(schedule, table)
    found = Equivalence(schedule, same_bits=same_bits)
    return {(g, t): found.sets(table, g, t) for g in range(len(schedule.graphs)) for t in range(schedule.steps + 1)}


def _renamed(sets: Sets, name: IntArray) -> Sets:
    names = name.tolist()
    return tuple(frozenset(names[r] for r in s) for s in sets)


def _signature(schedule: Schedule, table: Table, g: int) -> tuple[object, IntArray]:
    """A key equal for graphs that differ in the names of ranks and chunks only, and label[rank], this graph's names.

    Names are given in the order in which edges mention them.
    """
    ranks: dict[int, int] = {}
    chunks: dict[int, int] = {}
    rows: list[tuple[object, ...]] = []
    for e, r in zip(schedule.graphs[g].edges, rank_edges(schedule, table, g), strict=True):
        ends = [ranks.setdefault(rank, len(ranks)) for rank in (r.src, r.dst)]
        carried = [chunks.setdefault(c, len(chunks)) for c in e.chunks]
        place = (e.src, e.dst) if schedule.canonical else ()  # positions matter only where they give the order
        rows.append((e.step, *ends, r.op, *carried, place))
    for rank in range(schedule.nranks):
        ranks.setdefault(rank, len(ranks))
    root = schedule.collective.root
    ends = [
        (*(None if p is None else ranks[table.home[p]] for p in (chunk.src, chunk.dst, root)), chunk.weight > 0)
        for chunk in (schedule.chunks[c] for c in chunks)
    ]
    label = np.zeros(schedule.nranks, dtype=np.int64)
    label[list(ranks)] = list(ranks.values())
    return (tuple(rows), tuple(ends)), label


def _graph(schedule: Schedule, table: Table, g: int, same_bits: bool) -> _Graph:
    edges = rank_edges(schedule, table, g)
    tokens = np.random.default_rng(_SEED).integers(1, 2**64, schedule.nranks, dtype=np.uint64, endpoint=False)
    if not schedule.kind.reduces:
        tokens = tokens[:1]  # one contribution a chunk
    sums = initial_counts(schedule, table).astype(np.uint64) @ tokens
    initial, wanted = np.stack([sums, sums], axis=2), wanted_at(schedule, table)
    carriers: dict[int, list[int]] = defaultdict(list)
    for i, e in enumerate(schedule.graphs[g].edges):
        for c in e.chunks:
            if schedule.chunks[c].weight:
                carriers[c].append(i)
    runs: dict[object, _ChunkRun] = {}
    for c, indices in carriers.items():
        # Chunks that take the same way from the same start to the same end need one run.
        key = (tuple(indices), initial[c].tobytes(), wanted[c].tobytes())
        if key not in runs:
            runs[key] = _run(edges, indices, initial[c], wanted[c], tokens.sum(), schedule.steps)
    # Only an all_reduce can complete a sum at several ranks.
    same_bits = same_bits and schedule.kind is Kind.ALL_REDUCE
    return _Graph(edges, schedule.nranks, schedule.steps, list(runs.values()), schedule.canonical, same_bits)


def _run(
    edges: list[RankEdge],
    indices: list[int],
    initial: State,
    wanted: npt.NDArray[np.bool_],
    result: np.uint64,
    steps: int,
) -> _ChunkRun:
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(steps)]
    for i in indices:
        rows[edges[i].step].append((edges[i].src, edges[i].dst, edges[i].op))
    columns = [np.array(r, dtype=np.int64).reshape(-1, 3) for r in rows]
    states = [initial[None]]
    for step in columns:
        after = states[-1].copy()
        _advance(after, step[:, 2], step[None, :, 0], step[None, :, 1])
        states.append(after)
    return _ChunkRun(columns, np.concatenate(states), wanted, result, indices)


def _advance(states: State, ops: IntArray, src: IntArray, dst: IntArray) -> npt.NDArray[np.bool_]:
    """Runs one step on states [pairs][ranks][2] in place; src and dst are [pairs or 1][edges].

    Returns, per pair, whether every sender held something.
    """
    pairs = np.arange(len(states))
    src, dst = np.broadcast_to(src, (len(pairs), len(ops))), np.broadcast_to(dst, (len(pairs), len(ops)))
    moved = states[pairs[:, None], src]
    for e, op in enumerate(ops.tolist()):
        if op == Op.COPY:
            states[pairs, dst[:, e]] = moved[:, e]
        else:
            own, other = states[pairs, dst[:, e]], moved[:, e]
            states[pairs, dst[:, e], 0] = own[:, 0] + other[:, 0]
            states[pairs, dst[:, e], 1] = _combined(own[:, 1], other[:, 1])
    return np.asarray(moved[:, :, 0].all(axis=1))


def _combined(a: State, b: State) -> State:
    """A hash of a + b: the same for b + a, another one for every other bracketing."""
    return _mixed(a + b + _mixed(a ^ b))


def _mixed(x: State) -> State:
    # splitmix64's finaliser: a bijection that spreads every bit
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _swapped(ranks: IntArray, a: IntArray, b: IntArray) -> IntArray:
    """[pairs][edges]: `ranks` with a and b exchanged, for every pair."""
    a, b = a[:, None], b[:, None]
    return np.where(ranks == a, b, np.where(ranks == b, a, ranks))


def _sets_at(graph: _Graph, t: int) -> Sets:
    arriving = [e for e in graph.edges if e.step == t - 1]
    leaving = [e for e in graph.edges if e.step == t]
    active = {e.dst for e in arriving} | {e.src for e in leaving}
    pairs = [(a, b) for a in range(graph.nranks) for b in range(a + 1, graph.nranks) if a in active or b in active]
    left = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    left = left[_no_self_edges(arriving, leaving, left)]
    for run in graph.runs:
        left = _surviving(run, t, left, graph.same_bits and not graph.canonical)
    # The hash knows only the order own-first; a canonical order is looked up term by term.
    by_terms = graph.same_bits and graph.canonical
    allowed = [(a, b) for a, b in left.tolist() if not by_terms or _same_bits(graph, t, a, b)]
    idle = [r for r in range(graph.nranks) if r not in active]
    return _sets(allowed, idle, active)


def _no_self_edges(arriving: list[RankEdge], leaving: list[RankEdge], pairs: IntArray) -> npt.NDArray[np.bool_]:
    a, b = pairs[:, 0], pairs[:, 1]
    keep = np.ones(len(pairs), dtype=bool)
    for moving, fixed in (
        ([e.dst for e in arriving], [e.src for e in arriving]),
        ([e.src for e in leaving], [e.dst for e in leaving]),
    ):
        keep &= (_swapped(np.array(moving, dtype=np.int64), a, b) != np.array(fixed, dtype=np.int64)).all(axis=1)
    return keep


def _surviving(run: _ChunkRun, t: int, pairs: IntArray, same_bits: bool) -> IntArray:
    """The pairs whose swap at step t leaves this chunk's result right."""
    doubtful = np.asarray(run.moves_at(t)[pairs].any(axis=1))
    keep = np.logical_not(doubtful)
    size = max(1, _BATCH // max(1, run.states[0].size))
    rows = np.flatnonzero(doubtful)
    for i in range(0, len(rows), size):
        part = rows[i : i + size]
        keep[part] = _survives(run, t, pairs[part], same_bits)
    return pairs[keep]


def _survives(run: _ChunkRun, t: int, pairs: IntArray, same_bits: bool) -> npt.NDArray[np.bool_]:
    ok = np.zeros(len(pairs), dtype=bool)
    alive = np.arange(len(pairs))
    first = max(t - 1, 0)
    states = np.repeat(run.states[first][None], len(pairs), axis=0)
    for u in range(first, len(run.steps)):
        step = run.steps[u]
        if len(step):
            a, b = pairs[alive, 0], pairs[alive, 1]
            src = _swapped(step[:, 0], a, b) if u == t else step[None, :, 0]
            dst = _swapped(step[:, 1], a, b) if u == t - 1 else step[None, :, 1]
            held = _advance(states, step[:, 2], src, dst)
            alive, states = alive[held], states[held]
        if u >= t and len(step):
            back = (states == run.states[u + 1]).all(axis=(1, 2))  # on the unswapped course again: right to the end
            ok[alive[back]] = True
            alive, states = alive[~back], states[~back]
        if not len(alive):
            return ok
    ends = states[:, run.wanted]
    right = (ends[:, :, 0] == run.result).all(axis=1)
    if same_bits:
        right &= (ends[:, :, 1] == ends[:, :1, 1]).all(axis=1)
    ok[alive] = right
    return ok


def _same_bits(graph: _Graph, t: int, a: int, b: int) -> bool:
    name = {a: b, b: a}
    edges = list(graph.edges)
    for i, e in enumerate(edges):
        if e.step == t - 1:
            edges[i] = e._replace(dst=name.get(e.dst, e.dst))
        elif e.step == t:
            edges[i] = e._replace(src=name.get(e.src, e.src))
    for run in graph.runs:
        touched = bool(run.moves_at(t)[[a, b]].any())
        if touched and len(set(expressions((edges[i] for i in run.edges), graph.nranks, graph.canonical))) > 1:
            return False
    return True


def _sets(allowed: Iterable[tuple[int, int]], idle: list[int], active: set[int]) -> Sets:
    """The maximal sets of pairwise exchangeable ranks; in all usual schedules they don't overlap."""
    relation = nx.Graph()
    relation.add_edges_from(allowed)
    relation.add_edges_from((a, b) for i, a in enumerate(idle) for b in idle[i + 1 :])
    cliques: list[frozenset[int]] = []
    for part in nx.connected_components(relation):
        size = len(part)
        if relation.subgraph(part).number_of_edges() == size * (size - 1) // 2:
            cliques.append(frozenset(part))
        else:
            cliques += [frozenset(c) for c in nx.find_cliques(relation.subgraph(part))]
    return tuple(sorted((c for c in cliques if c & active), key=sorted))
