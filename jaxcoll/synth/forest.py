"""ForestColl entire: a topology in, spanning trees out that reach the optimal AllGather rate (MCCL 4.3, appendix C).

Three phases, timed apart: `rate`, `switches`, `trees`. The bound is the max-flow bound: no schedule whose switches only
forward sends faster, and the trees meet it exactly.

A warm start reuses all that an earlier solve of the same nodes found. The cuts that mattered give the new rate without
a flow; the old split of each switch, in proportion to the new capacities, replaces the plan; the old trees are tried
edge by edge. None of it is checked on the way: a packing that comes out complete at the rate of a known cut is proof of
both. If it does not come out, the checked phases run, from the larger pool of cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from jaxcoll.errors import SynthesisError
from jaxcoll.synth.balance import balanced
from jaxcoll.synth.cuts import CutPool, seed_cuts
from jaxcoll.synth.latency import bend_by_lp
from jaxcoll.synth.rate import (
    Network,
    Packing,
    cut_rate,
    exact_packing,
    fixed_packing,
    optimal_rate,
    rate_packing,
    small_packing,
    whole_trees,
)
from jaxcoll.synth.result import Clock, TimeUp
from jaxcoll.synth.switches import IntMatrix, Links, Planner, Remover, Room, default_plan, scaled_plan
from jaxcoll.synth.trees import Order, Packed, Tree, pack
from jaxcoll.topology.graph import Topology

DEPTH_STEPS = 32  # with bounded depth the rate is searched in steps of 1/32 of the optimum

Split = tuple[int, list[int], list[int], IntMatrix]


@dataclass(frozen=True, eq=False)
class History:
    """What a warm start needs: the nodes it speaks about, their rate, the cuts, the splits (in trees), the trees."""

    nodes: tuple[str, ...]
    nranks: int
    rate: Fraction
    cuts: list[int]
    splits: list[Split]
    trees: list[Tree]


@dataclass(frozen=True, eq=False)
class Forest:
    """Spanning trees out of every rank.

    Attributes:
        topology: what they were made for (links that a switch can't use are already cut to what it can).
        bound: the max-flow bound of the given topology, per rank, in its unit.
        per_root: trees out of each rank, counted with multiplicity; each carries `tree_rate`.
        trees: the distinct ones.
        links: logical links between ranks, in trees (what `trees` fit into).
        splits: how the logical links run through the switches, in the order in which switches were removed.
        history: for `solve(..., warm=)`.
        counts: flow checks, roll-backs, orders grown again, and how the warm start went.
        late: how a time limit cut the solve short, or nothing.
    """

    topology: Topology
    bound: Fraction
    per_root: int
    tree_rate: Fraction
    trees: list[Tree]
    links: Links
    history: History
    counts: dict[str, int | str]
    late: str = ""

    @property
    def rate(self) -> Fraction:
        """What every rank sends to everybody, at the same time, in the topology's unit."""
        return self.per_root * self.tree_rate

    def loads(self) -> dict[tuple[int, int], int]:
        """Trees that cross each logical link."""
        load: dict[tuple[int, int], int] = {}
        for tree in self.trees:
            for tail, head in tree.edges.tolist():
                load[tail, head] = load.get((tail, head), 0) + tree.count
        return load


@dataclass(frozen=True)
class Wish:
    """What to solve for: `trees` per root (None: as many as the optimum needs), bounded depth, LP switch removal."""

    trees: int | None = None
    max_depth: int | None = None
    latency: bool = False


def solve(topology: Topology, wish: Wish, clock: Clock, warm: History | None = None) -> Forest:
    """Optimal trees. Raises SynthesisError when there are none within `wish.max_depth`, TimeUp past the clock's limit.

    With `wish.latency` the LPs may take half of the time; if that isn't enough, switches are removed without them.
    """
    if topology.nranks == 1:
        links = Links(1, [{}], [{}])
        tree = Tree(0, 1, np.zeros((0, 2), np.int32))
        history = History(topology.nodes, 1, Fraction(0), [], [], [tree])
        return Forest(topology, Fraction(0), 1, Fraction(0), [tree], links, history, {"warm": "no"})
    if wish.latency:
        try:
            with clock.within(0.5):
                return _solve(topology, wish, clock, warm)
        except TimeUp as late:
            plain = _solve(topology, replace(wish, latency=False), clock, warm)
            return replace(plain, late=f"{late}: switches removed in proportion, not by the LP")
    return _solve(topology, wish, clock, warm)


def _solve(topology: Topology, wish: Wish, clock: Clock, warm: History | None) -> Forest:
    solver = _Solver(topology, wish, clock)
    if warm is None or not solver.knows(warm):
        return solver.cold(None, "no" if warm is None else "no: other nodes")
    if wish.trees is None and wish.max_depth is None:
        forest = solver.hot(warm)
        if forest is not None:
            return forest
    return solver.cold(warm, "checked")


class _Solver:
    def __init__(self, topology: Topology, wish: Wish, clock: Clock):
        self.wish, self.clock, self.tick = wish, clock, clock.tick
        with clock.phase("rate"):
            self.original = topology
            self.topology = balanced(topology, self.tick) if topology.unbalanced() else topology
            self.network = Network.of(self.topology)
            self.pool = CutPool(self.network.nodes, self.network.ranks)
            seed_cuts(self.pool, self.topology)

    def knows(self, warm: History) -> bool:
        return warm.nodes == self.topology.nodes and warm.nranks == self.topology.nranks

    def hot(self, warm: History) -> Forest | None:
        """The unchecked way; None when the trees don't come out."""
        with self.clock.phase("rate"):
            for mask in warm.cuts:
                self.pool.add(mask)
            rate = cut_rate(self.network, self.pool.masks)
            full = exact_packing(self.network, rate)
            least = whole_trees(self.network, rate, self.pool.masks)
            packing = full if least >= full.trees else rate_packing(self.network, rate, least)
        with self.clock.phase("switches"):
            remover = Remover(self.network, packing, self.pool, self.tick, _replay(warm))
            links = remover.run(check=False)
        with self.clock.phase("trees"):
            try:
                packed = self._pack(links, packing, warm)
            except TimeUp:
                raise
            except SynthesisError:
                return None
        return self._forest(rate, packing, links, packed, remover.checks, "yes")

    def cold(self, warm: History | None, how: str) -> Forest:
        """The three phases, each checked."""
        with self.clock.phase("rate"):
            for mask in warm.cuts if warm else ():
                self.pool.add(mask)
            graph = self.network.graph()
            rate = optimal_rate(self.network, graph, self.pool, self.tick)
            if self.wish.trees is not None:
                packing = fixed_packing(self.network, graph, rate, self.wish.trees, self.tick)
            else:
                packing = small_packing(self.network, graph, rate, self.pool, self.tick)
        if self.wish.max_depth is not None:
            return self._shallow(rate, packing, how)
        try:
            links, checks = self._remove(packing, warm)
        except TimeUp:
            raise
        except SynthesisError:
            full = exact_packing(self.network, rate)
            if packing.trees >= full.trees or self.wish.trees is not None:
                raise
            packing = full  # rounding to whole trees had left a switch unbalanced; this packing needs no rounding
            links, checks = self._remove(packing, warm)
        with self.clock.phase("trees"):
            packed = self._pack(links, packing, warm)
        return self._forest(rate, packing, links, packed, checks, how)

    def _remove(self, packing: Packing, warm: History | None) -> tuple[Links, int]:
        with self.clock.phase("switches"):
            bender = self._bend if self.wish.latency else None
            planner = _replay(warm) if warm else None
            remover = Remover(self.network, packing, self.pool, self.tick, planner, bender)
            return remover.run(), remover.checks

    def _bend(self, plan: IntMatrix, room: Room) -> IntMatrix:
        self.tick(None)
        return bend_by_lp(plan, room, self.clock.left())

    def _hints(self, packing: Packing, warm: History) -> list[Tree]:
        """The old trees worth keeping: all, or where the rate has fallen, the one that carried most for each root.

        A lower rate leaves most links with room to spare. The thin trees had been squeezed, often deep, into what the
        main ones left over, and there is no need for them any more.
        """
        if packing.trees * packing.tree_rate * self.network.unit >= warm.rate:
            return warm.trees
        main: dict[int, Tree] = {}
        for tree in warm.trees:
            if tree.root not in main or tree.count > main[tree.root].count:
                main[tree.root] = tree
        return list(main.values())

    def _pack(self, links: Links, packing: Packing, warm: History | None, depth: int | None = None) -> Packed:
        ranks = self.network.ranks
        known = self.pool.ranks_only()
        before = len(known.masks)
        orders = _orders(ranks, packing.trees, self._hints(packing, warm) if warm else [])
        try:
            return pack(ranks, links.out, known, orders, self.tick, depth)
        finally:
            for mask in known.masks[before:]:
                self.pool.add(mask)

    def _shallow(self, rate: Fraction, packing: Packing, how: str) -> Forest:
        """The fastest trees within the depth that growing finds, by bisection over fractions of the optimum."""
        depth, best = self.wish.max_depth, None
        low, high = 0, DEPTH_STEPS
        while low < high:
            step = (low + high + 1) // 2
            trial = packing if step == DEPTH_STEPS else self._slower(packing, Fraction(step, DEPTH_STEPS))
            try:
                links, checks = self._remove(trial, None)
                with self.clock.phase("trees"):
                    packed = self._pack(links, trial, None, depth)
                best, low = self._forest(rate, trial, links, packed, checks, how), step
            except TimeUp as late:
                if best is None:
                    raise
                return replace(best, late=str(late))
            except SynthesisError:
                high = step - 1
        if best is None:
            raise SynthesisError(
                f"no trees of depth {depth} reach every rank of {self.topology.name!r}; allow more depth"
            )
        return best

    def _slower(self, packing: Packing, part: Fraction) -> Packing:
        """Fewer trees of finer grain: `part` of the rate."""
        trees = max(packing.trees, DEPTH_STEPS) if self.wish.trees is None else packing.trees
        return rate_packing(self.network, packing.trees * packing.tree_rate * part, trees)

    def _forest(self, bound: Fraction, packing: Packing, links: Links, packed: Packed, checks: int, how: str) -> Forest:
        late = ""
        if self.topology is not self.original:  # the bound of what was given, not of what was left of it
            bound, late = self._given_bound()
        else:
            bound = bound * self.network.unit
        trees = sorted(packed.trees, key=lambda tree: tree.root)
        rate = packing.tree_rate * self.network.unit
        nodes, ranks = self.topology.nodes, self.network.ranks
        history = History(nodes, ranks, packing.trees * rate, self.pool.masks, links.splits, trees)
        counts: dict[str, int | str] = {
            "flow_checks": checks + packed.checks,
            "roll_backs": packed.rollbacks,
            "regrown": packed.regrown,
            "warm": how,
        }
        return Forest(self.topology, bound, packing.trees, rate, trees, links, history, counts, late)

    def _given_bound(self) -> tuple[Fraction, str]:
        """The bound of the topology as given, or past the time limit that of the known cuts, with a word about it."""
        network = Network.of(self.original)
        pool = CutPool(network.nodes, network.ranks, self.pool.masks)
        try:
            with self.clock.phase("rate"):
                return optimal_rate(network, network.graph(), pool, self.tick) * network.unit, ""
        except TimeUp as late:  # the trees are complete by now
            return cut_rate(network, pool.masks) * network.unit, f"{late}: the bound may be above the true one"


def _orders(ranks: int, trees: int, old: Sequence[Tree]) -> list[Order]:
    """What every rank wants: its old trees where it has any."""
    hints: dict[int, list[Tree]] = {}
    for tree in old:
        hints.setdefault(tree.root, []).append(tree)
    return [wish for rank in range(ranks) for wish in _of_root(rank, trees, hints.get(rank, []))]


def _of_root(rank: int, trees: int, hints: list[Tree]) -> list[Order]:
    """The orders of one root: its old trees in their old proportion, the rounding left to the largest."""
    if not hints:
        return [Order(rank, trees)]
    hints = sorted(hints, key=lambda tree: -tree.count)
    total = sum(tree.count for tree in hints)
    shares = [tree.count * trees // total for tree in hints]
    shares[0] += trees - sum(shares)
    return [Order(rank, share, tree.edges) for share, tree in zip(shares, hints, strict=True) if share]


def _replay(warm: History) -> Planner:
    """Old splits as plans: in the old proportion, fitted to the new capacities."""
    known = {switch: (before, after, amounts) for switch, before, after, amounts in warm.splits}
    fitted: dict[tuple[bytes, ...], IntMatrix] = {}

    def plan(
        switch: int, before: list[int], after: list[int], inward: IntMatrix, outward: IntMatrix
    ) -> IntMatrix | None:
        if switch not in known:
            return None
        old_before, old_after, amounts = known[switch]
        if before != old_before or after != old_after:
            return None
        same = np.equal.outer(np.array(before), np.array(after))
        key = (inward.tobytes(), outward.tobytes(), same.tobytes(), amounts.tobytes())
        if key not in fitted:
            fitted[key] = _fit(same, inward, outward, amounts)
        return fitted[key]

    return plan


def _fit(same: NDArray[np.bool_], inward: IntMatrix, outward: IntMatrix, old: IntMatrix) -> IntMatrix:
    if int(inward.sum()) * int(outward.sum()) * int(old.sum()) == 0:
        return default_plan(same, inward, outward)
    return scaled_plan(same, inward, outward, old)


def routes(forest: Forest) -> dict[tuple[int, int], list[tuple[tuple[int, ...], int]]]:
    """Per logical link, its physical paths (nodes from rank to rank) with the trees each carries."""
    paths: dict[tuple[int, int], list[tuple[tuple[int, ...], int]]] = {}
    network = Network.of(forest.topology)
    unit = forest.tree_rate / network.unit
    for tail, head, amount in zip(network.tails.tolist(), network.heads.tolist(), network.capacity, strict=True):
        count = amount * unit.denominator // unit.numerator
        if count:
            paths[tail, head] = [((tail, head), count)]
    for switch, before, after, amounts in forest.history.splits:
        for i, j in zip(*(axis.tolist() for axis in np.nonzero(amounts)), strict=True):
            first = _draw(paths, (before[i], switch), int(amounts[i, j]))
            second = _draw(paths, (switch, after[j]), int(amounts[i, j]))
            if before[i] != after[j]:
                paths.setdefault((before[i], after[j]), []).extend(_join(first, second))
    return paths


def _draw(
    paths: dict[tuple[int, int], list[tuple[tuple[int, ...], int]]], link: tuple[int, int], wanted: int
) -> list[tuple[tuple[int, ...], int]]:
    """Takes `wanted` trees' worth of paths from a link."""
    taken: list[tuple[tuple[int, ...], int]] = []
    have = paths[link]
    while wanted:
        path, count = have.pop()
        used = min(count, wanted)
        taken.append((path, used))
        if used < count:
            have.append((path, count - used))
        wanted -= used
    return taken


def _join(
    first: list[tuple[tuple[int, ...], int]], second: list[tuple[tuple[int, ...], int]]
) -> list[tuple[tuple[int, ...], int]]:
    joined: list[tuple[tuple[int, ...], int]] = []
    first, second = list(first), list(second)
    while first:
        (left, some), (right, other) = first.pop(), second.pop()
        used = min(some, other)
        joined.append((left + right[1:], used))
        if used < some:
            first.append((left, some - used))
        if used < other:
            second.append((right, other - used))
    return joined
