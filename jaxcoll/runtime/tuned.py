"""A schedule set as the leader tunes it: what was announced, the policy's state, what is in force, how fast it runs."""

from __future__ import annotations

import base64
import collections
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxcoll.runtime import choice
from jaxcoll.runtime.policy import Policy
from jaxcoll.runtime.swap import Place, SetId
from jaxcoll.schedule import Kind, Schedule, build, builders, decode, encode
from jaxcoll.sim.plan import plan
from jaxcoll.telemetry import Epoch, epoch_seconds
from jaxcoll.tuner import Config, Decision, Program, ScheduleSet

_MANY = 64  # ranks above which no variants are added: their programs would be large
_RATE_S = 3.0  # launches are counted over so many seconds


def _programs(announced: Mapping[str, Any], free: bool) -> tuple[dict[int, bytes], list[Program], int]:
    """(program blobs by number, programs, number of the start)."""
    blobs = [base64.b64decode(text) for text in announced["programs"]]
    start = zlib.crc32(blobs[announced["chosen"]])
    schedules = [decode(blob) for blob in blobs]
    chosen = schedules[announced["chosen"]]
    if free:
        schedules += [s for s in _more(chosen, choice.class_bytes(announced["size_class"])) if s is not None]
    by_id: dict[int, bytes] = {}
    programs: list[Program] = []
    for schedule, label in _labelled(schedules if free else [chosen]):
        blob = encode(schedule)
        number = zlib.crc32(blob)
        if number not in by_id:
            by_id[number] = blob
            programs.append(Program(number, schedule, label))
    return by_id, programs, start


def _labelled(schedules: Sequence[Schedule]) -> list[tuple[Schedule, str]]:
    seen: collections.Counter[str] = collections.Counter()
    out: list[tuple[Schedule, str]] = []
    for schedule in schedules:
        seen[schedule.name] += 1
        out.append((schedule, schedule.name if seen[schedule.name] == 1 else f"{schedule.name} #{seen[schedule.name]}"))
    return out


def _more(chosen: Schedule, nbytes: int) -> list[Schedule]:
    """Further schedules for the same collective: the usual candidates, and direct ones that give some ranks no share."""
    kind, n, root = chosen.kind, chosen.nranks, chosen.collective.root
    if kind is Kind.PERMUTE:
        return []
    known = builders(kind)
    names = [name for name in choice.CANDIDATES[kind] if name in known and known[name].supports(n) is None]
    out = [choice.make(name, kind, n, root, None, nbytes > 1 << 20) for name in names]
    if kind is Kind.ALL_REDUCE and 4 <= n <= _MANY:
        for left_out in (1, 2):
            shares = [0] * left_out + [1] * (n - left_out)
            made = build("direct", kind, n, shares=shares)
            out.append(dataclasses.replace(made, name=f"direct but {left_out}"))
    return out


class Tuned:
    """One set. `key` names it in decisions, logs and files."""

    def __init__(self, set_id: SetId, announced: Mapping[str, Any], processes: Sequence[int], hosts: Sequence[int], policy: Policy):
        self.set_id, self.processes, self.policy = set_id, tuple(processes), policy
        self.devices = tuple(announced["devices"])
        self.kind, self.size_class = str(announced["kind"]), int(announced["size_class"])
        self.blobs, self._programs, self._start = _programs(announced, policy.free)
        self._hosts = tuple(hosts)
        size = 4096 << (2 * self.size_class)
        label = f"{size >> 20}M" if size >= 1 << 20 else f"{size >> 10}K"
        self.key = f"{self.kind} up to {label} over {len(self.devices)} ranks ({set_id[0] & 0xFFFF:04x}.{set_id[1] & 0xFFFF:04x})"
        self.expected = {p.id: sum(1 for e in p.schedule.edges if _carries(p.schedule, e)) for p in self._programs}
        self.spec: ScheduleSet | None = None
        self.state: Any = None
        self.config: Config | None = None
        self.epochs = self.swaps = self.reverts = self.failed = 0
        self.last = "waiting for the first epochs"
        self.seconds: collections.deque[float] = collections.deque(maxlen=256)
        self._starts: collections.deque[tuple[int, int]] = collections.deque(maxlen=512)
        self.recent: collections.deque[Epoch] = collections.deque(maxlen=64)

    def begin(self, epoch: Epoch) -> None:
        """Makes the policy's state, with the size that the first epoch really moved."""
        blocks = len(self.devices) if self.kind in ("all_gather", "reduce_scatter", "all_to_all") else 1
        nbytes = max(1, choice.class_bytes(self.size_class) // blocks)
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
        """Launches a second, over the last seconds of traffic."""
        if len(self._starts) < 2:
            return 0.0
        newest = max(at for at, _ in self._starts)
        window = [(at, launch) for at, launch in self._starts if newest - at < _RATE_S * 1e9]
        span = (newest - min(at for at, _ in window)) / 1e9
        launches = [launch for _, launch in window]
        return (max(launches) - min(launches)) / span if span > 0 else 0.0

    def took(self, decision: Decision) -> None:
        """Notes a decision that is in force."""
        self.config = Config(decision.program, decision.table)
        self.seconds.clear()
        self.recent.clear()
        if decision.action == "revert":
            self.reverts += 1
        else:
            self.swaps += 1

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
        }


def _carries(schedule: Schedule, edge: Any) -> bool:
    return any(schedule.chunks[c].weight for c in edge.chunks)


def points_behind(places: Sequence[Sequence[Place]], margin: int) -> list[Place]:
    """For every call site, the first execution of the launch `margin` launches behind the furthest that any process has begun.

    Launch numbers may wrap around: the difference decides, as in the library.
    """
    furthest: dict[int, int] = {}
    for mine in places:
        for site, launch, _ in mine:
            if site not in furthest or launch - furthest[site] > 0:
                furthest[site] = launch
    return [(site, launch + margin, 0) for site, launch in furthest.items()]


__all__ = ["Tuned", "points_behind"]

