"""A run log, set by set, as what the report's figures show."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import UsageError
from jaxcoll.steering import policy, runlog
from jaxcoll.telemetry import Epoch, by_executable, concatenate, measurement_matrix
from jaxcoll.tuner import Config, Decision, ScheduleSet
from jaxcoll.tuner.detect import detect
from jaxcoll.tuner.measure import batch_of, pattern_of

Floats = npt.NDArray[np.float64]

WINDOW = 60  # epochs before the first swap, and at the end, that "before" and "after" stand for
_TRIGGER = 3  # the fewest epochs that a swap is decided on
_BATCH = 6  # epochs from which an edge is found congested


@dataclasses.dataclass(frozen=True, eq=False)
class Point:
    """An epoch: its start and its collective's time, seconds; `launch` and `index` say which execution."""

    start: float
    seconds: float
    launch: int
    index: int
    site: int
    config: Config
    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class Made:
    """A decision as the log has it; `at` is seconds since the run's first epoch."""

    decision: Decision
    committed: bool
    at: float
    stall_s: float
    tries: int
    refusal: str
    measured: float | None = None
    """Median time of the next epochs over that of the last ones before; None where there are none."""


@dataclasses.dataclass(eq=False)
class SetRun:
    """One set's way through the run, named `key` in the log; `spec.key` tells its parts apart."""

    key: str
    spec: ScheduleSet
    policy: str
    points: list[Point] = dataclasses.field(default_factory=list)
    made: list[Made] = dataclasses.field(default_factory=list)
    configs: dict[int, Config] = dataclasses.field(default_factory=dict)

    @property
    def swaps(self) -> list[Made]:
        """What came into force, reverts included."""
        return [m for m in self.made if m.committed]

    @property
    def reverts(self) -> int:
        """How many of the swaps only took an earlier one back."""
        return sum(m.decision.action == "revert" for m in self.swaps)

    def before(self) -> list[Point]:
        """The last epochs before the first swap (all, without one)."""
        first = self.swaps[0].decision.version if self.swaps else None
        return [p for p in self.points if first is None or p.config.table.version < first][-WINDOW:]

    def trigger(self) -> list[Point]:
        """The few epochs just before the first swap: what it was an answer to. The last ones, without one."""
        return self.before()[-_TRIGGER:]

    def after(self) -> list[Point]:
        """The last epochs under the last table; [] where no swap has one under it."""
        if not self.swaps:
            return []
        last = max(p.config.table.version for p in self.points)
        if last < self.swaps[0].decision.version:  # no epoch came after it; the start's own version needn't be 0
            return []
        return [p for p in self.points if p.config.table.version == last][-WINDOW:]

    def steps(self) -> tuple[Floats, Floats]:
        """(start, time) of the steps, seconds: from one launch of the busiest call site's executable to its next."""
        firsts: dict[tuple[int, int], float] = {}
        for p in self.points:
            key = (p.site, p.launch)
            firsts[key] = min(p.start, firsts.get(key, p.start))
        sites = [site for site, _ in firsts]
        if not sites:
            return np.empty(0), np.empty(0)
        busiest = max(set(sites), key=sites.count)
        mine = [(start, launch) for (site, launch), start in firsts.items() if site == busiest]
        one = max(by_executable([launch for _, launch in mine]), key=len)
        start, launch = (np.array(column) for column in zip(*sorted(mine[i] for i in one), strict=True))
        gap = np.diff(launch)
        # Sampled epochs leave launches out: the mean over those between stands for them.
        good = gap > 0
        return start[:-1][good], (np.diff(start)[good] / gap[good])

    def throughput(self, points: Sequence[Point]) -> Floats:
        """Median bytes/s by [src][dst]; NaN where nothing went."""
        records = concatenate(p.epoch.records for p in points)
        return measurement_matrix(records, self.spec.nranks).throughput

    def congested(self, points: Sequence[Point]) -> tuple[list[int], list[int]]:
        """(steady, erratic) congested edges of the schedule that `points` ran last: the paper's equations 1 and 2."""
        config = points[-1].config
        same = [p.epoch for p in points if p.config.key == config.key][-_BATCH:]
        pattern = pattern_of(self.spec.by_id[config.program].schedule, config.table, self.spec.nbytes)
        found = detect(batch_of(same, pattern, self.spec.nranks), hosts=self.spec.host_of)
        steady, erratic = np.flatnonzero(found.steady), np.flatnonzero(found.erratic)
        return steady.tolist(), erratic.tolist()


def load(path: str | Path) -> list[SetRun]:
    """The sets of a run log, the one that took most time first. UsageError if it is no run log or holds no epoch."""
    sets: dict[str, SetRun] = {}
    runs: list[SetRun] = []
    origin: int | None = None
    for number, line in enumerate(runlog.read(path), 1):
        with runlog.reading(path, number):
            kind = line["type"]
            if kind == "set":
                chosen, spec = policy.from_json(line)
                # Where another message size has come to take most of the time, the set's policy has begun anew.
                times = 1 + sum(run.key == spec.key for run in runs)
                named = dataclasses.replace(spec, key=f"{spec.key}, part {times}") if times > 1 else spec
                sets[spec.key] = SetRun(spec.key, named, chosen.name, configs={spec.home.table.version: spec.home})
                runs.append(sets[spec.key])
            elif kind == "epoch":
                origin = int(line["start_ns"]) if origin is None else min(origin, int(line["start_ns"]))
                _epoch(runlog.about(sets, line), line)
            elif kind == "decision":
                _decision(runlog.about(sets, line), line)
    runs = [run for run in runs if run.points]
    if not runs or origin is None:
        raise UsageError(f"{path} holds no epochs: the run was too short, or nothing in it was tuned")
    for run in runs:
        _finish(run, origin / 1e9)
    return sorted(runs, key=lambda run: -sum(p.seconds for p in run.points))


def _epoch(run: SetRun, line: Mapping[str, Any]) -> None:
    epoch = runlog.epoch_of(line)
    config = run.configs.get(epoch.version)
    if config is None or config.program != epoch.program:
        return  # ran a table of an attempt that the log doesn't have
    _, site, launch, index = epoch.id
    run.points.append(Point(line["start_ns"] / 1e9, line["seconds"], launch, index, site, config, epoch))


def _decision(run: SetRun, line: Mapping[str, Any]) -> None:
    decision = Decision.from_json(line)
    if line["committed"]:
        run.configs[decision.version] = Config(decision.program, decision.table)
    # By the epochs that it came after: the leader's clock and that of a record may differ.
    at = run.points[-1].start + run.points[-1].seconds if run.points else 0.0
    run.made.append(Made(decision, line["committed"], at, line["stall_s"], line["tries"], line["refusal"]))


def _finish(run: SetRun, origin: float) -> None:
    """Times since the run's start, and what each swap brought."""
    run.points = [dataclasses.replace(p, start=p.start - origin) for p in sorted(run.points, key=lambda p: p.start)]
    run.made = [dataclasses.replace(m, at=m.at - origin, measured=_ratio(run, m)) for m in run.made]


def _ratio(run: SetRun, made: Made) -> float | None:
    if not made.committed:
        return None
    version = made.decision.version
    new = [p.seconds for p in run.points if p.config.table.version == version][:_BATCH]
    old = [p.seconds for p in run.points if p.config.table.version < version][-_BATCH:]
    return float(np.median(new) / np.median(old)) if new and old else None
