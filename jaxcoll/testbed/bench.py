"""The measurement: one psum, tuned, untuned and by `jax.lax`, in turn, in the same hosts beside the same traffic."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from jaxcoll import config
from jaxcoll.bench.control import Listener, Message
from jaxcoll.bench.groups import Group
from jaxcoll.errors import UsageError
from jaxcoll.schedule import Kind, Schedule, build
from jaxcoll.testbed.flows import Flow, Running, toward
from jaxcoll.testbed.layout import Layout
from jaxcoll.testbed.net import Testbed
from jaxcoll.testbed.ranks import COORDINATOR_PORT, HostRanks, slots
from jaxcoll.testbed.result import Row, Totals

VARIANTS = ("tuned", "untuned", "lax")
_TUNER = "tuner"
_SETTLE_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    flows: the numbers of background flows to try, one after the other. victim: the host they go to; None: hosts where
    the schedule adds most contributions, another one for each placement (on a star), or flows that pass by (racks,
    spines). connections: TCP connections of each flow. schedule: a name, None: jaxcoll's choice. size: bytes a rank.
    epochs: timed calls of each variant, in blocks of `block` between which the variants take turns. warmup: calls on
    the quiet network before, settle: calls at the head of each block, both without the clock. shuffle: ranks are dealt
    to the hosts anew for each placement. deadline: seconds that a block or a start may take.
    tuner: the setting JAXCOLL_TUNER of the tuned variant.
    """

    flows: tuple[int, ...]
    victim: int | None
    connections: int
    schedule: str | None
    size: int
    variants: tuple[str, ...]
    epochs: int
    block: int
    placements: int
    warmup: int
    settle: int
    seed: int
    ranks_per_host: int
    shuffle: bool
    deadline: float
    tuner: str = "on"


def check(plan: Plan, hosts: int) -> None:
    """Raises UsageError for a plan that can't be carried out."""
    for variant in plan.variants:
        if variant not in VARIANTS:
            raise UsageError(f"--variants={variant} is unknown. Known: {', '.join(VARIANTS)}.")
    if len(set(plan.variants)) != len(plan.variants) or not plan.variants:
        raise UsageError("--variants names each variant once.")
    if "tuned" in plan.variants and _TUNER not in {row.name for row in config.settings()}:
        raise UsageError("This jaxcoll has no tuner in its runtime; leave `tuned` out of --variants.")
    if "tuned" in plan.variants and config.parse(config.PREFIX + _TUNER.upper(), plan.tuner) == "off":
        raise UsageError("--tuner=off would make the variant `tuned` the same as `untuned`.")
    check_victim(plan.victim, hosts)
    if plan.size < 4 or plan.size % 4:
        raise UsageError(f"--size={plan.size} must be a multiple of 4 bytes (float32).")
    if plan.schedule is not None:
        build(plan.schedule, Kind.ALL_REDUCE, hosts * plan.ranks_per_host)


def check_victim(victim: int | None, hosts: int) -> None:
    """Raises UsageError unless `victim` is None or a host's number."""
    if victim is not None and not 0 <= victim < hosts:
        raise UsageError(f"--victim={victim} must be a host's number, 0 to {hosts - 1}.")


def incoming(schedule: Schedule) -> list[int]:
    """From how many different (chunk graph, sender) pairs each rank receives: how much a stranger disturbs it."""
    senders: list[set[tuple[int, int]]] = [set() for _ in range(schedule.collective.nranks)]
    for g, graph in enumerate(schedule.graphs):
        for edge in graph.edges:
            senders[edge.dst].add((g, edge.src))
    return [len(found) for found in senders]


def victims(plan: Plan, hosts: int) -> list[int]:
    """The host to congest in each placement, drawn with the plan's seed among those that receive most."""
    if plan.victim is not None:
        return [plan.victim] * plan.placements
    generator = random.Random(plan.seed)
    by_host = [0] * hosts
    if plan.schedule is not None:
        counts = incoming(build(plan.schedule, Kind.ALL_REDUCE, hosts * plan.ranks_per_host))
        for rank, count in enumerate(counts):
            by_host[rank // plan.ranks_per_host] += count
    order = sorted(range(hosts), key=lambda host: (-by_host[host], generator.random()))
    return [order[i % hosts] for i in range(plan.placements)]


def outsiders_needed(topology: str, count: int) -> int:
    """How many outsiders `count` background flows take."""
    return count if topology == "star" else 2 * count


def background(layout: Layout, count: int, victim: int | None, connections: int) -> list[Flow]:
    """Background flows: into the victim (from the other side, where there are two), or, without one, past all hosts
    through the network's middle. A star has no middle: its victim is host 0 by default."""
    if layout.name == "star":
        return toward(f"h{victim or 0}", layout.outsiders[:count], connections)
    if victim is not None:
        far = [x for x in layout.outsiders if layout.groups[x] != layout.groups[f"h{victim}"]]
        return toward(f"h{victim}", far[:count], connections)
    pairs = zip(layout.outsiders[::2], layout.outsiders[1::2])
    return [Flow(a, b, connections) for a, b in list(pairs)[:count]]


def _environment(variant: str, tuner: str) -> dict[str, str]:
    known = {row.name for row in config.settings()}
    if variant == "lax" or _TUNER not in known:
        return {}
    return {config.PREFIX + _TUNER.upper(): tuner if variant == "tuned" else "off"}


class _Variants:
    """The variants' processes: a group of ranks each, started when needed and kept while that is fair."""

    def __init__(self, bed: Testbed, plan: Plan, say: Callable[[str], None]):
        self._bed, self._plan, self._say = bed, plan, say
        self._groups: dict[str, tuple[Group, contextlib.ExitStack]] = {}
        self._ports = iter(range(COORDINATOR_PORT, 65_000))
        self.wrong = 0

    def get(self, variant: str, hosts: Sequence[str]) -> Group:
        """The variant's group; a new one has compiled and warmed up when this returns."""
        if variant not in self._groups:
            self._say(f"starting {len(hosts)} ranks of {variant}")
            stack = contextlib.ExitStack()
            try:
                listener = stack.enter_context(Listener())
                command = [sys.executable, "-m", "jaxcoll.testbed.worker"]
                # A crash in native code leaves a stack in the process's last words.
                env = {**listener.env, "PYTHONFAULTHANDLER": "1", **_environment(variant, self._plan.tuner)}
                ranks = stack.enter_context(HostRanks(self._bed, command, hosts, env=env, port=next(self._ports)))
                group = Group(ranks, listener, len(hosts))
                stack.callback(group.close)
                what: Message = {"impl": "lax" if variant == "lax" else "jaxcoll", "schedule": self._plan.schedule}
                what |= {"nbytes": self._plan.size, "warmup": self._plan.warmup, "tuned": variant == "tuned"}
                answers = group.ask(self._plan.deadline, do="prepare", **what)
                self.wrong += sum(answer["wrong"] for answer in answers)
            except BaseException:
                stack.close()
                raise
            self._groups[variant] = (group, stack)
        return self._groups[variant][0]

    def drop(self, variants: Sequence[str]) -> None:
        """End these variants' processes."""
        for variant in variants:
            if variant in self._groups:
                self._groups.pop(variant)[1].close()

    def __enter__(self) -> _Variants:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop(list(self._groups))


@dataclasses.dataclass
class _Series:
    """One variant in one placement, as its blocks come in. swapped_at: the epoch after which nothing was swapped."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    starved: list[float] = dataclasses.field(default_factory=list)
    swaps: int = 0
    reverts: int = 0
    swapped_at: int = 0

    def add(self, answers: Sequence[Message], totals: Totals) -> None:
        """Take in the ranks' answers to one block. An epoch lasts as long as its slowest rank."""
        self.seconds += [max(times) for times in zip(*(answer["seconds"] for answer in answers))]
        self.starved.append(max(answer["starved"] for answer in answers))
        swaps, reverts = (max(answer[key] for answer in answers) for key in ("swaps", "reverts"))
        if swaps + reverts > self.swaps + self.reverts:
            self.swapped_at = len(self.seconds)
        self.swaps, self.reverts = swaps, reverts
        totals.wrong += sum(answer["wrong"] for answer in answers)


def _place(
    bed: Testbed, plan: Plan, variants: _Variants, totals: Totals, count: int, placement: int, victim: int,
    say: Callable[[str], None],
) -> list[Row]:  # fmt: skip
    hosts = slots(bed.layout.hosts, plan.ranks_per_host)
    if plan.shuffle:
        random.Random(f"{plan.seed}/{placement}").shuffle(hosts)
        variants.drop(plan.variants)
    # What the tuner learnt in one placement must not help it in the next.
    variants.drop(["tuned"])
    groups = {variant: variants.get(variant, hosts) for variant in plan.variants}
    series = {variant: _Series() for variant in plan.variants}
    compiled: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        flows: Running | None = None
        if count:
            target = victim if bed.layout.name == "star" else plan.victim
            flows = bed.start_flows(background(bed.layout, count, target, plan.connections))
            stack.callback(flows.stop)
            time.sleep(_SETTLE_SECONDS)
        started = time.monotonic()
        done, turn = 0, 0
        while done < plan.epochs:
            now = min(plan.block, plan.epochs - done)
            # Another variant begins each round: none always follows the same other one.
            for i in range(len(plan.variants)):
                variant = plan.variants[(i + turn) % len(plan.variants)]
                say(f"p={count}, placement {placement}, epochs {done} to {done + now}, {variant}")
                answers = groups[variant].ask(plan.deadline, do="block", epochs=now, settle=plan.settle)
                series[variant].add(answers, totals)
                compiled[variant] = sum(answer["compilations"] for answer in answers)
                if flows is not None:
                    flows.check()
            done, turn = done + now, turn + 1
        rate = sum(flows.rates(started)) if flows is not None else 0.0
    totals.add_compilations(compiled)
    totals.swaps += sum(s.swaps for s in series.values())
    totals.reverts += sum(s.reverts for s in series.values())
    # All variants are averaged over the same epochs: those after the tuner's last move, a quarter of them at least.
    settled = min(max(s.swapped_at for s in series.values()), plan.epochs * 3 // 4)
    where = f"h{victim}" if bed.layout.name == "star" or plan.victim is not None else "middle"
    return [
        Row.of(variant, placement, count, len(bed.layout.hosts), where, s.seconds, settled, rate, s.starved)
        for variant, s in series.items()
    ]


def measure(
    bed: Testbed, plan: Plan, say: Callable[[str], None], show: Callable[[Row], None]
) -> tuple[list[Row], Totals]:
    """Carry out a plan. say: told what begins now; show: given each row as it is done."""
    check(plan, len(bed.layout.hosts))
    rows: list[Row] = []
    totals = Totals()
    chosen = victims(plan, len(bed.layout.hosts))
    with _Variants(bed, plan, say) as variants:
        for count in plan.flows:
            for placement, victim in enumerate(chosen):
                new = _place(bed, plan, variants, totals, count, placement, victim, say)
                for row in new:
                    show(row)
                rows += new
        totals.wrong += variants.wrong
    return rows, totals


def ratio(rows: Sequence[Row], count: int, slow: str, fast: str) -> dict[str, float]:
    """Time of `slow` over that of `fast` over all placements with `count` flows (above 1: `fast` is faster), for the
    "mean" (of everything), the "p50" and the "after" (convergence); each the average over the placements."""
    fields = {"mean": "mean_ms", "p50": "p50_ms", "after": "after_convergence_mean_ms"}

    def average(variant: str, field: str) -> float:
        return statistics.fmean(getattr(row, field) for row in rows if row.p == count and row.variant == variant)

    return {name: round(average(slow, field) / average(fast, field), 4) for name, field in fields.items()}
