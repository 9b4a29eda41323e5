"""The numbers of the testbed's benchmark: rows, totals, and how they are printed and stored."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

HEAD = "#  p  placement  victim  variant    mean ms    p50 ms    p95 ms  after ms  starved ms   strangers Mbit/s"


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the fraction q of the values doesn't exceed."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant in one placement. Times are milliseconds; an epoch's time is that of its slowest rank.

    p: background flows. after_convergence_mean_ms: mean from epoch `settled` on (the tuner's last move; the same epochs
    for every variant). starved_ms: per epoch, how long the threads of the worst rank were ready and had no core: where
    it is not small against the mean, the machine was measured, not the network. background_mbit: what the strangers
    got, all flows together, in Mbit/s.
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
        place = f"{self.p:4d}  {self.placement:9d}  {self.victim:>6}  {self.variant:<8} "
        return f"{place}{cells}  {self.starved_ms:10.1f}  {self.background_mbit:17.1f}"


@dataclasses.dataclass
class Totals:
    """Counts over the whole run. compilations: XLA's, by variant, after the first call of each process."""

    swaps: int = 0
    reverts: int = 0
    wrong: int = 0
    compilations: int = 0
    _seen: dict[str, int] = dataclasses.field(default_factory=dict)

    def add_compilations(self, by_variant: Mapping[str, int]) -> None:
        """Take in each variant's count since its processes began."""
        for variant, count in by_variant.items():
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
        "swaps": totals.swaps,
        "reverts": totals.reverts,
        "compilations_after_first": totals.compilations,
        "wrong": totals.wrong,
        "settings": dict(settings),
    }
