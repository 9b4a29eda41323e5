"""Column generation for the all-to-all throughput LP: master, pricing, bounds.

Every pricing gives a certified upper bound, whatever the master did: for arc weights w >= 0 no rate z above
sum_a c_a w_a / sum_(s,d) dist_w(s, d) can be routed, because every unit pays at least its distance and arc a can be
paid for c_a times.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jaxcoll.synth.alltoall_cuts import cut_prices
from jaxcoll.synth.alltoall_net import FloatArray, Net, Symmetry, strong_components
from jaxcoll.synth.master import DUAL_TOLERANCE, MasterSolution, RestrictedMaster
from jaxcoll.synth.path_trees import Trees
from jaxcoll.synth.pricing import Pricer, blocks

SMOOTHING = 0.3
"""Share of the seeding's prices in those tried every second round: they are positive on every arc, so trees that the
master's sparse prices call equal
spread over the arcs by use instead of meeting on one."""
SEED_BLOCK = 16
DUALS_KEPT = 64
TAIL = (2, 0.8, 0.01)
"""Without symmetry a solve also ends where this many rounds leave more than this share of the gap, once the gap is
below this share of the rate: the bound is proven anyway, and the rounding does not use the master's rate."""
PATIENCE = 100
"""Rounds without any progress of rate or bound after which a solve ends as it stands."""


@dataclass(frozen=True)
class Limits:
    """When to stop: `deadline` in seconds of time.monotonic, `cancelled` asks the caller."""

    deadline: float = float("inf")
    cancelled: Callable[[], bool] = lambda: False

    def left(self) -> float:
        """Seconds left."""
        return self.deadline - time.monotonic()

    def stop(self) -> bool:
        """True when the solve should end with what it has."""
        return self.left() <= 0 or self.cancelled()


@dataclass(frozen=True)
class Fractional:
    """The LP's outcome.

    `rate`: reached by the master over the classes (0 if it never ran); `bound`: certified on the whole network;
    `weight`: float64 [arcs], prices that
    prove it; `duals`: more such vectors, each scaled so that the distances of all pairs add up to 1; `trees`: the
    columns in use.
    """

    rate: float
    bound: float
    weight: FloatArray
    duals: list[FloatArray]
    trees: Trees
    rounds: int
    columns: int
    converged: bool
    seconds: dict[str, float] = field(default_factory=dict[str, float])


def certified_bound(net: Net, pricer: Pricer, weight: FloatArray) -> tuple[float, FloatArray]:
    """(upper bound on z, distance sums of all sources float64 [ranks]) for arc weights, on the whole network without
    any symmetry."""
    if pricer.steps >= net.ranks - 1:
        total = _contracted_totals(net, weight)
    else:
        total = np.concatenate([pricer.trees(weight, block).total() for block in blocks(np.arange(net.ranks))])
    paid = float(total.sum())  # 0: prices on arcs that every path avoids prove nothing
    return float((net.cap * weight).sum()) / paid if paid else float("inf"), total


def _contracted_totals(net: Net, weight: FloatArray) -> FloatArray:
    """Distance sums of all sources, float64 [ranks], with nodes that free arcs join both ways made one: prices are
    mostly those of cuts, zero on almost every arc, and leave a handful of nodes."""
    label = strong_components(net.nodes, net.tail[weight == 0], net.head[weight == 0])
    count = np.bincount(label[: net.ranks], minlength=int(label.max()) + 1)
    order = np.argsort(count == 0, kind="stable")  # components with ranks first
    label, count = np.argsort(order)[label], count[order]
    tail, head = label[net.tail], label[net.head]
    at = np.flatnonzero(tail != head)
    at = at[np.lexsort((weight[at], head[at], tail[at]))]
    at = at[np.diff(tail[at] * len(count) + head[at], prepend=-1) != 0]  # of parallel arcs the cheapest
    ranks = int((count > 0).sum())
    small = Net(ranks, len(count), tail[at], head[at], tuple(net.capacity[a] for a in at))
    pricer, sums = Pricer(small), np.zeros(len(count))
    for block in blocks(np.arange(ranks)):
        sums[block] = count[:ranks] @ pricer.trees(weight[at], block).dist[:ranks]
    return sums[label[: net.ranks]]


def _tailing(gaps: list[float], rate: float) -> bool:
    rounds, kept, share = TAIL
    return len(gaps) > rounds and kept * gaps[-1 - rounds] < gaps[-1] < share * rate


class ColumnGeneration:
    """One solve. The master and its basis live as long as this object."""

    def __init__(self, net: Net, pricer: Pricer, sym: Symmetry, limits: Limits, threads: int | None = None):
        self.net, self.pricer, self.sym, self.limits = net, pricer, sym, limits
        self.cap_class = np.zeros(len(sym.arc_count))
        self.cap_class[sym.arc_class] = net.cap
        self.cap_class *= sym.arc_count
        self.count = sym.rank_count.astype(float)
        self.master = RestrictedMaster(len(sym.reps), len(sym.arc_count), threads)
        self.seconds = {"pricing": 0.0, "master": 0.0}
        self.trees: list[Trees] = []
        self.duals: list[tuple[float, int, FloatArray]] = []
        self.centre = np.ones(len(self.cap_class))
        self._priced = 0

    @contextmanager
    def _timed(self, name: str) -> Generator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] += time.monotonic() - began

    def spread(self, price: FloatArray) -> FloatArray:
        """Arc weights from the duals of the scaled capacity rows."""
        return (price / self.cap_class)[self.sym.arc_class]

    def best(self) -> tuple[float, FloatArray]:
        """The lowest bound so far and the weights that gave it."""
        bound, _, weight = max(self.duals)
        return -bound, weight

    def price(self, weight: FloatArray) -> Trees:
        """The cheapest tree of every source class; keeps the bound that the weights prove."""
        with self._timed("pricing"):
            forests = [self.pricer.trees(weight, block) for block in blocks(self.sym.reps)]
            scale = float((self.count * np.concatenate([f.total() for f in forests])).sum())
            if scale > 0:  # prices on arcs that every tree avoids prove nothing
                self._keep_dual(float((self.net.cap * weight).sum()) / scale, weight / scale)
            return Trees.join([f.loads() for f in forests])

    def _keep_dual(self, bound: float, weight: FloatArray) -> None:
        self._priced += 1
        heapq.heappush(self.duals, (-bound, self._priced, weight))
        if len(self.duals) > DUALS_KEPT:
            heapq.heappop(self.duals)

    def shares(self, trees: Trees) -> Trees:
        """The trees over arc classes: what share of a class's capacity one unit of every member's image of the tree
        takes."""
        if self.sym.trivial:
            return Trees(trees.source, trees.start, trees.arc, trees.units / self.net.cap[trees.arc])
        tree, arc = trees.tree, self.sym.arc_class[trees.arc]
        count = self.count[self.sym.rank_class[trees.source]][tree]
        key = tree * len(self.cap_class) + arc
        return Trees.from_keys(trees.source, len(self.cap_class), key, trees.units * count / self.cap_class[arc])

    def add(self, trees: Trees) -> None:
        """Add trees of any sources as columns; a tree stands for those of its source's whole class."""
        if len(trees):
            self.master.add(self.sym.rank_class[trees.source], self.shares(trees))
            self.trees.append(trees)

    def seed(self, rounds: int, window: int = 1, steepness: float = 2.0) -> None:
        """First columns and bounds: prices of likely cuts, then multiplicative weights, where block after block of
        sources takes its cheapest trees at prices that grow with past use, the steeper the higher `steepness`. What a
        source sends in `window` rounds is one column, their mean: few columns, and near the optimum late."""
        for cut in cut_prices(self.net):
            mean = np.bincount(self.sym.arc_class, cut) / self.sym.arc_count
            self.add(self.price(mean[self.sym.arc_class]))
        used, taken = np.zeros(len(self.cap_class)), list[Trees]()
        for i in range(rounds):
            for block in blocks(self.sym.reps, SEED_BLOCK):
                self.centre = np.exp(steepness * (i + 1) ** 0.5 * (used / max(used.max(), 1e-300) - 1))
                with self._timed("pricing"):
                    trees = self.pricer.trees(self.spread(self.centre), block).loads()
                share = self.shares(trees)
                used += np.bincount(share.arc, share.units, len(used))
                taken.append(trees)
            if (i + 1) % window == 0 or self.limits.stop():
                self.add(self._mean(taken))
                taken.clear()
                if self.limits.stop():
                    return
                if window > 1:
                    self.price(self.spread(self.centre))  # for its bound

    def _mean(self, taken: list[Trees]) -> Trees:
        """One column a source class, the mean of its trees; all classes have as many."""
        trees = Trees.join(taken)
        key = self.sym.rank_class[trees.source][trees.tree] * self.net.arcs + trees.arc
        return Trees.from_keys(self.sym.reps, self.net.arcs, key, trees.units * len(self.sym.reps) / len(trees))

    def restart(self, trees: Trees, weight: FloatArray) -> None:
        """Begin from an earlier solve's trees and prices (float64 [arcs]) instead of a seeding."""
        self.add(trees)
        mean = np.bincount(self.sym.arc_class, weight * self.net.cap)
        self.centre = mean / mean.sum() + 1 / len(mean)
        for cut in (self.spread(self.centre), *cut_prices(self.net)):
            total = np.bincount(self.sym.arc_class, cut) / self.sym.arc_count
            self.add(self.price(total[self.sym.arc_class]))

    def run(self, tolerance: float, progress: Callable[[float, float], None] | None = None) -> Fractional:
        """Alternate master and pricing until bound and rate agree to `tolerance` (relative), the prices find no tree,
        or the limits say stop."""
        self.price(self.spread(np.ones(len(self.cap_class))))
        solution: MasterSolution | None = None
        rounds, converged, stalled, gap = 0, False, 0, np.inf
        gaps: list[float] = []
        while stalled < PATIENCE:
            with self._timed("master"):
                found = self.master.solve(None if self.limits.left() == float("inf") else self.limits.left())
            if found is None:
                break
            solution, rounds = found, rounds + 1
            if progress:
                progress(solution.rate, self.best()[0])
            converged = self.best()[0] - solution.rate <= tolerance * self.best()[0]
            if converged or self.limits.stop():
                break
            now = self.best()[0] - solution.rate
            stalled, gap = (0, now) if now < gap * (1 - 1e-9) else (stalled + 1, gap)
            gaps.append(now)
            if self.sym.trivial and _tailing(gaps, solution.rate):
                break
            if not self._improve(solution, smooth=rounds % 2 == 1):
                converged = True
                break
        return self._outcome(solution, rounds, converged)

    def _improve(self, solution: MasterSolution, smooth: bool) -> bool:
        """Add trees that pay off at the master's prices; False if there is none."""
        own = self.spread(solution.price / solution.price.sum())
        # A tree already in the master may seem to pay within the solver's own tolerance.
        worth = (solution.worth - 2 * DUAL_TOLERANCE) / self.count / solution.price.sum()
        mixed = (1 - SMOOTHING) * own + SMOOTHING * self.spread(self.centre / self.centre.sum())
        for weight in (mixed, own) if smooth else (own,):
            trees = self.price(weight)
            pays = np.flatnonzero(trees.cost(own) < worth)
            if len(pays):
                self.add(trees.take(pays))
                return True
        return False

    def _outcome(self, solution: MasterSolution | None, rounds: int, converged: bool) -> Fractional:
        bound, weight = self.best()
        trees = Trees.join(self.trees)
        keep = np.arange(len(trees)) if solution is None else np.flatnonzero(solution.value > 0)
        duals = [w for _, _, w in sorted(self.duals, reverse=True)]
        rate = solution.rate if solution else 0.0
        return Fractional(
            rate, bound, weight, duals, trees.take(keep), rounds, self.master.columns, converged, self.seconds
        )
