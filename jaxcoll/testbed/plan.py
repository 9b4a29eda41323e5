"""What the testbed's benchmark is asked to measure, as plain data, and what follows from that."""

from __future__ import annotations

import dataclasses
import math
import random

from jaxcoll import config
from jaxcoll.errors import UsageError
from jaxcoll.schedule import Kind, Schedule, build
from jaxcoll.testbed.flows import Flow, toward
from jaxcoll.testbed.layout import Layout
from jaxcoll.testbed.net import Direction

TUNERS = ("on", "swaps", "react-paper")
"""Variants named after what JAXCOLL_TUNER is set to."""

VARIANTS = ("tuned", *TUNERS, "untuned", "lax", "quiet", "best")

_BORROWED = {"quiet": "untuned", "best": "untuned"}
_TUNER = "tuner"


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What disturbs the job beside background flows.

    late: (rank, seconds) by which that rank is late in every epoch. slow: (link, direction, bits per second).
    rounds: (seconds with the trouble, seconds without it, how often); None: all the time.
    """

    late: tuple[int, float] | None = None
    slow: tuple[str, Direction, float] | None = None
    rounds: tuple[float, float, int] | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    flows: the numbers of background flows to try, one after the other. victim: the host they go to; None: hosts where
    the schedule adds most contributions, another one for each placement (on a star), or flows that pass by (racks,
    spines). connections: TCP connections of each flow. schedule: a name, None: jaxcoll's choice. size: bytes a rank.
    epochs: timed calls of each variant, in blocks of `block` between which the variants take turns; `quiet` is timed
    for as many calls as two blocks have, before the trouble begins. warmup: calls on the quiet network before, settle:
    calls at the head of each block, both without the clock. tries: tables tried for `best`. shuffle: ranks are dealt
    to the hosts anew for each placement. deadline: seconds that a block or a start may take.
    tuner: the setting JAXCOLL_TUNER of the variant `tuned`.
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
    tries: int = 5
    trouble: Trouble = Trouble()

    @property
    def timed(self) -> tuple[str, ...]:
        """The variants that take turns under the trouble."""
        return tuple(v for v in self.variants if v != "quiet")

    def setting(self, variant: str) -> str:
        """JAXCOLL_TUNER for a variant."""
        if variant == "tuned":
            return self.tuner
        return variant if variant in TUNERS else "off"

    def is_tuned(self, variant: str) -> bool:
        """Whether the tuner runs in it."""
        return self.setting(variant) != "off"


def group_of(variant: str) -> str:
    """The processes that run a variant: `quiet` and `best` are runs of the untuned ones."""
    return _BORROWED.get(variant, variant)


def check(plan: Plan, hosts: int, topology: str = "star", width: int = 1) -> None:
    """Raises UsageError for a plan that can't be carried out."""
    for variant in plan.variants:
        if variant not in VARIANTS:
            raise UsageError(f"--variants={variant} is unknown. Known: {', '.join(VARIANTS)}.")
    if len(set(plan.variants)) != len(plan.variants) or not plan.timed:
        raise UsageError("--variants names each variant once, and at least one beside `quiet`.")
    if "tuned" in plan.variants and config.parse(config.PREFIX + _TUNER.upper(), plan.tuner) == "off":
        raise UsageError("--tuner=off would make the variant `tuned` the same as `untuned`.")
    check_victim(plan.victim, hosts)
    if plan.size < 4 or plan.size % 4:
        raise UsageError(f"--size={plan.size} must be a multiple of 4 bytes (float32).")
    if plan.schedule is not None:
        build(plan.schedule, Kind.ALL_REDUCE, hosts * plan.ranks_per_host)
    if "best" in plan.variants:
        _check_best(plan, topology, width)
    late, rounds = plan.trouble.late, plan.trouble.rounds
    if late is not None and not (0 <= late[0] < hosts * plan.ranks_per_host and 0 < late[1] <= 60):
        raise UsageError(f"--late={late[0]}:{late[1]:g} must be a rank's number and 0 to 60 seconds, such as 3:50ms.")
    if rounds is not None and not (all(1 <= s < math.inf for s in rounds[:2]) and 1 <= rounds[2] <= 100):
        raise UsageError("--come-and-go takes seconds on and off, 1 or more, and how often, such as 60:30:3.")


def _check_best(plan: Plan, topology: str, width: int) -> None:
    if plan.schedule is None or plan.ranks_per_host != 1 or plan.trouble != Trouble():
        raise UsageError("The variant `best` needs --schedule=NAME, one rank a host, and flows as the only trouble.")
    if topology == "spines" and width > 1:
        raise UsageError("The variant `best` can't be found beside the kernel's dice: give --width 1.")


def check_victim(victim: int | None, hosts: int) -> None:
    """Raises UsageError unless `victim` is None or a host's number."""
    if victim is not None and not 0 <= victim < hosts:
        raise UsageError(f"--victim={victim} must be a host's number, 0 to {hosts - 1}.")


def environment(plan: Plan, variant: str) -> dict[str, str]:
    """Settings of a variant's processes."""
    return {} if variant == "lax" else {config.PREFIX + _TUNER.upper(): plan.setting(variant)}


def incoming(schedule: Schedule) -> list[int]:
    """From how many different (chunk graph, sender) pairs each rank receives: how much a stranger disturbs it."""
    senders: list[set[tuple[int, int]]] = [set() for _ in range(schedule.collective.nranks)]
    for g, graph in enumerate(schedule.graphs):
        for edge in graph.edges:
            senders[edge.dst].add((g, edge.src))
    return [len(found) for found in senders]


def victims(plan: Plan, hosts: int) -> list[int]:
    """The host to congest in each placement, drawn with the plan's seed among those that receive most; where they are
    fewer than the placements, they take turns."""
    if plan.victim is not None:
        return [plan.victim] * plan.placements
    generator = random.Random(plan.seed)
    by_host = [0] * hosts
    if plan.schedule is not None:
        counts = incoming(build(plan.schedule, Kind.ALL_REDUCE, hosts * plan.ranks_per_host))
        for rank, count in enumerate(counts):
            by_host[rank // plan.ranks_per_host] += count
    order = [host for host in range(hosts) if by_host[host] == max(by_host)]
    generator.shuffle(order)
    return [order[i % len(order)] for i in range(plan.placements)]


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
