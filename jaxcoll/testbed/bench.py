"""The measurement: one psum, tuned, untuned and by `jax.lax`, in turn, in the same hosts beside the same traffic."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxcoll.bench.control import Message
from jaxcoll.schedule import Table
from jaxcoll.testbed import best
from jaxcoll.testbed.flows import Running
from jaxcoll.testbed.layout import Layout
from jaxcoll.testbed.net import Testbed
from jaxcoll.testbed.plan import Plan, background, check, victims
from jaxcoll.testbed.ranks import slots
from jaxcoll.testbed.result import Found, Row, Totals
from jaxcoll.testbed.variants import Variants

_SETTLE_SECONDS = 1.0
_SPEAKS_SECONDS = 1.5
_BATCH = 6  # epochs: the tuner's B
_TRY_EPOCHS = 4
_TOLD = ("action", "reason", "expected", "measured", "kept", "committed", "stall_s", "time", "epochs")

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a placement: with the trouble or without, for so many epochs of each variant or for so many seconds."""

    name: str
    trouble: bool
    epochs: int = 0
    seconds: float = math.inf


def phases(plan: Plan) -> list[Phase]:
    """What a placement consists of, after `quiet`."""
    rounds = plan.trouble.rounds
    if rounds is None:
        return [Phase("", True, epochs=plan.epochs)]
    on, off, times = rounds
    out = [Phase("before", False, seconds=off)]
    for i in range(1, times + 1):
        out += [Phase(f"busy {i}", True, seconds=on), Phase(f"free {i}", False, seconds=off)]
    return out


@dataclasses.dataclass
class _Series:
    """One variant in one phase, as its blocks come in. swapped_at: the epoch after which nothing was swapped."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    ended: list[float] = dataclasses.field(default_factory=list)
    starved: list[float] = dataclasses.field(default_factory=list)
    swapped_at: int = 0


def shuffled(plan: Plan, layout: Layout, placement: int) -> list[str]:
    """The host of each rank in a placement."""
    hosts = slots(layout.hosts, plan.ranks_per_host)
    if plan.shuffle:
        random.Random(f"{plan.seed}/{placement}").shuffle(hosts)
    return hosts


def host_of_rank(layout: Layout, hosts: Sequence[str], rank: int) -> int:
    """The number of a rank's host."""
    return layout.hosts.index(hosts[rank])


class _Placement:
    """One place of the trouble: the variants' groups, and what came of them."""

    def __init__(
        self, bed: Testbed, plan: Plan, variants: Variants, totals: Totals, count: int, number: int, victim: int,
        say: Say,
    ):  # fmt: skip
        self._bed, self._plan, self._variants, self._totals, self._say = bed, plan, variants, totals, say
        self._hosts = shuffled(plan, bed.layout, number)
        if plan.victim is None:  # it was drawn by what ranks receive: it is the host where they are now
            victim = host_of_rank(bed.layout, self._hosts, victim * plan.ranks_per_host)
        self._count, self._number, self._victim = count, number, victim
        # None: the flows pass by, through the middle.
        self._target = victim if bed.layout.name == "star" else plan.victim
        self._tables: dict[str, Table | None] = {}
        self._flows: Running | None = None
        self._flowing_since = 0.0
        self._rate = 0.0
        self._order = random.Random(f"{plan.seed}/{count}/{number}/order")
        self._status: dict[str, Message] = {}
        self._findings: dict[str, dict[str, int]] = {}
        self._detected: dict[str, dict[str, int | None]] = {}

    def run(self) -> list[Row]:
        """Everything in order: start, `quiet`, the search for `best`, the phases."""
        plan = self._plan
        if plan.shuffle or _spines(self._bed) > 1:
            # Which spine a connection takes is decided when it is made: no variant may keep a lucky draw.
            self._variants.drop(plan.variants)
        # What a tuner learnt in one placement must not help it in the next.
        self._variants.drop([v for v in plan.variants if plan.is_tuned(v)])
        for variant in plan.variants:
            self._variants.get(variant, self._hosts)
        rows: list[Row] = []
        try:
            if "quiet" in plan.variants:
                rows += self._phase(Phase("", False, epochs=2 * plan.block), ("quiet",))
            if "best" in plan.variants:
                self._trouble(True)
                self._tables["best"] = self._search()
            for phase in phases(plan):
                rows += self._phase(phase, plan.timed)
        finally:
            self._trouble(False)
        self._close()
        return rows

    def _trouble(self, on: bool) -> None:
        slow = self._plan.trouble.slow
        if slow is not None:
            link, way, rate = slow
            usual = self._bed.layout.link(link).rate
            assert usual is not None
            self._bed.set_rate(link, rate if on else usual, way)
        if on and self._count and self._flows is None:
            made = background(self._bed.layout, self._count, self._target, self._plan.connections)
            self._flows = self._bed.start_flows(made)
            time.sleep(_SETTLE_SECONDS)
            self._flowing_since = time.monotonic()
        elif not on and self._flows is not None:
            self._flows.stop()
            self._flows = None

    def _search(self) -> Table | None:
        plan, n = self._plan, len(self._hosts)
        assert plan.schedule is not None
        self._say(f"p={self._count}, placement {self._number}: scoring tables for `best`")
        schedule = self._variants.schedule("best")
        net = best.modelled(self._bed.layout, self._hosts, self._count, self._target)
        candidates = best.scored(schedule, net, plan.size, orders=plan.shuffle and n <= best.ORDERED)

        def run(table: Table) -> float:
            self._say(f"p={self._count}, placement {self._number}: trying a table for `best`")
            self._variants.install("best", table)
            answers = self._ask("best", _TRY_EPOCHS, 0.0)
            return statistics.fmean(max(times) for times in zip(*(answer["seconds"] for answer in answers)))

        taken, told = best.search(candidates, plan.tries, run)
        self._totals.best.append({"p": self._count, "placement": self._number, **told})
        return taken.table

    def _ask(self, variant: str, epochs: int, late: float) -> list[Message]:
        plan = self._plan
        group = self._variants.get(variant, self._hosts)
        messages: list[Message] = [{"do": "block", "epochs": epochs, "settle": plan.settle} for _ in self._hosts]
        if late and plan.trouble.late is not None:
            messages[plan.trouble.late[0]]["late"] = late
        return group.ask_each(plan.deadline, messages)

    def _phase(self, phase: Phase, variants: Sequence[str]) -> list[Row]:
        self._trouble(phase.trouble)
        began, wall = time.monotonic(), time.time()
        series = {variant: _Series() for variant in variants}
        done = 0
        while done < phase.epochs or (not phase.epochs and time.monotonic() - began < phase.seconds):
            now = min(self._plan.block, phase.epochs - done) if phase.epochs else self._plan.block
            # Each round deals the order anew: what a variant's processes still do after its block (a tuner thinks)
            # mustn't fall to the same other one.
            for variant in self._order.sample(variants, len(variants)):
                place = f"p={self._count}, placement {self._number}{', ' + phase.name if phase.name else ''}"
                self._say(f"{place}, epochs {done} to {done + now}, {variant}")
                self._block(variant, now, phase, series[variant])
            done += now
        self._rate = 0.0
        if phase.trouble and self._flows is not None:
            self._rate = sum(self._flows.rates(max(began, self._flowing_since)))
        self._listen(variants)
        self._note_detection(phase, series, wall)
        # All variants are averaged over the same epochs: those after the tuner's last move, a quarter of them at least.
        least = min((len(s.seconds) for s in series.values()), default=1)
        settled = min(max(s.swapped_at for s in series.values()), least * 3 // 4)
        return [self._row(variant, phase, s, settled) for variant, s in series.items()]

    def _row(self, variant: str, phase: Phase, series: _Series, settled: int) -> Row:
        middle = self._target is None
        where = "middle" if middle and self._count else f"h{self._victim}" if self._count else "-"
        count = self._count if phase.trouble else 0
        if variant == "quiet":
            count = self._count  # it belongs to the rows that it is compared with
        hosts = len(self._bed.layout.hosts)
        row = Row.of(variant, self._number, count, hosts, where, series.seconds, settled, self._rate, series.starved)
        return dataclasses.replace(row, phase=phase.name)

    def _block(self, variant: str, epochs: int, phase: Phase, series: _Series) -> None:
        if variant in ("quiet", "best", "untuned"):
            self._variants.install(variant, self._tables.get(variant))
        late = self._plan.trouble.late
        answers = self._ask(variant, epochs, late[1] if late is not None and phase.trouble else 0.0)
        # An epoch lasts as long as its slowest rank.
        series.seconds += [max(times) for times in zip(*(answer["seconds"] for answer in answers))]
        series.ended += answers[0]["ended"]
        series.starved.append(max(answer["starved"] for answer in answers))
        self._totals.wrong += sum(answer["wrong"] for answer in answers)
        self._totals.add_compilations({variant: sum(answer["compilations"] for answer in answers)})
        status = answers[0]["tuner"]
        if status is not None and self._note(variant, status):
            series.swapped_at = len(series.seconds)
        if self._flows is not None:
            self._flows.check()

    def _listen(self, variants: Sequence[str]) -> None:
        """Takes in what the tuners have decided by now; they speak once a second."""
        tuned = [variant for variant in variants if self._plan.is_tuned(variant)]
        if tuned:
            time.sleep(_SPEAKS_SECONDS)
        for variant in tuned:
            status = self._variants.get(variant, self._hosts).ask(self._plan.deadline, do="told")[0]["tuner"]
            if status is not None:
                self._note(variant, status)

    def _note(self, variant: str, status: Message) -> bool:
        """Takes in a tuner's status. Returns whether something was moved since the last one."""
        before = self._status.get(variant, {"swaps": 0, "reverts": 0})
        self._status[variant] = status
        said = self._findings.setdefault(variant, {})
        for line in status["findings"]:
            who, _, what = line.partition(" is ")
            about = f"{who} is {what.split(':')[0]}"  # the amounts change all the time
            said[about] = said.get(about, 0) + 1
        return status["swaps"] + status["reverts"] > before["swaps"] + before["reverts"]

    def _note_detection(self, phase: Phase, series: dict[str, _Series], since: float) -> None:
        """In how many batches a phase's trouble led to a decision, by variant; None: to none."""
        if not phase.trouble:
            return
        for variant, one in series.items():
            if variant in self._status:
                taken = [d["time"] for d in self._status[variant]["decisions"] if d["committed"] and d["time"] > since]
                before = sum(at <= min(taken) for at in one.ended) if taken else 0
                batches = math.ceil(before / _BATCH) if taken else None
                self._detected.setdefault(variant, {})[phase.name or "busy"] = batches

    def _close(self) -> None:
        """Hands what the tuners said to the totals."""
        for variant, status in self._status.items():
            decisions: list[dict[str, Any]] = [{key: d[key] for key in _TOLD if key in d} for d in status["decisions"]]
            found = Found(
                variant=variant,
                placement=self._number,
                p=self._count,
                swaps=status["swaps"],
                reverts=status["reverts"],
                state=status["state"],
                program=", ".join(map(str, status["programs"])),
                findings=self._findings.get(variant, {}),
                batches_to_decide=self._detected.get(variant, {}),
                decisions=decisions,
            )
            self._totals.found.append(found)


def _spines(bed: Testbed) -> int:
    """Between how many routers in the middle a connection may choose."""
    return len(bed.layout.routers) - len(set(bed.layout.groups.values()))


def measure(bed: Testbed, plan: Plan, say: Say, show: Callable[[Row], None]) -> tuple[list[Row], Totals]:
    """Carry out a plan. say: told what begins now; show: given each row as it is done."""
    check(plan, len(bed.layout.hosts), bed.layout.name, _spines(bed))
    if plan.trouble.slow is not None:
        bed.layout.link(plan.trouble.slow[0])  # a name that isn't there is told before anything starts
    rows: list[Row] = []
    totals = Totals()
    chosen = victims(plan, len(bed.layout.hosts))
    with contextlib.ExitStack() as stack:
        variants = stack.enter_context(Variants(bed, plan, say))
        for count in plan.flows:
            for number, victim in enumerate(chosen):
                new = _Placement(bed, plan, variants, totals, count, number, victim, say).run()
                for row in new:
                    show(row)
                rows += new
        totals.wrong += variants.wrong
    return rows, totals


def ratio(rows: Sequence[Row], count: int, slow: str, fast: str) -> dict[str, float]:
    """Time of `slow` over that of `fast` over all placements with `count` flows (above 1: `fast` is faster), for the
    "mean" (of everything), the "p50", the "p95" and the "after" (convergence); each of averages over the placements."""
    fields = {"mean": "mean_ms", "p50": "p50_ms", "p95": "p95_ms", "after": "after_convergence_mean_ms"}

    def average(variant: str, field: str) -> float:
        return statistics.fmean(getattr(row, field) for row in rows if row.p == count and row.variant == variant)

    return {name: round(average(slow, field) / average(fast, field), 4) for name, field in fields.items()}
