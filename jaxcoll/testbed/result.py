"""The numbers of the testbed's benchmark: rows, totals, and how they are printed and stored."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcoll.testbed.plan import group_of

HEAD = (
    "#  p  placement  victim  variant        mean ms    p50 ms    p95 ms  after ms  starved ms   strangers Mbit/s"
    "  phase"
)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the fraction q of the values doesn't exceed."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant in one placement. Times are milliseconds; an epoch's time is that of its slowest rank.

    p: background flows. after_convergence_mean_ms: mean from epoch `settled` on (the tuner's last move; the same epochs
    for every variant). starved_ms: per epoch, how long the threads of the worst rank were ready and had no core: where
    it is not small against the mean, the machine was measured, not the network. background_mbit: what the strangers
    got, all flows together, in Mbit/s. phase: which part of a run whose trouble comes and goes.
    """

    variant: str
    placement: int
    p: int
    hosts: int
    victim: str
    mean_ms: float
    p50_ms: float
    p95_ms: float
    after_convergence_mean_ms: float
    settled: int
    starved_ms: float
    background_mbit: float
    epoch_ms: tuple[float, ...]
    phase: str = ""

    @staticmethod
    def of(
        variant: str, placement: int, p: int, hosts: int, victim: str, seconds: Sequence[float], settled: int,
        rate: float, starved: Sequence[float] = (0.0,),
    ) -> Row:  # fmt: skip
        """The row of these epochs (seconds each); `rate` is bits per second, `starved` seconds an epoch, by block."""
        times = tuple(round(1e3 * value, 3) for value in seconds)
        mean, after = statistics.fmean(times), statistics.fmean(times[settled:])
        middle, late = statistics.median(times), quantile(times, 0.95)
        wait = 1e3 * statistics.fmean(starved)
        return Row(variant, placement, p, hosts, victim, mean, middle, late, after, settled, wait, rate / 1e6, times)

    def __str__(self) -> str:
        numbers = (self.mean_ms, self.p50_ms, self.p95_ms, self.after_convergence_mean_ms)
        cells = "".join(f"{value:10.1f}" for value in numbers)
        place = f"{self.p:4d}  {self.placement:9d}  {self.victim:>6}  {self.variant:<12} "
        return f"{place}{cells}  {self.starved_ms:10.1f}  {self.background_mbit:17.1f}  {self.phase}".rstrip()


@dataclasses.dataclass(frozen=True)
class Found:
    """What one tuned variant did and said in one placement.

    findings: late ranks and slow hosts or links, with the number of blocks after which each was in its status.
    batches_to_decide: by phase of trouble, the batches of epochs until the first decision was in force; None: none was.
    decisions: with reason, expected and measured effect in words, and the longest stall of any process in seconds.
    """

    variant: str
    placement: int
    p: int
    swaps: int
    reverts: int
    state: str
    program: str
    findings: Mapping[str, int]
    batches_to_decide: Mapping[str, int | None]
    decisions: Sequence[Mapping[str, Any]]

    def __str__(self) -> str:
        head = f"# {self.variant}, p={self.p}, placement {self.placement}: "
        head += f"{self.swaps} swaps, {self.reverts} reverts, now {self.program}"
        waits = ", ".join(f"{name} {n}" for name, n in self.batches_to_decide.items() if n is not None)
        lines = [f"{head}; batches until decided: {waits or 'nothing was decided'}"]
        lines += [f"#   said: {line}" for line in self.findings]
        lines += [f"#   {d['action']}: {d['reason']}" for d in self.decisions if d["committed"]]
        return "\n".join(lines)


@dataclasses.dataclass
class Totals:
    """Counts over the whole run. compilations: XLA's, by variant, after the first call of each process."""

    wrong: int = 0
    compilations: int = 0
    found: list[Found] = dataclasses.field(default_factory=list)
    best: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _seen: dict[str, int] = dataclasses.field(default_factory=dict)

    def add_compilations(self, by_variant: Mapping[str, int]) -> None:
        """Take in the count of each variant's processes since they began."""
        for name, count in by_variant.items():
            variant = group_of(name)
            before = self._seen.get(variant, 0)
            # New processes begin at nought.
            self.compilations += count - before if count >= before else count
            self._seen[variant] = count


def as_json(
    rows: Sequence[Row], totals: Totals, settings: Mapping[str, Any], ratios: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """The result as one JSON object."""
    return {
        "results": [dataclasses.asdict(row) for row in rows],
        "ratios": dict(ratios),
        "swaps": sum(found.swaps for found in totals.found),
        "reverts": sum(found.reverts for found in totals.found),
        "compilations_after_first": totals.compilations,
        "wrong": totals.wrong,
        "found": [dataclasses.asdict(found) for found in totals.found],
        "best": totals.best,
        "settings": dict(settings),
    }
