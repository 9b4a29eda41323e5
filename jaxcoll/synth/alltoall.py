"""All-to-all schedules of the highest throughput by column generation and rounding (MCCL 4.2, appendices D, F and G).

The rate z is what every ordered pair of ranks gets at the same time, in the topology's unit: an all-to-all that moves
b bits between every two ranks
takes b / z when it is throughput-bound. `bound` is the LP optimum, certified by arc prices on the whole network.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from jaxcoll.errors import UsageError
from jaxcoll.schedule import Schedule
from jaxcoll.schedule.ir import Chunk, Collective, Kind
from jaxcoll.synth.alltoall_cg import ColumnGeneration, Fractional, Limits, certified_bound
from jaxcoll.synth.alltoall_cuts import tight_cuts
from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net, Symmetry, is_equitable, no_symmetry, symmetry
from jaxcoll.synth.alltoall_round import Router
from jaxcoll.synth.alltoall_routing import Routing, rate_bound
from jaxcoll.synth.alltoall_schedule import hops, to_schedule
from jaxcoll.synth.alltoall_warm import AllToAllWarm
from jaxcoll.synth.path_trees import Trees
from jaxcoll.synth.pricing import Pricer
from jaxcoll.synth.result import Cancelled, Clock, Progress, Status, SynthResult
from jaxcoll.topology import Topology

TOLERANCE = 1e-6
"""Relative distance of rate and bound at which the LP counts as solved."""
LOOSE = 1e-3
"""The same where no symmetry helps: below what cutting into ten chunks costs anyway."""
SEEDS = ((8, 1, 2.0), (200, 25, 4.0))
"""Rounds, window and steepness of seeding, with and without symmetry."""
FINER = (16, 32, 64)
"""Parts that a block is cut into beyond the number of its chunks; a chunk may then hold several."""
WORTH_MORE = 5e-4
"""Relative gain below which more parts are not worth their messages."""

SUSPICIOUS = 0.99
"""Below this share of the bound the classes are checked: a routing that nearly reaches the bound proves that it is
tight, one that does not may owe it
to ranks that only look alike."""
QUICK, BIG_QUICK, BIG = 0.01, 0.02, 1_000_000
"""Without symmetry a routing this close to a cut's bound is good enough: the LP takes long, and gains little. The
second where ranks times links reach the third: there the LP takes minutes."""
NO_TREES = Trees(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0))
PATIENCE, TRIAL = 24, 6
"""Rounds of negotiation without progress after which the target drops; of a trial, which may end in nothing."""
DUALS = 16
"""Dual vectors that bound the rate of whole chunks."""


class _Watch:
    """Clock, time limit and cancellation in one; asking twice gives the same answer."""

    def __init__(self, progress: Progress | None, cancel: Callable[[], bool] | None, time_limit: float | None):
        self.clock = Clock(progress, None)
        self._cancel = cancel
        self.cancelled = False
        self.limits = Limits(float("inf") if time_limit is None else time.monotonic() + time_limit, self._ask)

    def _ask(self) -> bool:
        self.cancelled = self.cancelled or (self._cancel is not None and self._cancel())
        return self.cancelled

    def tick(self, done: float | None) -> None:
        """Pass progress on; a caller that says stop is remembered, so that the best result so far can be returned."""
        try:
            self.clock.tick(done)
        except Cancelled:
            self.cancelled = True


@dataclass
class _Problem:
    net: Net
    pricer: Pricer
    steps: int
    chunks: int
    seed: int
    watch: _Watch


@dataclass(frozen=True)
class _Start:
    """An earlier solve, and for every arc of its network the number here or -1 (`AllToAllWarm.arcs_in`)."""

    warm: AllToAllWarm
    arcs: IntArray


@dataclass(frozen=True)
class _Found:
    lp: Fractional
    sym: Symmetry | None
    routing: Routing
    part_bound: float


def all_to_all(
    topology: Topology,
    *,
    steps: int | str | None = None,
    chunks: int = 10,
    warm: AllToAllWarm | None = None,
    time_limit: float | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    cancel: Callable[[], bool] | None = None,
    seed: int = 0,
    use_symmetry: bool = True,
    build: bool = True,
) -> SynthResult:
    """Synthesise an all-to-all.

    Args:
        topology: the network; capacities in any unit.
        steps: most rank-to-rank hops of any chunk; None: ranks - 1, which bounds nothing; "min": the fewest that keep
        the LP's rate (appendix D).
        chunks: most chunks that one pair's block is cut into (1 or more).
        warm: `SynthResult.warm` of an earlier solve on the same ranks and switches; links may differ in capacity, be
        new or be gone.
        time_limit: seconds; then the best so far is returned with status TIME_LIMIT. A first routing is always made,
        in seconds at 512 ranks.
        threads: most threads of the LP solver; one if None. The rest of the solve is single-threaded.
        progress: called with (phase, done 0..1 or None); returning False cancels. cancel: asked now and then, True
        cancels.
        seed: of the rounding's random choices; the same inputs give the same result when no limit strikes.
        use_symmetry: solve the LP over classes of alike ranks and links. Exact: the bound is certified without it,
        and dropped if that fails.
        build: make the Schedule; without it `schedule` is None.

    Returns:
        SynthResult; `throughput` is exact. `details`: lp_rate, parts (equal ones, that blocks are cut into),
        chunks (of the pair that has most), chunk_bound (no routing of as many equal parts, or fewer, is faster),
        rank_classes, ...

    Raises:
        UsageError: bad arguments. Cancelled: the caller cancelled before there was any routing.
    """
    _check(topology, steps, chunks, time_limit)
    watch = _Watch(progress, cancel, time_limit)
    if topology.nranks == 1:
        return _single(topology)
    with watch.clock.phase("network"):
        net = Net.from_topology(topology, None if warm is None else warm.net)
        bound_steps = steps if isinstance(steps, int) else net.ranks - 1
    problem = _Problem(net, Pricer(net, bound_steps), bound_steps, chunks, seed, watch)
    start = None if warm is None else _Start(warm, warm.arcs_in(net))
    with watch.clock.phase("bound"):
        lost = _unreachable(problem)
        if lost:
            return _infeasible(topology, lost, watch)
    found = _without_lp(problem, start) if start and steps is None else None
    if found is None or not _enough(problem, found, (1 - WORTH_MORE) ** 2):
        with watch.clock.phase("network"):
            sym = symmetry(net) if use_symmetry else no_symmetry(net)
        if sym.trivial and found is None and steps is None:
            found = _without_lp(problem, None)
        if found is None or not (sym.trivial and _enough(problem, found, 1 - _quick(net))):
            problem, found = _with_lp(problem, sym, start, found, steps == "min", threads)
    with watch.clock.phase("schedule"):
        schedule = _schedule(problem, found.routing, warm, f"all_to_all:{topology.name}") if build else None
    return _result(topology, problem, found, schedule)


def _without_lp(problem: _Problem, start: _Start | None) -> _Found:
    """A routing, mended from the earlier one if there is one, and what the likely cuts allow: where it comes near that,
    there is no LP to be solved."""
    net, watch = problem.net, problem.watch
    with watch.clock.phase("bound"):
        cuts = tight_cuts(net)
        trees = start.warm.columns_in(net, start.arcs)[0] if start else NO_TREES
        duals = [price for _, price in cuts]
        lp = Fractional(0.0, cuts[0][0], duals[0], duals, trees, 0, 0, True, {"pricing": 0.0, "master": 0.0})
        bounds = _part_bounds(problem, lp)
    with watch.clock.phase("rounding"):
        routing = _climb(problem, np.asarray(sum(duals)), bounds, start)
    return _Found(lp, None, routing, max(bounds.values()))


def _enough(problem: _Problem, found: _Found, share: float) -> bool:
    """Whether the routing reaches this share of its bound, or time is up."""
    return found.routing.rate(problem.net) >= found.part_bound * share or problem.watch.limits.stop()


def _quick(net: Net) -> float:
    return BIG_QUICK if net.ranks * net.arcs >= BIG else QUICK


def _with_lp(
    problem: _Problem,
    sym: Symmetry,
    start: _Start | None,
    found: _Found | None,
    fewest: bool,
    threads: int | None,
) -> tuple[_Problem, _Found]:
    """`found`: what was reached without an LP."""
    with problem.watch.clock.phase("bound"):
        lp, sym = _solve_lp(problem, sym, start, threads, found.routing.columns(problem.net) if found else None)
        if fewest:
            problem, lp = _fewest_steps(problem, lp, sym, threads)
    rounded = _rounded(problem, sym, lp, start, threads)
    if found and found.routing.rate(problem.net) > rounded.routing.rate(problem.net):
        rounded = replace(rounded, routing=found.routing)
    return problem, rounded


def _rounded(problem: _Problem, sym: Symmetry, lp: Fractional, start: _Start | None, threads: int | None) -> _Found:
    """The best routing found, and the LP solved again without classes where these turn out wrong."""
    net = problem.net
    with problem.watch.clock.phase("rounding"):
        bounds = _part_bounds(problem, lp)
        routing = _best_of_both(problem, lp, bounds, start) if sym.trivial else _round(problem, lp, bounds, start)
        if _doubtful(problem, sym, routing, max(bounds.values())):
            sym = no_symmetry(net)
            lp, _ = _solve_lp(problem, sym, start, threads)
            bounds = _part_bounds(problem, lp)
            routing = max(routing, _best_of_both(problem, lp, bounds, start), key=lambda r: r.rate(net))
    return _Found(lp, sym, routing, max(bounds.values()))


def _schedule(problem: _Problem, routing: Routing, warm: AllToAllWarm | None, name: str) -> Schedule:
    if warm is not None and routing is warm.routing and warm.schedule is not None:
        return warm.schedule.renamed(name)
    return to_schedule(problem.net, routing, name)


def _check(topology: Topology, steps: int | str | None, chunks: int, time_limit: float | None) -> None:
    if isinstance(steps, str) and steps != "min":
        raise UsageError(
            f"steps is {steps!r}; give a number of hops, None for no bound, or 'min' for the fewest that keep the rate"
        )
    if isinstance(steps, int) and steps < 1:
        raise UsageError(f"steps is {steps}; every chunk needs at least one hop")
    if chunks < 1:
        raise UsageError(f"chunks is {chunks}; a block is at least one chunk")
    if time_limit is not None and not time_limit > 0:
        raise UsageError(f"time_limit is {time_limit}; give seconds above 0, or None")
    topology.validate()


def _single(topology: Topology) -> SynthResult:
    schedule = Schedule(f"all_to_all:{topology.name}", Collective(Kind.ALL_TO_ALL, 1), 0, (Chunk(0, 0),), ())
    why = "one rank: nothing moves"
    return SynthResult("all_to_all", 1, Fraction(0), Fraction(0), schedule, 0, 0, {}, Status.OPTIMAL, why)


def _unreachable(problem: _Problem) -> str:
    """Why some pair can't be joined within the steps, or nothing."""
    net = problem.net
    if problem.steps >= net.ranks - 1:
        return ""
    for source in range(net.ranks):
        far = problem.pricer.trees(np.ones(net.arcs), np.array([source])).dist[: net.ranks, 0]
        if np.isinf(far).any():
            dest = int(np.flatnonzero(np.isinf(far))[0])
            need = Pricer(net).trees(np.ones(net.arcs), np.array([source])).paths(np.array([0]), np.array([dest]))
            count = int(hops(net, need)[0])
            return (
                f"rank {net.name(dest)} is {count} hops from rank {net.name(source)}, but steps is {problem.steps}; "
                "allow more steps"
            )
    return ""


def _infeasible(topology: Topology, why: str, watch: _Watch) -> SynthResult:
    zero = Fraction(0)
    return SynthResult(
        "all_to_all", topology.nranks, zero, zero, None, 0, 0, watch.clock.seconds, Status.INFEASIBLE, why
    )


def _solve_lp(
    problem: _Problem,
    sym: Symmetry,
    start: _Start | Fractional | None,
    threads: int | None,
    columns: Trees | None = None,
) -> tuple[Fractional, Symmetry]:
    """The LP over the classes, its bound certified on the whole network; without classes if they turn out to be no
    symmetry. `start`: an earlier solve, or one of the same network with other steps; `columns`: more of them."""
    net, watch = problem.net, problem.watch
    # Half of the time that is left is for the LP: its bound is good early, and without a rounding there is no schedule.
    half = replace(watch.limits, deadline=time.monotonic() + watch.limits.left() / 2)
    cg = ColumnGeneration(net, problem.pricer, sym, half, threads)
    if isinstance(start, Fractional):
        cg.restart(problem.pricer.short(start.trees), start.weight)
    elif start is not None:
        cg.restart(*start.warm.columns_in(net, start.arcs))
    else:
        cg.seed(*SEEDS[sym.trivial])
    if columns is not None:
        cg.add(columns)
    tolerance = LOOSE if sym.trivial else TOLERANCE
    lp = cg.run(tolerance, lambda rate, bound: watch.tick(rate / bound))
    bound, total = certified_bound(net, problem.pricer, lp.weight)
    if np.allclose(total, total[sym.reps][sym.rank_class], rtol=1e-9):
        return replace(lp, bound=bound), sym
    # Colour refinement took different ranks for alike (it can, on regular networks): their trees don't cost the same.
    return _solve_lp(problem, no_symmetry(net), start, threads, columns)


def _fewest_steps(problem: _Problem, lp: Fractional, sym: Symmetry, threads: int | None) -> tuple[_Problem, Fractional]:
    """Appendix D: bisect the number of steps, each LP starting from the columns that are short enough."""
    low, high, kept = 1, problem.steps, (problem, lp)
    # Trees never need more hops than the deepest one in use: start there.
    while low <= high and not problem.watch.limits.stop():
        steps = (low + high) // 2
        trial = replace(problem, pricer=Pricer(problem.net, steps), steps=steps)
        if _unreachable(trial):
            low = steps + 1
            continue
        found, _ = _solve_lp(trial, sym, kept[1], threads)
        if found.rate >= lp.rate * (1 - 2 * TOLERANCE) and found.bound <= lp.bound * (1 + TOLERANCE):
            kept, high = (trial, replace(found, bound=lp.bound)), steps - 1
        else:
            low = steps + 1
    return kept


def _part_bounds(problem: _Problem, lp: Fractional) -> dict[int, float]:
    """For every number of parts a proven bound of the rate."""
    duals = lp.duals[:DUALS]
    priced = np.flatnonzero(np.any(duals, axis=0))
    cap, alike = np.unique(problem.net.cap[priced], return_inverse=True)
    weights = np.array([np.bincount(alike, dual[priced], len(cap)) for dual in duals], np.float64)
    grid = [*range(1, problem.chunks + 1), *(k for k in FINER if k > problem.chunks > 1)]
    return {k: rate_bound(cap, weights, k, lp.bound) for k in grid}


def _begin(problem: _Problem, weight: FloatArray, start: _Start | None) -> tuple[Router, Routing]:
    """A router for prices `weight` (float64 [arcs]), and its first routing or the earlier one, made whole again."""
    net, watch = problem.net, problem.watch
    router = Router(net, problem.pricer, weight, problem.seed, watch.limits.stop, problem.chunks, start is not None)
    if watch.cancelled:
        raise Cancelled("cancelled by the caller before there was a routing")
    best = router.first() if start is None else start.warm.routing_in(net, start.arcs, router, problem.steps)
    if best.most_chunks() > problem.chunks:
        best = best.with_parts(problem.chunks, net.arcs).tidy()
    return router, best


def _climb(problem: _Problem, weight: FloatArray, bounds: dict[int, float], start: _Start | None) -> Routing:
    """A routing in few parts, or in the finest ones where that stays below its bound: for networks in which hardly two
    links are alike."""
    net, finest = problem.net, max(bounds)
    router, best = _begin(problem, weight, start)
    best = best.with_parts(_fewest_parts(bounds), net.arcs)
    best = router.improve(best, bounds[best.parts], TRIAL)
    if best.rate(net) >= max(bounds.values()) * (1 - WORTH_MORE):
        return best
    higher = router.climb(best.with_parts(finest, net.arcs), bounds[finest])
    return max(best, higher, key=lambda r: r.rate(net))


def _best_of_both(problem: _Problem, lp: Fractional, bounds: dict[int, float], start: _Start | None) -> Routing:
    """`_climb`, and where that ends too low, `_round`, which takes longer."""
    routing = _climb(problem, lp.weight, bounds, start)
    if routing.rate(problem.net) >= max(bounds.values()) * (1 - _quick(problem.net)):
        return routing
    return max(routing, _round(problem, lp, bounds, start), key=lambda r: r.rate(problem.net))


def _round(problem: _Problem, lp: Fractional, bounds: dict[int, float], start: _Start | None) -> Routing:
    """The best routing found into at most `chunks` chunks."""
    net, watch = problem.net, problem.watch
    router, best = _begin(problem, lp.weight, start)
    best = best.with_parts(_fewest_parts(bounds), net.arcs)
    best = router.improve(best, bounds[best.parts], PATIENCE)
    fresh, untried = start is None, dict(bounds)
    while untried and not watch.limits.stop():
        watch.tick(min(best.rate(net) / lp.bound, 1.0))
        count = _fewest_parts(untried)
        if best.rate(net) >= untried.pop(count) * (1 - WORTH_MORE):
            break
        trial = router.improve(best.with_parts(count, net.arcs), bounds[count], PATIENCE)
        if not fresh and trial.rate(net) < bounds[count] * (1 - WORTH_MORE):
            # An old routing full of detours can be a bad place to start from.
            fresh = True
            anew = router.improve(router.first().with_parts(count, net.arcs), bounds[count], PATIENCE)
            trial = max(trial, anew, key=lambda r: r.rate(net))
        best = max(best, trial, key=lambda r: r.rate(net))
    return best


def _fewest_parts(bounds: dict[int, float]) -> int:
    """The fewest parts that allow all but a share of the best rate."""
    top = max(bounds.values())
    return min(parts for parts, bound in bounds.items() if bound >= top * (1 - WORTH_MORE))


def _doubtful(problem: _Problem, sym: Symmetry, routing: Routing, bound: float) -> bool:
    """Whether the classes turn out wrong, looked into only where the routing leaves room for doubt."""
    if sym.trivial or problem.watch.limits.stop() or routing.rate(problem.net) >= SUSPICIOUS * bound:
        return False
    return not is_equitable(problem.net, sym)


def _exact_rate(net: Net, routing: Routing) -> Fraction:
    """K times the least capacity / load, exactly."""
    share = routing.load / net.cap
    worst = np.flatnonzero(share >= share.max() * (1 - 1e-9))
    load = routing.load[worst]
    least = [worst[load == n][net.cap[worst[load == n]].argmin()] for n in np.unique(load)]
    return min(routing.parts * net.capacity[a] / int(routing.load[a]) for a in least)


def _result(
    topology: Topology,
    problem: _Problem,
    found: _Found,
    schedule: Schedule | None,
) -> SynthResult:
    net, watch, lp, routing = problem.net, problem.watch, found.lp, found.routing
    rate = _exact_rate(net, routing)
    # The bound is a float sum over all arcs: within its rounding error a routing that reaches it is optimal.
    bound = max(lp.bound, float(rate))
    late = watch.limits.stop()
    why = ("cancelled by the caller" if watch.cancelled else "time limit") + ": the best so far" if late else ""
    depth = schedule.steps if schedule else int(hops(net, routing.path).max())
    if not why and not lp.converged:
        why = f"the LP was left between {lp.rate:.6g} and its bound, where progress had become slow"
    details: dict[str, Any] = {
        "lp_rate": lp.rate,
        "lp_rounds": lp.rounds,
        "columns": lp.columns,
        "pricing_seconds": lp.seconds["pricing"],
        "master_seconds": lp.seconds["master"],
        **({"rank_classes": len(found.sym.reps), "link_classes": len(found.sym.arc_count)} if found.sym else {}),
        "parts": routing.parts,
        "chunks": routing.most_chunks(),
        "chunk_bound": max(found.part_bound, float(rate)),
        "capacity_unit": str(topology.unit_capacity()),
    }
    again = AllToAllWarm(net, lp.trees, lp.weight, routing, schedule)
    return SynthResult(
        "all_to_all", net.ranks, bound, rate, schedule, depth, depth, watch.clock.seconds,
        Status.TIME_LIMIT if late else Status.OPTIMAL, why, again, details,
    )  # fmt: skip
