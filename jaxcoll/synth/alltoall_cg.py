"""Column generation for the all-to-all throughput LP: master, pricing, bounds.

Every pricing gives a certified upper bound, whatever the master did: for arc weights w >= 0 no rate z above
sum_a c_a w_a / sum_(s,d) dist_w(s, d) can be routed, because every unit pays at least its distance and arc a can be paid for c_a times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net, Symmetry, no_symmetry, symmetry
from jaxcoll.synth.master import MasterSolution, RestrictedMaster
from jaxcoll.synth.pricing import Forest, Pricer


SMOOTHING = 0.5
"""Share of the best bound's prices in the prices that are tried next."""
SEED_STEEPNESS = 4.0


@dataclass(frozen=True)
class Clock:
    """When a solve must end (seconds of time.monotonic, inf: never), and whether somebody asked it to."""

    deadline: float = float("inf")
    cancel: Callable[[], bool] = lambda: False

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def stop(self) -> bool:
        return self.left() <= 0 or self.cancel()


@dataclass
class Columns:
    """What a warm start keeps: trees as their arc loads. `source` int64 [k] (ranks), `load` float64 [arcs, k]; `weight`: the last prices [arcs]."""

    source: IntArray
    load: FloatArray
    weight: FloatArray


@dataclass
class Fractional:
    """The LP's outcome. `rate` is reached by the master (over classes), `bound` certified on the whole network by `weight` (float64 [arcs])."""

    rate: float
    bound: float
    weight: FloatArray
    rounds: int
    columns: int
    classes: tuple[int, int]
    converged: bool
    seconds: dict[str, float] = field(default_factory=dict)
    duals: list[FloatArray] = field(default_factory=list)
    """Weight vectors of the best bounds, each scaled so that the distances of all pairs add up to 1."""
    keep: Columns | None = None


def certified_bound(net: Net, pricer: Pricer, weight: FloatArray) -> tuple[float, FloatArray]:
    """(upper bound on z, distance sums of all sources float64 [ranks]) for arc weights, on the whole network without any symmetry."""
    total = np.concatenate([pricer.trees(weight, block).total() for block in source_blocks(net)])
    return float(net.cap @ weight / total.sum()), total


def source_blocks(net: Net, size: int = 64) -> list[IntArray]:
    """The ranks in blocks that keep the pricing's matrices in the cache."""
    ranks = np.arange(net.ranks)
    return [ranks[i : i + size] for i in range(0, net.ranks, size)]


class ColumnGeneration:
    """One solve. The master and its basis live as long as this object."""

    def __init__(self, net: Net, pricer: Pricer, sym: Symmetry, clock: Clock, threads: int | None):
        self.net, self.pricer, self.sym, self.clock = net, pricer, sym, clock
        self.cap_class = np.zeros(len(sym.arc_count))
        self.cap_class[sym.arc_class] = net.cap
        self.cap_class *= sym.arc_count
        self.count = sym.rank_count.astype(float)
        self.master = RestrictedMaster(len(sym.reps), len(sym.arc_count), threads)
        self.seconds = {"pricing": 0.0, "master": 0.0}
        self.sources: list[IntArray] = []
        self.loads: list[FloatArray] = []
        self.duals: list[tuple[float, FloatArray]] = []

    def spread(self, price: FloatArray) -> FloatArray:
        """Arc weights from the duals of the scaled capacity rows."""
        return (price / self.cap_class)[self.sym.arc_class]

    def price(self, weight: FloatArray) -> tuple[float, FloatArray, FloatArray]:
        """Price one tree per source class: (bound, distance sums [classes], loads [arcs, classes])."""
        began = time.monotonic()
        blocks = [self.sym.reps[i : i + 64] for i in range(0, len(self.sym.reps), 64)]
        forests: list[Forest] = [self.pricer.trees(weight, block) for block in blocks]
        total = np.concatenate([f.total() for f in forests])
        load = np.concatenate([f.arc_loads() for f in forests], axis=1)
        scale = float(self.count @ total)
        bound = float(self.net.cap @ weight) / scale
        self.duals.append((bound, weight / scale))
        self.seconds["pricing"] += time.monotonic() - began
        return bound, total, load

    def class_load(self, classes: IntArray, load: FloatArray) -> FloatArray:
        """Utilisation of every arc class by one unit of every member's image of the trees."""
        out = np.zeros((len(self.cap_class), load.shape[1]))
        np.add.at(out, self.sym.arc_class, load)
        return out * self.count[classes] / self.cap_class[:, None]

    def add(self, classes: IntArray, load: FloatArray) -> None:
        self.master.add(classes, self.class_load(classes, load))
        self.sources.append(self.sym.reps[classes])
        self.loads.append(load)

    def solve_master(self) -> MasterSolution | None:
        began = time.monotonic()
        left = self.clock.left()
        found = self.master.solve(None if left == float("inf") else left)
        self.seconds["master"] += time.monotonic() - began
        return found

    def seed_columns(self, rounds: int) -> None:
        """First columns by multiplicative weights: trees for prices that grow with the use of an arc by the trees before."""
        used = np.zeros(len(self.cap_class))
        price = np.ones(len(self.cap_class))
        classes = np.arange(len(self.sym.reps))
        for i in range(rounds):
            _, _, load = self.price(self.spread(price))
            self.add(classes, load)
            used += self.class_load(classes, load).sum(axis=1)
            if self.clock.stop():
                return
            price = np.exp(SEED_STEEPNESS * (i + 1) ** 0.5 * (used / used.max() - 1))

    def run(self, tolerance: float, progress: Callable[[int, float, float], None] | None) -> tuple[MasterSolution | None, int, bool]:
        """Alternate master and pricing until bound and rate agree to `tolerance` (relative): (last master, rounds, converged)."""
        solution, smooth, rounds = None, SMOOTHING, 0
        while True:
            found = self.solve_master()
            if found is None:
                return solution, rounds, False
            solution, rounds = found, rounds + 1
            bound, centre = min(self.duals, key=lambda d: d[0])
            if progress:
                progress(rounds, solution.rate, bound)
            if bound - solution.rate <= tolerance * bound:
                return solution, rounds, True
            if self.clock.stop():
                return solution, rounds, False
            weight = self.spread(solution.price)
            if not self.improve(solution, smooth * centre / (self.net.cap @ centre) + (1 - smooth) * weight / (self.net.cap @ weight)):
                # The smoothed prices found nothing that the master's own prices call improving: price those.
                if not self.improve(solution, weight):
                    return solution, rounds, True

    def improve(self, solution: MasterSolution, weight: FloatArray) -> bool:
        """Price at `weight`; add the trees that pay off at the master's prices. False if there is none."""
        _, _, load = self.price(weight)
        classes = np.arange(len(self.sym.reps))
        cost = solution.price @ self.class_load(classes, load)
        take = np.flatnonzero(cost < solution.worth - 1e-9)
        if len(take):
            self.add(take, load[:, take])
        return bool(len(take))
