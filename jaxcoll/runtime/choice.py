"""Which schedule for which size: a small cost model over the measured alpha and beta. Pure; the same in every process.

    T = sum over steps s of (alpha + m * messages_s + bytes_s * beta), messages and bytes of the busiest rank
    cut into L lanes:  T = (S + L - 1) * max_s(alpha + m * messages_s + bytes_s * beta / L)
    and at least the copies of all ranks of a host, divided over its cores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxcoll.errors import ScheduleError
from jaxcoll.runtime.probe import Speed
from jaxcoll.schedule import Kind, Schedule, build, builders, stats

# What the set of a collective holds, in order of preference at equal cost.
CANDIDATES: dict[Kind, tuple[str, ...]] = {
    Kind.ALL_REDUCE: ("one_shot", "direct", "halving_doubling", "dual_tree", "ring"),
    Kind.REDUCE: ("direct", "binomial"),
    Kind.BROADCAST: ("direct", "binomial"),
    Kind.ALL_GATHER: ("direct", "recursive_doubling", "ring"),
    Kind.REDUCE_SCATTER: ("direct", "ring"),
    Kind.ALL_TO_ALL: ("direct", "pairwise"),
    Kind.PERMUTE: ("permute",),
}
PIPELINED = {"dual_tree": 8}
MESSAGE_S = 2e-6  # seconds of a rank's core for one message, whatever its size
_CLASS_BASE = 4096  # bytes; every class is four times the one before


def size_class(nbytes: int) -> int:
    """The class of a message of `nbytes`: 0 up to 4 KiB, 1 up to 16 KiB, and so on by factors of four."""
    c = 0
    while nbytes > _CLASS_BASE << (2 * c):
        c += 1
    return c


def class_top(c: int) -> int:
    """The largest size of a class, in bytes."""
    return _CLASS_BASE << (2 * c)


def class_bytes(c: int) -> int:
    """The size that stands for a class: half its upper end."""
    return class_top(c) // 2


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One row of `explain`: schedule, predicted seconds for a class's size, or why it can't be used."""

    name: str
    seconds: float | None
    reason: str = ""


@functools.lru_cache(maxsize=256)
def make(name: str, kind: Kind, nranks: int, root: int | None, perm: tuple[tuple[int, int], ...] | None, large: bool) -> Schedule:
    """A candidate by name; `large` messages are pipelined where that helps."""
    params: dict[str, object] = {}
    if kind.rooted:
        params["root"] = root
    if kind is Kind.PERMUTE:
        params["perm"] = perm
    if large and name in PIPELINED:
        params["pipeline"] = PIPELINED[name]
    return build(name, kind, nranks, **params)


def predict(schedule: Schedule, nbytes: int, speed: Speed) -> float:
    """Seconds for a message whose larger side (all blocks of a rank) is `nbytes`."""
    blocks = schedule.nranks if schedule.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1
    block = max(4, nbytes // blocks // 4 * 4)
    s = stats(schedule, None, block)
    if schedule.steps == 0:
        return 0.0
    lanes = schedule.pipeline
    messages = np.maximum(s.send_degree, s.recv_degree).max(axis=1)
    busiest = np.maximum(s.send_bytes, s.recv_bytes).max(axis=1)
    step = speed.alpha + MESSAGE_S * messages + busiest * (speed.beta if speed.remote else speed.copy_beta) / lanes
    wire = float(step.sum() if lanes == 1 else (schedule.steps + lanes - 1) * step.max())
    # The ranks of a host share its cores: the work of all of them, however it is pipelined, takes its time.
    share = min(1.0, speed.local_ranks / schedule.nranks)
    work = float(s.recv_bytes.sum()) * share * speed.copy_beta / min(speed.cores, speed.local_ranks)
    return max(wire, schedule.steps * speed.alpha + work)


def estimates(kind: Kind, nranks: int, nbytes: int, speed: Speed, root: int | None = None,
              perm: tuple[tuple[int, int], ...] | None = None) -> list[Estimate]:  # fmt: skip
    """All candidates with their predicted times."""
    rows: list[Estimate] = []
    for name in CANDIDATES[kind]:
        why = builders(kind)[name].supports(nranks) if name in builders(kind) else "no such builder"
        if why is not None:
            rows.append(Estimate(name, None, why))
            continue
        schedule = make(name, kind, nranks, root, perm, nbytes > 1 << 20)
        rows.append(Estimate(name, predict(schedule, nbytes, speed)))
    return rows


def best(rows: Sequence[Estimate]) -> Estimate:
    """The quickest candidate; the first of equals."""
    usable = [r for r in rows if r.seconds is not None]
    if not usable:
        raise ScheduleError("no schedule fits: " + "; ".join(f"{r.name}: {r.reason}" for r in rows))
    return min(usable, key=lambda r: (r.seconds or 0.0, rows.index(r)))
