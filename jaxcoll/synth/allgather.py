"""AllGather, ReduceScatter and AllReduce for a given network, by tree packing: the public functions.

Rates are per rank: with rate x, every rank's block of S bits reaches all ranks after S / x seconds (plus latency), so
the algorithm bandwidth that NCCL's tests report is ranks * x (`details["algbw"]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from jaxcoll.errors import SynthesisError, UsageError
from jaxcoll.schedule.ir import Schedule
from jaxcoll.synth.fallback import shortest_trees, simple_bound
from jaxcoll.synth.forest import Forest, History, Wish, solve
from jaxcoll.synth.lowering import all_gather_schedule, all_reduce_schedule, reduce_scatter_schedule
from jaxcoll.synth.result import Cancelled, Clock, Progress, Status, SynthResult, TimeUp
from jaxcoll.synth.trees import Tree, depths
from jaxcoll.topology.graph import Topology


@dataclass(frozen=True)
class _Options:
    """The keyword arguments that all three functions share; `all_gather` describes them."""

    chunks: int | None
    max_depth: int | None
    latency: bool
    lanes: int | None
    build: bool
    progress: Progress | None
    time_limit: float | None

    def __post_init__(self) -> None:
        if self.time_limit is not None and not self.time_limit > 0:
            raise UsageError(f"time_limit is {self.time_limit}; give seconds above 0, or None")
        for name in ("chunks", "max_depth", "lanes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; it must be at least 1")


def all_gather(
    topology: Topology,
    *,
    chunks: int | None = None,
    max_depth: int | None = None,
    latency: bool = False,
    lanes: int | None = None,
    warm: History | None = None,
    time_limit: float | None = None,
    progress: Progress | None = None,
    build: bool = True,
) -> SynthResult:
    """A throughput-optimal AllGather.

    Args:
        topology: the network; capacities in any unit.
        chunks: trees per root (ForestColl's fixed k); None takes as many as the optimal rate needs.
        max_depth: no tree deeper than this; the rate found within it is reported against the unbounded bound.
        latency: remove switches by the LP of MCCL appendix C, which prefers shallow trees, instead of in proportion.
        lanes: of the schedule's pipeline; None chooses.
        warm: `SynthResult.warm` of an earlier solve on the same nodes; links may differ, be new or be gone.
        time_limit: seconds; then the best so far is returned with status TIME_LIMIT: the deepest search's best, the
            trees of `warm`, or shortest trees, which take no search (their making is not cut short).
        progress: called with (phase, done 0..1 or None); returning False cancels.
        build: make the Schedule; without it `schedule` is None.

    Returns:
        SynthResult; rates are exact. Its status is INFEASIBLE, with the reason, when no trees fit `max_depth`.

    Raises:
        UsageError: a bad argument. Cancelled: by `progress`.
        SynthesisError: a network whose numbers are beyond exact arithmetic; the message says what to round.
    """
    options = _Options(chunks, max_depth, latency, lanes, build, progress, time_limit)
    return _single("all_gather", topology, topology, options, warm)


def reduce_scatter(
    topology: Topology,
    *,
    chunks: int | None = None,
    max_depth: int | None = None,
    latency: bool = False,
    lanes: int | None = None,
    warm: History | None = None,
    time_limit: float | None = None,
    progress: Progress | None = None,
    build: bool = True,
) -> SynthResult:
    """A throughput-optimal ReduceScatter: an AllGather on the network with all links turned round, run backwards.

    Arguments, result and errors as for `all_gather`.
    """
    options = _Options(chunks, max_depth, latency, lanes, build, progress, time_limit)
    return _single("reduce_scatter", topology, topology.reversed(), options, warm)


def all_reduce(
    topology: Topology,
    *,
    chunks: int | None = None,
    max_depth: int | None = None,
    latency: bool = False,
    lanes: int | None = None,
    warm: tuple[History | None, History | None] | None = None,
    time_limit: float | None = None,
    progress: Progress | None = None,
    build: bool = True,
    first: Schedule | None = None,
    second: Schedule | None = None,
) -> SynthResult:
    """ReduceScatter, then AllGather; arguments as for `all_gather`, `warm` and the result's `warm` a pair.

    `first` (a reduce_scatter) and `second` (an all_gather) replace a phase by a schedule of any origin.
    `throughput` and `bound` are those of the two phases in sequence, for a rank's share of the data; a phase that
    was given is left out of them, since its rate isn't known here.
    """
    clock = Clock(progress, time_limit)
    histories = warm or (None, None)
    options = _Options(chunks, max_depth, latency, lanes, True, progress, time_limit)
    turned = topology.reversed()
    results: list[SynthResult] = []
    phases: list[Schedule] = []
    kept: list[History | None] = []
    for name, network, given, history in (
        ("reduce_scatter", turned, first, histories[0]),
        ("all_gather", topology, second, histories[1]),
    ):
        kept.append(None)
        if given is None:
            if time_limit is not None:  # what the first phase leaves is for the second
                options = replace(options, time_limit=max(1e-9, clock.left() if results else time_limit / 2))
            part = _single(name, topology, network, options, history)
            results.append(part)
            kept[-1] = part.warm
            given = part.schedule
            if given is None:
                return _failed("all_reduce", topology.nranks, part.bound, clock, part.why)
        phases.append(given)
    for part in results:
        for phase, seconds in part.seconds.items():
            clock.seconds[phase] = clock.seconds.get(phase, 0.0) + seconds
    clock = Clock(progress).plus(clock.seconds)
    with clock.phase("schedule"):
        merged = all_reduce_schedule(phases[0], phases[1], f"synth_all_reduce_{topology.name}") if build else None
    return SynthResult(
        "all_reduce",
        topology.nranks,
        _in_sequence([part.bound for part in results]),
        _in_sequence([part.throughput for part in results]),
        merged,
        sum(part.depth for part in results),
        sum(phase.steps for phase in phases),
        clock.seconds,
        Status.TIME_LIMIT if any(part.status is Status.TIME_LIMIT for part in results) else Status.OPTIMAL,
        why="; ".join(part.why for part in results if part.why),
        warm=tuple(kept),
        details={part.collective: part.details for part in results},
    )


def _in_sequence(rates: Sequence[Fraction | float]) -> Fraction:
    """The rate of phases one after another; 0 when there is none, or one that takes no time at all (one rank)."""
    if not rates or any(rate == 0 for rate in rates):
        return Fraction(0)
    return 1 / sum((1 / Fraction(rate) for rate in rates), Fraction(0))


def _single(
    collective: str, topology: Topology, network: Topology, options: _Options, warm: History | None
) -> SynthResult:
    clock = Clock(options.progress, options.time_limit)
    ranks = topology.nranks
    try:
        forest = solve(network, Wish(options.chunks, options.max_depth, options.latency), clock, warm)
    except Cancelled:
        raise
    except TimeUp as late:
        return _hurried(collective, topology, network, options, warm, clock, str(late))
    except SynthesisError as error:
        if options.max_depth is None:
            raise
        return _failed(collective, ranks, Fraction(0), clock, str(error))
    schedule, depth, seconds = _lowered(collective, topology, options, clock, forest.trees)
    return SynthResult(
        collective,
        ranks,
        forest.bound,
        forest.rate,
        schedule,
        depth,
        depth,
        seconds,
        Status.TIME_LIMIT if forest.late else Status.OPTIMAL,
        forest.late or _why(forest, options),
        warm=forest.history,
        details=_details(forest),
    )


def _lowered(
    collective: str, topology: Topology, options: _Options, clock: Clock, trees: Sequence[Tree]
) -> tuple[Schedule | None, int, dict[str, float]]:
    """(schedule if wanted, depth, seconds of all phases); not cut short by a time limit, which is for the search."""
    clock = Clock(options.progress).plus(clock.seconds)
    ranks, schedule = topology.nranks, None
    with clock.phase("schedule"):
        if options.build:
            lower = all_gather_schedule if collective == "all_gather" else reduce_scatter_schedule
            schedule = lower(trees, ranks, f"synth_{collective}_{topology.name}", options.lanes)
        depth = schedule.steps if schedule else int(depths(trees, ranks).max())
    return schedule, depth, clock.seconds


def _hurried(
    collective: str,
    topology: Topology,
    network: Topology,
    options: _Options,
    warm: History | None,
    clock: Clock,
    late: str,
) -> SynthResult:
    """The result when time was up before there were trees."""
    trees, rate = shortest_trees(network, warm if options.max_depth is None else None)
    schedule, depth, seconds = _lowered(collective, topology, options, clock, trees)
    bound = simple_bound(network)
    if options.max_depth is not None and depth > options.max_depth:
        why = f"{late}; the shortest trees are {depth} deep, deeper than {options.max_depth}; allow more time or depth"
        return _failed(collective, topology.nranks, bound, clock, why)
    why = f"{late}: " + ("the trees of the warm start" if warm and trees[0] in warm.trees else "shortest trees")
    details = {"trees_per_rank": sum(tree.count for tree in trees if tree.root == 0), "rate": str(rate)}
    return SynthResult(
        collective, topology.nranks, bound, rate, schedule, depth, depth, seconds, Status.TIME_LIMIT, why, warm, details
    )


def _failed(collective: str, ranks: int, bound: Fraction | float, clock: Clock, why: str) -> SynthResult:
    return SynthResult(collective, ranks, bound, Fraction(0), None, 0, 0, clock.seconds, Status.INFEASIBLE, why)


def _why(forest: Forest, options: _Options) -> str:
    """Where a rate below the bound comes from."""
    if forest.rate >= forest.bound:
        return ""
    if options.max_depth is not None:
        return f"bounded depth {options.max_depth}"
    if options.chunks is not None:
        return f"{options.chunks} trees per rank"
    return "switches with more capacity in than out, or the reverse, can't be used in full"


def _details(forest: Forest) -> dict[str, object]:
    ranks = forest.topology.nranks
    return {
        "trees_per_rank": forest.per_root,
        "distinct_trees": len(forest.trees),
        "tree_rate": str(forest.tree_rate),
        "rate": str(forest.rate),
        "algbw": float(ranks * forest.rate),
        **forest.counts,
    }
