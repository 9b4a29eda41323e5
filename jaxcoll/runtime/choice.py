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
from jaxcoll.schedule import Kind, Schedule, build, stats

Perm = tuple[tuple[int, int], ...]
# What the set of a collective holds, in order of preference at equal cost.
CANDIDATES: dict[Kind, tuple[str, ...]] = {
    Kind.ALL_REDUCE: ("one_shot", "direct", "hierarchical", "halving_doubling", "dual_tree", "ring"),
    Kind.REDUCE: ("direct", "binomial"),
    Kind.BROADCAST: ("direct", "binomial"),
    Kind.ALL_GATHER: ("direct", "hierarchical", "recursive_doubling", "ring"),
    Kind.REDUCE_SCATTER: ("direct", "hierarchical", "ring"),
    Kind.ALL_TO_ALL: ("direct", "pairwise"),
    Kind.PERMUTE: ("permute",),
}
PIPELINED = {"dual_tree": 8}
MESSAGE_S = 2e-6  # seconds of a rank's core for one message, whatever its size
_LARGE = 1 << 20  # bytes; what is larger is pipelined
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


def is_large(nbytes: int) -> bool:
    """Whether a message of `nbytes` is pipelined (see `make`)."""
    return nbytes > _LARGE


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One row of `explain`: schedule, predicted seconds for a class's size, or why it can't be used."""

    name: str
    seconds: float | None
    reason: str = ""


@functools.lru_cache(maxsize=256)
def make(name: str, kind: Kind, nranks: int, root: int | None, perm: Perm | None, large: bool,
         hosts: tuple[int, ...] = ()) -> Schedule:  # fmt: skip
    """A candidate by name; `large` messages are pipelined where that helps.

    `hosts`: the host of every rank; empty: one host.
    """
    params: dict[str, object] = {}
    if name == "hierarchical":
        params["groups"] = by_host(hosts or (0,) * nranks)
    if kind.rooted:
        params["root"] = root
    if kind is Kind.PERMUTE:
        params["perm"] = perm
    if large and name in PIPELINED:
        params["pipeline"] = PIPELINED[name]
    return build(name, kind, nranks, **params)


def by_host(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first rank."""
    groups: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())


def predict(schedule: Schedule, nbytes: int, speed: Speed, hosts: tuple[int, ...] = ()) -> float:
    """Seconds for a message whose larger side (all blocks of a rank) is `nbytes`."""
    blocks = schedule.nranks if schedule.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1
    s = stats(schedule, None, max(4, nbytes // blocks // 4 * 4))
    if schedule.steps == 0:
        return 0.0
    host = np.asarray(hosts or (0,) * schedule.nranks)
    step_of = np.array([e.step for e in schedule.edges])
    # Bytes that leave or enter a host share its interface; inside a host a rank copies for itself.
    far = (host[s.edge_src] != host[s.edge_dst]) | ((not hosts) & speed.remote)
    wire = np.zeros((2, schedule.steps, schedule.nranks if not hosts else int(host.max()) + 1))
    ends = (host[s.edge_src], host[s.edge_dst]) if hosts else (s.edge_src, s.edge_dst)
    for side, end in zip(wire, ends, strict=True):
        np.add.at(side, (step_of[far], end[far]), s.edge_bytes[far])
    copies = np.zeros((schedule.steps, schedule.nranks))
    np.add.at(copies, (step_of, s.edge_dst), s.edge_bytes)
    lanes = schedule.pipeline
    messages = np.maximum(s.send_degree, s.recv_degree).max(axis=1)
    busiest = np.maximum(wire.max(axis=(0, 2)) * speed.beta, copies.max(axis=1) * speed.copy_beta)
    step = speed.alpha + MESSAGE_S * messages + busiest / lanes
    in_steps = float(step.sum() if lanes == 1 else (schedule.steps + lanes - 1) * step.max())
    # The ranks of a host share its cores: the work of all of them, however it is pipelined, takes its time.
    share = min(1.0, speed.local_ranks / schedule.nranks)
    work = float(s.recv_bytes.sum()) * share * speed.copy_beta / min(speed.cores, speed.local_ranks)
    return max(in_steps, schedule.steps * speed.alpha + work)


def why_not(name: str, nranks: int, hosts: Sequence[int] = ()) -> str | None:
    """Why a candidate can't be used over `nranks` ranks on these hosts (see `estimates`); None if it can."""
    if name == "hierarchical" and not 1 < len(set(hosts)) < nranks:
        return "it needs several hosts with several ranks"
    return None


def estimates(kind: Kind, nranks: int, nbytes: int, speed: Speed, root: int | None = None, perm: Perm | None = None,
              hosts: tuple[int, ...] = ()) -> list[Estimate]:  # fmt: skip
    """All candidates with their predicted times. `hosts`: the host of every rank; empty: unknown or one."""
    rows: list[Estimate] = []
    for name in CANDIDATES[kind]:
        why = why_not(name, nranks, hosts)
        if why is not None:
            rows.append(Estimate(name, None, why))
            continue
        schedule = make(name, kind, nranks, root, perm, is_large(nbytes), hosts)
        rows.append(Estimate(name, predict(schedule, nbytes, speed, hosts)))
    return rows


def best(rows: Sequence[Estimate]) -> Estimate:
    """The quickest candidate; the first of equals."""
    usable = [r for r in rows if r.seconds is not None]
    if not usable:
        raise ScheduleError("no schedule fits: " + "; ".join(f"{r.name}: {r.reason}" for r in rows))
    return min(usable, key=lambda r: (r.seconds or 0.0, rows.index(r)))
