"""A schedule set as the leader tunes it: what was announced, the policy's state, what is in force, how fast it runs."""

from __future__ import annotations

import base64
import collections
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxcoll.schedule import Schedule, decode
from jaxcoll.sim.plan import plan
from jaxcoll.steering.policy import Policy
from jaxcoll.telemetry import Epoch, concatenate, diagnose, epoch_seconds, measurement_matrix
from jaxcoll.tuner import Config, Decision, Program, ScheduleSet

SetId = tuple[int, int]
"""(communicator id, set key)."""

_PENDING = 16  # epochs that wait for the policy
_RECENT = 24  # epochs that the diagnosis is made from
_RATES_S = (3.0, 0.5)  # launches are counted over so many seconds
_FEW = 8  # epochs that are too few to count launches by


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
        short = f"{set_id[0] & 0xFFFF:04x}.{set_id[1] & 0xFFFF:04x}"
        self.key = f"{self.kind} up to {label} over {len(self.devices)} ranks ({short})"
        self.expected = {p.id: sum(1 for e in p.schedule.edges if _carries(p.schedule, e)) for p in self._programs}
        self.spec: ScheduleSet | None = None
        self.state: Any = None
        self.config: Config | None = None
        self.epochs = self.swaps = self.reverts = self.failed = 0
        self.last = "waiting for the first epochs"
        self.seconds: collections.deque[float] = collections.deque(maxlen=256)
        self._starts: collections.deque[tuple[int, int]] = collections.deque(maxlen=512)
        self.pending: collections.deque[Epoch] = collections.deque(maxlen=_PENDING)
        self.recent: collections.deque[Epoch] = collections.deque(maxlen=_RECENT)
        self._seen: tuple[int, dict[str, Any]] = (-1, {"findings": [], "throughput": []})

    def begin(self, epoch: Epoch) -> None:
        """Makes the policy's state, with the size that the first epoch really moved."""
        blocks = len(self.devices) if self.kind in ("all_gather", "reduce_scatter", "all_to_all") else 1
        nbytes = max(1, self._nbytes // blocks)
        ran = next((p for p in self._programs if p.id == epoch.program), None)
        if ran is not None:
            modelled = int(plan(ran.schedule, ran.identity, nbytes).size.sum())
            moved = int(epoch.receiver["bytes"].sum())
            nbytes = max(1, round(nbytes * moved / modelled)) if modelled and moved else nbytes
        self.spec = ScheduleSet(self.key, tuple(self._programs), nbytes, self._start, hosts=self._hosts)
        self.state = self.policy.start(self.spec)
        self.config = self.spec.home

    def note(self, epoch: Epoch) -> float:
        """Counts an epoch. Returns its seconds, late ranks left out."""
        self.epochs += 1
        seconds = float(epoch_seconds(epoch))
        self.seconds.append(seconds)
        self.recent.append(epoch)
        self._starts.append((int(epoch.records["start_ns"].min()), epoch.id[2]))
        return seconds

    def launch_rate(self) -> float:
        """Launches a second: the most of what the last seconds, the last half second, and one epoch's length say."""
        if not self._starts:
            return 0.0
        newest = max(at for at, _ in self._starts)
        rates = [_rate([s for s in self._starts if newest - s[0] < span * 1e9]) for span in _RATES_S]
        if len(self._starts) < _FEW:
            rates.append(1 / max(1e-3, float(np.median(self.seconds))))
        return max(rates)

    def took(self, decision: Decision) -> None:
        """Notes a decision that is in force."""
        self.config = Config(decision.program, decision.table)
        self.seconds.clear()
        self.recent.clear()
        if decision.action == "revert":
            self.reverts += 1
        else:
            self.swaps += 1

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
            "swaps": self.swaps,
            "reverts": self.reverts,
            "failed": self.failed,
            "median_ms": float(np.median(times)) * 1e3 if len(times) else None,
            "p95_ms": float(np.percentile(times, 95)) * 1e3 if len(times) else None,
            "last": self.last,
            **self.seen(),
        }


def _rate(starts: Sequence[tuple[int, int]]) -> float:
    """Launches a second of (start in ns, launch) pairs."""
    times, launches = [at for at, _ in starts], [launch for _, launch in starts]
    span = (max(times) - min(times)) / 1e9
    return (max(launches) - min(launches)) / span if span > 0 else 0.0


def _carries(schedule: Schedule, edge: Any) -> bool:
    return any(schedule.chunks[c].weight for c in edge.chunks)
