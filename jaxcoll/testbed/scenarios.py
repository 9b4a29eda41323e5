"""The situations in which the tuner must show itself: one row each, with the command and what is read out of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import Any


class Result:
    """The JSON of one `jaxcoll testbed bench`, for reading."""

    def __init__(self, data: Mapping[str, Any]):
        self.data = data

    def mean(self, variant: str, field: str, phase: str = "", placement: int | None = None) -> float:
        """The mean over the placements (or of one) of a row's field, in milliseconds. phase: "busy 1", or "busy" for
        all of them. KeyError if there is no such row."""
        rows = [r for r in self.data["results"] if r["variant"] == variant and placement in (None, r["placement"])]
        found = [r for r in rows if not phase or r["phase"] == phase or r["phase"].startswith(f"{phase} ")]
        if not found:
            raise KeyError(f"no row of {variant} {phase}")
        return statistics.fmean(r[field] for r in found)

    def gain(self, slow: str, fast: str, field: str = "mean_ms", fast_field: str = "") -> float:
        """Time of `slow` over that of `fast`."""
        return self.mean(slow, field) / self.mean(fast, fast_field or field)

    def found(self, variant: str) -> list[Mapping[str, Any]]:
        """What the tuner of a variant did, by placement."""
        return [f for f in self.data["found"] if f["variant"] == variant]

    def decisions(self) -> list[Mapping[str, Any]]:
        """Those of all variants that came into force."""
        return [d for f in self.data["found"] for d in f["decisions"] if d["committed"]]

    def said(self, variant: str, *words: str) -> float:
        """The share of the placements in which a finding has all the words."""
        hits = [any(all(w in line for w in words) for line in f["findings"]) for f in self.found(variant)]
        return statistics.fmean(hits) if hits else 0.0

    def most_in_a_minute(self, variant: str, reverts: bool) -> float:
        """The most swaps within any 60 s of a placement, with the reverts or without."""
        most = 0
        for found in self.found(variant):
            made = [d for d in found["decisions"] if d["committed"] and (reverts or d["action"] != "revert")]
            times = [d["time"] for d in made]
            most = max([most, *(sum(at <= t < at + 60 for t in times) for at in times)])
        return most

    def most_batches(self, variant: str) -> float:
        """The most batches that trouble lasted before a decision; infinite if it led to none once, but for a phase that
        was no slower than the time before: what was in force then served the trouble as well."""
        waits: list[float] = []
        for found in self.found(variant):
            for phase, n in found["batches_to_decide"].items():
                here = found["placement"]
                before = self.mean(variant, "p50_ms", "before", here)
                harmless = self.mean(variant, "p50_ms", phase, here) <= 1.1 * before
                waits.append(n if n is not None else 0.0 if harmless else float("inf"))
        return max(waits, default=float("inf"))


@dataclasses.dataclass(frozen=True)
class Reading:
    """One number out of a result, and the target that it is held against: at least, or at most."""

    what: str
    read: Callable[[Result], float]
    least: float | None = None
    most: float | None = None

    @property
    def target(self) -> str:
        """For people."""
        if self.least is not None:
            return f">= {self.least:g}"
        return f"<= {self.most:g}" if self.most is not None else ""

    def met(self, value: float) -> bool | None:
        """Whether the target is met; None without one."""
        if self.least is not None:
            return value >= self.least
        return value <= self.most if self.most is not None else None


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A situation: `words` are the options of `jaxcoll testbed bench`, `seconds` about what it takes on two cores."""

    name: str
    about: str
    words: str
    seconds: float
    readings: tuple[Reading, ...]


def _swaps(hosts: int, p: int, after: float, seconds: float) -> Scenario:
    readings: list[Reading] = []
    for variant in ("swaps", "react-paper"):
        readings += [
            Reading(f"{variant}: best found by trying / this, after convergence", _against_best(variant), least=0.95),
            Reading(f"{variant}: untuned / this, after convergence", _after("untuned", variant), least=after),
            Reading(f"{variant}: untuned / this, mean", _mean("untuned", variant)),
        ]
    readings += [Reading("best found by trying: untuned / this", _after("untuned", "best")), _STALL]
    words = f"--hosts {hosts} --p {p} --schedule dual_tree --size 2M --epochs 40"
    words += " --variants untuned,swaps,react-paper,best,quiet"
    about = f"dual tree, swaps alone, {hosts} hosts, p = {p}, an inner node as the victim"
    return Scenario(f"swaps-{hosts}-p{p}", about, words, seconds, tuple(readings))


def _free(start: str, p: int, readings: tuple[Reading, ...], seconds: float) -> Scenario:
    words = f"--hosts 8 --p {p} --schedule {start} --size 2M --epochs 60 --variants untuned,on,lax,quiet"
    about = f"free choice, started on the {start.replace('_', ' ')}, 8 hosts, p = {p}"
    return Scenario(f"free-{start.replace('_', '-')}-p{p}", about, words, seconds, readings)


def _mean(slow: str, fast: str) -> Callable[[Result], float]:
    return lambda r: r.gain(slow, fast)


def _after(slow: str, fast: str) -> Callable[[Result], float]:
    return lambda r: r.gain(slow, fast, "after_convergence_mean_ms")


def _against_best(variant: str) -> Callable[[Result], float]:
    return _after("best", variant)


def _p95(slow: str, fast: str) -> Callable[[Result], float]:
    return lambda r: r.gain(slow, fast, "p95_ms")


def _over_quiet(variant: str) -> Callable[[Result], float]:
    return lambda r: r.mean(variant, "after_convergence_mean_ms") / r.mean("quiet", "mean_ms")


def _longest_stall(r: Result) -> float:
    return max((1e3 * d["stall_s"] for d in r.decisions()), default=0.0)


_AGAINST_LAX = Reading("jax.lax / tuned, mean", _mean("lax", "on"))
_TO_QUIET = Reading("tuned after convergence / quiet time of the untuned start", _over_quiet("on"), most=1.1)
_STALL = Reading("longest stall by a swap, ms", _longest_stall, most=1)


def _p2(gain: float) -> tuple[Reading, ...]:
    """What is read under two strangers, the mean `gain` being what depends on the start."""
    return (
        Reading("untuned / tuned, mean, convergence included", _mean("untuned", "on"), least=gain),
        Reading("untuned / tuned, p95", _p95("untuned", "on"), least=1.2),
        _TO_QUIET,
        _AGAINST_LAX,
        _STALL,
    )


_P1 = (Reading("untuned / tuned, mean, convergence included", _mean("untuned", "on")), _TO_QUIET, _AGAINST_LAX, _STALL)
_P0 = tuple(Reading(f"{v}: untuned / tuned, mean", _mean("untuned", v), least=0.99) for v in ("on", "swaps"))
_ORDER = (
    Reading("swaps: best order found / this, after convergence", _against_best("swaps"), least=0.9),
    Reading("swaps: untuned / this, mean", _mean("untuned", "swaps")),
    Reading("best order found: untuned / this", _after("untuned", "best")),
    _STALL,
)


def _ecmp(variant: str, what: str) -> tuple[Scenario, Scenario]:
    """Against the untuned start, in turn; and alone, since the ration of moves goes by the clock."""
    about = f"erratic congestion: the kernel's ECMP over four spines, {what}"
    words = "--hosts 8 --p 2 --topology spines --width 4 --spine 100Mbit --schedule dual_tree --size 2M"
    against = (
        Reading(f"{variant}: untuned / this, mean", _mean("untuned", variant), least=1.0),
        Reading(f"{variant}: untuned / this, after convergence", _after("untuned", variant)),
        _STALL,
    )
    swaps = (
        Reading(f"{variant}: most swaps within a minute", lambda r: r.most_in_a_minute(variant, False), most=3),
        Reading(f"{variant}: and with their reverts", lambda r: r.most_in_a_minute(variant, True)),
        _STALL,
    )
    return (
        Scenario(f"ecmp-{variant}", about, f"{words} --epochs 100 --variants untuned,{variant}", 330, against),
        Scenario(
            f"ecmp-alone-{variant}",
            f"{about}, not in turn",
            f"{words} --epochs 250 --variants {variant}",
            270,
            swaps,
        ),
    )


SCENARIOS: tuple[Scenario, ...] = (
    _swaps(4, 1, 1.15, 240),
    _swaps(4, 2, 1.2, 240),
    _swaps(8, 1, 1.15, 300),
    _swaps(8, 2, 1.2, 300),
    _free("dual_tree", 1, _P1, 270),
    _free("dual_tree", 2, _p2(1.45), 300),
    _free("ring", 2, _p2(1.8), 300),
    Scenario(
        "quiet",
        "nothing is congested (p = 0)",
        "--hosts 8 --p 0 --schedule dual_tree --size 2M --epochs 60 --variants untuned,on,swaps",
        220,
        _P0,
    ),
    Scenario(
        "ring-racks",
        "ring, two racks with a thin link, shuffled host order",
        "--hosts 8 --p 0 --topology racks --spine 100Mbit --shuffle --schedule ring --size 1M --epochs 36"
        " --variants untuned,swaps,best",
        300,
        _ORDER,
    ),
    Scenario(
        "doubling-spine",
        "recursive doubling, congested spine, shuffled host order",
        # One order takes 0.2 to 0.9 s: with 36 epochs the same table was 0.82 times as fast as itself.
        "--hosts 8 --p 1 --topology spines --width 1 --shuffle --schedule recursive_doubling --size 512K --epochs 60"
        " --variants untuned,swaps,best",
        330,
        _ORDER,
    ),
    *_ecmp("on", "free choice"),
    *_ecmp("swaps", "swaps alone"),
    Scenario(
        "come-and-go",
        "congestion that comes for 60 s and goes for 30 s, three times",
        "--hosts 8 --p 2 --come-and-go 60:30:3 --placements 1 --schedule dual_tree --size 2M --variants on",
        330,
        (
            Reading("most batches until a decision", lambda r: r.most_batches("on"), most=3),
            Reading(
                "time when free again / before",
                lambda r: r.mean("on", "p50_ms", "free") / r.mean("on", "p50_ms", "before"),
                most=1.1,
            ),
            Reading(
                "time while busy / before", lambda r: r.mean("on", "mean_ms", "busy") / r.mean("on", "p50_ms", "before")
            ),
            Reading("swaps and reverts in all", lambda r: r.data["swaps"] + r.data["reverts"], most=12),
            _STALL,
        ),
    ),
    Scenario(
        "straggler",
        "one rank 50 ms late in every epoch, no slow link",
        "--hosts 8 --p 0 --late 3:50ms --schedule direct --size 1M --epochs 40 --variants untuned,on",
        150,
        (
            Reading("swaps", lambda r: r.data["swaps"], most=0),
            Reading(
                "reported as a straggler by rank: share of placements",
                lambda r: r.said("on", "rank 3", "late"),
                least=1,
            ),
        ),
    ),
    Scenario(
        "slow-sender",
        "one host's outgoing direction at a quarter",
        "--hosts 8 --p 0 --slow h3:up:50Mbit --schedule dual_tree --size 1M --epochs 40 --variants untuned,on,quiet",
        200,
        (
            Reading(
                "reported by host and direction: share of placements",
                lambda r: r.said("on", "host 3", "outgoing"),
                least=1,
            ),
            Reading("untuned / tuned, mean", _mean("untuned", "on")),
            _TO_QUIET,
            _STALL,
        ),
    ),
)


def listing() -> str:
    """Names and what they are, for a help text."""
    return "\n".join(f"  {s.name:<18} {s.about} (about {s.seconds:.0f} s)" for s in SCENARIOS)
