"""A schedule set as the leader tunes it: what was announced, the policy's state, what is in force, how fast it runs."""

from __future__ import annotations

import base64
import collections
import math
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxcoll.schedule import Schedule, decode
from jaxcoll.sim.plan import plan
from jaxcoll.steering.policy import Policy
from jaxcoll.steering.sizes import Sizes
from jaxcoll.telemetry import Epoch, by_executable, concatenate, diagnose, epoch_seconds, measurement_matrix
from jaxcoll.tuner import Config, Decision, Program, ScheduleSet

SetId = tuple[int, int]
"""(communicator id, set key)."""

_PENDING = 16  # epochs that wait for the policy
_RECENT = 24  # epochs that the diagnosis is made from
_RATES_S = (3.0, 0.5)  # launches are counted over so many seconds
_LEARN, _LOOK, _ODD = 24, 8, 0.15  # see Pace; _ODD is the logarithm of a ratio
_FEW_ODD = 3  # odd epochs among _LOOK
_RUNS_S = 10.0  # a set of which no epoch has come for so long doesn't run
_REST_S = (0.0, 4.0, 8.0, 16.0, 32.0, 60.0)  # after so many decisions in a row that couldn't be brought into force
_FEW = 8  # epochs that are too few to count launches by


class Pace:
    """Whether epochs look as they did: told by their length alone, which costs next to nothing.

    After `_LEARN` epochs in a row that were handed on without a decision it is steady; then one epoch in `_LOOK` is
    handed on. Two odd epochs in a row end that, or three among `_LOOK`, and they are handed on: nothing of a change is
    missed, and a single odd epoch is no change.
    """

    def __init__(self) -> None:
        self._spans: collections.deque[float] = collections.deque(maxlen=_LEARN)
        self._usual: float | None = None
        self._last: collections.deque[Epoch | None] = collections.deque(maxlen=_LOOK)  # None: one as usual
        self._skipped = 0

    @property
    def steady(self) -> bool:
        """Whether most epochs are skipped."""
        return self._usual is not None

    def reset(self) -> None:
        """Hands every epoch on again, for a while."""
        self._spans.clear()
        self._last.clear()
        self._usual = None

    def admit(self, epoch: Epoch, may_skip: bool) -> list[Epoch]:
        """The epochs to look at, now that `epoch` has ended."""
        span = epoch.span_ns
        if not may_skip or span <= 0:
            self.reset()
            return [epoch]
        if self._usual is None:
            self._spans.append(span)
            if len(self._spans) == _LEARN:
                self._usual = float(np.median(self._spans))
            return [epoch]
        odd = abs(np.log(span / self._usual)) > _ODD
        self._last.append(epoch if odd else None)
        if odd:
            held = [e for e in self._last if e is not None]
            in_a_row = len(self._last) > 1 and self._last[-2] is not None
            if len(held) < _FEW_ODD and not in_a_row:
                return []
            self.reset()
            return held
        self._skipped += 1
        return [epoch] if self._skipped % _LOOK == 0 else []


def _programs(announced: Mapping[str, Any], free: bool) -> tuple[dict[int, bytes], list[Program], int]:
    """(program blobs by number, programs, number of the start)."""
    blobs = [base64.b64decode(text) for text in announced["programs"]]
    chosen = int(announced["chosen"])
    by_id: dict[int, bytes] = {}
    programs: list[Program] = []
    names: collections.Counter[str] = collections.Counter()
    for blob in blobs if free else [blobs[chosen]]:
        number, schedule = zlib.crc32(blob), decode(blob)
        if number not in by_id:
            names[schedule.name] += 1
            again = names[schedule.name]
            by_id[number] = blob
            programs.append(Program(number, schedule, schedule.name if again == 1 else f"{schedule.name} #{again}"))
    return by_id, programs, zlib.crc32(blobs[chosen])


class Tuned:
    """One set. `key` names it in decisions, logs and files."""

    def __init__(
        self,
        set_id: SetId,
        announced: Mapping[str, Any],
        processes: Sequence[int],
        hosts: Sequence[int],
        policy: Policy,
    ):
        self.set_id, self.processes, self.policy = set_id, tuple(processes), policy
        self.devices = tuple(announced["devices"])
        self.kind, self.size_class = str(announced["kind"]), int(announced["size_class"])
        self.blobs, self._programs, self._start = _programs(announced, policy.free)
        self._hosts = tuple(hosts)
        self._nbytes, size = int(announced["nbytes"]), int(announced["nbytes"]) * 2
        label = f"{size >> 20}M" if size >= 1 << 20 else f"{size >> 10}K"
        short = ".".join(f"{part & 0xFFFFFFFF:08x}" for part in set_id)  # the name is the only key of logs and files
        self.key = f"{self.kind} up to {label} over {len(self.devices)} ranks ({short})"
        self.expected = {p.id: sum(1 for e in p.schedule.edges if _carries(p.schedule, e)) for p in self._programs}
        self._sizes = Sizes()
        self.left_out = 0  # epochs of other sizes
        self.spec: ScheduleSet | None = None
        self.state: Any = None
        self.config: Config | None = None
        self.epochs = self.swaps = self.reverts = self.failed = 0
        self._failed_in_a_row = 0
        self.rest_until = 0.0  # by time.monotonic()
        self._came_at = -math.inf
        self.last = "waiting for the first epochs"
        self.stopped = ""  # why it is tuned no more
        self.seconds: collections.deque[float] = collections.deque(maxlen=256)
        self._starts: collections.deque[tuple[int, int]] = collections.deque(maxlen=512)
        self.pending: collections.deque[Epoch] = collections.deque(maxlen=_PENDING)
        self.pace = Pace()
        self._looks: collections.deque[Epoch] = collections.deque()
        self.recent: collections.deque[Epoch] = collections.deque(maxlen=_RECENT)
        self._seen: tuple[int, dict[str, Any]] = (-1, {"findings": [], "throughput": []})

    def begin(self, epoch: Epoch) -> None:
        """Makes the policy's state, with the size that the epoch really moved, and what is in force as its start."""
        blocks = len(self.devices) if self.kind in ("all_gather", "reduce_scatter", "all_to_all") else 1
        nbytes = max(1, self._nbytes // blocks)
        ran = next((p for p in self._programs if p.id == epoch.program), None)
        if ran is not None:
            modelled = int(plan(ran.schedule, ran.identity, nbytes).size.sum())
            moved = int(epoch.receiver["bytes"].sum())
            nbytes = max(1, round(nbytes * moved / modelled)) if modelled and moved else nbytes
        start, table = (self._start, None) if self.config is None else (self.config.program, self.config.table)
        self.spec = ScheduleSet(self.key, tuple(self._programs), nbytes, start, table, self._hosts)
        self.state = self.policy.start(self.spec)
        self.config = self.spec.home

    def offer(self, epochs: Iterable[Epoch]) -> None:
        """Takes epochs that have ended; of what waits too long the newest is kept. Not while a decision is open.

        Those of an earlier table say nothing any more and are left out.

        Where another size has come to take most of the time, the policy begins anew, from what is in force.
        """
        for epoch in epochs:
            self._came_at = time.monotonic()
            self._starts.append((epoch.id[2], epoch.start_ns))
            if not self._in_force(epoch):
                continue
            before = self._sizes.chosen
            if not self._sizes.admit(epoch):
                self.left_out += 1
                continue
            if self._sizes.chosen != before:
                self.spec = None
                self._forget()
                self.pending.clear()
                self._looks.clear()
            self.pending.append(epoch)

    @property
    def running(self) -> bool:
        """Whether it is tuned and epochs have come of late."""
        return not self.stopped and time.monotonic() - self._came_at < _RUNS_S

    def _in_force(self, epoch: Epoch) -> bool:
        return self.config is None or epoch.version >= self.config.table.version

    def _forget(self) -> None:
        """What epochs have shown is of something else than what comes now."""
        self.pace.reset()
        self.seconds.clear()
        self.recent.clear()

    def next_look(self) -> Epoch | None:
        """The next pending epoch that the policy is to see; None if there is none."""
        if self.stopped:
            return None
        while not self._looks and self.pending:
            self._looks.extend(self.pace.admit(self.pending.popleft(), self._at_rest()))
        return self._looks.popleft() if self._looks else None

    def _at_rest(self) -> bool:
        """Whether epochs may be skipped: at the start, by the default policy. The paper's counts every epoch, and away
        from the start it is to be seen when the way back is open."""
        home = self.spec is not None and self.config is not None and self.config.key == self.spec.home.key
        return home and self.policy.name == "jaxcoll"

    def note(self, epoch: Epoch) -> float:
        """Counts an epoch. Returns its seconds, late ranks left out."""
        self.epochs += 1
        seconds = float(epoch_seconds(epoch))
        self.seconds.append(seconds)
        self.recent.append(epoch)
        return seconds

    def launch_rate(self) -> float:
        """Launches a second: the most of what the last seconds, the last half second, and one epoch's length say."""
        if not self._starts:
            return 0.0
        newest = max(at for _, at in self._starts)
        rates = [_rate([s for s in self._starts if newest - s[1] < span * 1e9]) for span in _RATES_S]
        if len(self._starts) < _FEW:
            rates.append(1 / max(1e-3, float(np.median(self.seconds))))
        return max(rates)

    def took(self, decision: Decision) -> None:
        """Notes a decision that is in force."""
        self.config = Config(decision.program, decision.table)
        self._failed_in_a_row = 0
        self._forget()
        waiting = [epoch for epoch in (*self._looks, *self.pending) if self._in_force(epoch)]
        self._looks.clear()
        self.pending = collections.deque(waiting, _PENDING)
        if decision.action == "revert":
            self.reverts += 1
        else:
            self.swaps += 1

    def stop(self, why: str) -> None:
        """Takes it out of the tuning for good; the table in force stays."""
        self.stopped = why
        self.last = f"not tuned any more: {why}"
        self._looks.clear()

    def refused(self) -> None:
        """Notes a decision that couldn't be brought into force: after a second one in a row it rests, longer each time,
        since the next epochs would only lead to the same."""
        self.failed += 1
        self._failed_in_a_row += 1
        self.rest_until = time.monotonic() + _REST_S[min(self._failed_in_a_row, len(_REST_S)) - 1]

    def seen(self) -> dict[str, Any]:
        """What the last epochs show.

        "findings" in words, and "throughput", bytes/s by [src][dst], None where nothing went.
        """
        if self._seen[0] != self.epochs and self.recent:
            records = concatenate(e.records for e in self.recent)
            n = len(self.devices)
            matrix = measurement_matrix(records, n).throughput
            throughput = [[None if np.isnan(v) else float(v) for v in row] for row in matrix]
            findings = diagnose(records, n, hosts=self._hosts).lines()
            self._seen = (self.epochs, {"findings": findings, "throughput": throughput})
        return self._seen[1]

    def summary(self) -> dict[str, Any]:
        """Plain data for `jaxcoll.status()`."""
        config, spec = self.config, self.spec
        times = np.asarray(self.seconds)
        program = spec.by_id[config.program].name if spec is not None and config is not None else None
        return {
            "key": self.key,
            "kind": self.kind,
            "ranks": len(self.devices),
            "size_class": self.size_class,
            "nbytes": spec.nbytes if spec is not None else None,
            "program": program,
            "version": config.table.version if config is not None else 0,
            "epochs": self.epochs,
            "left_out": self.left_out,
            "swaps": self.swaps,
            "reverts": self.reverts,
            "failed": self.failed,
            "median_ms": float(np.median(times)) * 1e3 if len(times) else None,
            "p95_ms": float(np.percentile(times, 95)) * 1e3 if len(times) else None,
            "last": self.last,
            **self.seen(),
        }


def _rate(starts: Sequence[tuple[int, int]]) -> float:
    """Launches a second of (launch, start in ns) pairs: of the executable that is launched most often."""
    pairs = np.array(starts, dtype=np.int64).reshape(-1, 2)
    rates = [0.0]
    for one in by_executable(pairs[:, 0].tolist()):
        launches, span = np.ptp(pairs[one, 0]), float(np.ptp(pairs[one, 1])) / 1e9
        if span > 0:
            rates.append(float(launches) / span)
    return max(rates)


def _carries(schedule: Schedule, edge: Any) -> bool:
    return any(schedule.chunks[c].weight for c in edge.chunks)
