"""AllGather, ReduceScatter and AllReduce for a given network, by tree packing: the public functions.

Rates are per rank: with rate x, every rank's block of S bits reaches all ranks after S / x seconds (plus latency), so
the algorithm bandwidth that NCCL's tests report is ranks * x (`details["algbw"]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from jaxcoll.errors import SynthesisError
from jaxcoll.schedule.ir import Schedule
from jaxcoll.synth.forest import Forest, History, Wish, solve
from jaxcoll.synth.lowering import all_gather_schedule, all_reduce_schedule, reduce_scatter_schedule
from jaxcoll.synth.result import Cancelled, Clock, Progress, Status, SynthResult
from jaxcoll.topology.graph import Topology


@dataclass(frozen=True)
class Options:
    """How to solve.

    Attributes:
        chunks: trees per root (ForestColl's fixed k); None takes as many as the optimal rate needs.
        max_depth: no tree deeper than this; the rate found within it is reported against the unbounded bound.
        latency: remove switches by the LP of MCCL appendix C, which prefers shallow trees, instead of in proportion.
        lanes: of the schedule's pipeline; None chooses.
        schedule: False leaves the schedule out (and the time that it takes to write it down).
        progress: called with (phase, share done); returning False cancels (raises `Cancelled`).
    """

    chunks: int | None = None
    max_depth: int | None = None
    latency: bool = False
    lanes: int | None = None
    schedule: bool = True
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name in ("chunks", "max_depth", "lanes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SynthesisError(f"{name} is {value}; it must be at least 1")


DEFAULT = Options()


def all_gather(topology: Topology, options: Options = DEFAULT, warm: History | None = None) -> SynthResult:
    """A throughput-optimal AllGather. `warm`: the `warm` of an earlier result for the same nodes.

    The result's `status` is `infeasible` (and `schedule` None) when `max_depth` or `chunks` can't be met.

    Raises:
        Cancelled: by `options.progress`.
        SynthesisError: a network whose numbers are beyond exact arithmetic; the message says what to round.
    """
    return _single("all_gather", topology, topology, options, warm)


def reduce_scatter(topology: Topology, options: Options = DEFAULT, warm: History | None = None) -> SynthResult:
    """A throughput-optimal ReduceScatter: an AllGather on the network with all links turned round, backwards."""
    return _single("reduce_scatter", topology, topology.reversed(), options, warm)


def all_reduce(
    topology: Topology,
    options: Options = DEFAULT,
    warm: Sequence[History] | None = None,
    *,
    reduce_scatter_schedule: Schedule | None = None,
    all_gather_schedule: Schedule | None = None,
) -> SynthResult:
    """ReduceScatter, then AllGather. Either phase can be given as a schedule of any origin, which is then kept.

    `throughput` and `bound` are those of the two phases in sequence, a rank's share of the data per second; a given
    phase counts as taking no time, since its rate isn't known here. `warm` is a pair (reduce_scatter, all_gather).
    """
    clock = Clock(options.progress)
    ranks = topology.nranks
    given = (reduce_scatter_schedule, all_gather_schedule)
    first, second = tuple(warm) if warm else (None, None)
    results: list[SynthResult] = []
    phases: list[Schedule] = []
    for make, schedule, history in ((reduce_scatter, given[0], first), (all_gather, given[1], second)):
        if schedule is None:
            part = make(topology, _with_schedule(options), history)
            results.append(part)
            if part.schedule is None:
                return _failed("all_reduce", ranks, part.bound, clock, part.why)
            schedule = part.schedule
        phases.append(schedule)
    with clock.phase("schedule"):
        merged = all_reduce_schedule(*phases, f"synth_all_reduce_{topology.name}") if options.schedule else None
    for part in results:
        for phase, seconds in part.seconds.items():
            clock.seconds[phase] = clock.seconds.get(phase, 0.0) + seconds
    return SynthResult(
        "all_reduce",
        ranks,
        _in_sequence([part.bound for part in results]),
        _in_sequence([part.throughput for part in results]),
        merged,
        sum(part.depth for part in results),
        sum(phase.steps for phase in phases),
        clock.seconds,
        warm=tuple(part.warm for part in results),
        details={"phases": [part.details for part in results]},
    )


def _with_schedule(options: Options) -> Options:
    return Options(options.chunks, options.max_depth, options.latency, options.lanes, True, options.progress)


def _in_sequence(rates: Sequence[Fraction | float]) -> Fraction:
    """The rate of phases one after another; 0 when there is none, or one that takes no time at all (one rank)."""
    if not rates or any(rate == 0 for rate in rates):
        return Fraction(0)
    return 1 / sum((1 / Fraction(rate) for rate in rates), Fraction(0))


def _single(
    collective: str, topology: Topology, network: Topology, options: Options, warm: History | None
) -> SynthResult:
    clock = Clock(options.progress)
    ranks = topology.nranks
    try:
        forest = solve(network, Wish(options.chunks, options.max_depth, options.latency), clock, warm)
    except Cancelled:
        raise
    except SynthesisError as error:
        if options.max_depth is None:
            raise
        return _failed(collective, ranks, Fraction(0), clock, str(error))
    schedule = None
    depth = max(max(tree.depths()) for tree in forest.trees)
    if options.schedule:
        lower = all_gather_schedule if collective == "all_gather" else reduce_scatter_schedule
        with clock.phase("schedule"):
            schedule = lower(forest.trees, ranks, f"synth_{collective}_{topology.name}", options.lanes)
    return SynthResult(
        collective,
        ranks,
        forest.bound,
        forest.rate,
        schedule,
        depth,
        depth,
        clock.seconds,
        why=_why(forest, options),
        warm=forest.history,
        details=_details(forest),
    )


def _failed(collective: str, ranks: int, bound: Fraction | float, clock: Clock, why: str) -> SynthResult:
    return SynthResult(collective, ranks, bound, Fraction(0), None, 0, 0, clock.seconds, Status.INFEASIBLE, why)


def _why(forest: Forest, options: Options) -> str:
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
