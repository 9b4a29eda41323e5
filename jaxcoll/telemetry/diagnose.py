"""Who is slow: a late rank, a link between two ranks, or all that one host sends or receives.

`transfer_ns` and `wait_ns` are kept apart by both ends of an edge, so no common clock is needed: a late rank makes its
peers wait and leaves transfers alone, a slow link makes transfers long and nobody wait at the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxcoll.telemetry.matrix import measurement_matrix
from jaxcoll.telemetry.record import RECEIVER, SENDER, Records
from jaxcoll.telemetry.store import Epoch, group_epochs

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Straggler:
    """Rank `rank` came `late_ns` (median) after its peers, in `share` of the epochs."""

    rank: int
    late_ns: int
    share: float

    def text(self) -> str:
        """One line for a log."""
        return (
            f"rank {self.rank} is late: {self.late_ns / 1e6:.1f} ms behind its peers in {self.share:.0%} of the epochs"
        )


@dataclasses.dataclass(frozen=True)
class SlowLink:
    """The link `src` -> `dst` moves `throughput` bytes/s where its likes move `usual`."""

    src: int
    dst: int
    throughput: float
    usual: float

    def text(self) -> str:
        """One line for a log."""
        return f"link {self.src}->{self.dst} is slow: {_rate(self.throughput)} against {_rate(self.usual)}"


@dataclasses.dataclass(frozen=True)
class SlowHost:
    """All links of `host` in one direction ("outgoing" or "incoming") are slow: the host's own side is the cause."""

    host: int
    direction: str
    throughput: float
    usual: float

    def text(self) -> str:
        """One line for a log."""
        usual = _rate(self.usual)
        return f"host {self.host}: its {self.direction} direction is slow: {_rate(self.throughput)} against {usual}"


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What the records blame; empty tuples where all is well."""

    stragglers: tuple[Straggler, ...] = ()
    hosts: tuple[SlowHost, ...] = ()
    links: tuple[SlowLink, ...] = ()

    def lines(self) -> list[str]:
        """One line for each finding."""
        return [finding.text() for finding in (*self.stragglers, *self.hosts, *self.links)]


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s" if value >= 1e8 else f"{value / 1e6:.2f} MB/s"


def lateness(epoch: Epoch, nranks: int) -> npt.NDArray[np.int64]:
    """How long after its peers each rank came to this epoch, ns, shape [nranks]; 0 where nothing shows it.

    Two signals are free of what went before: a receiver's wait on an edge whose sender depends on
    nothing received before (the least counts: the others may have queued behind it), and a sender's wait for its
    receiver (the longest counts: later edges find both ends there). Then the median over the peers, so that one odd
    peer decides nothing. The wait for an edge that nobody could time holds its transfer, so it shows nothing.
    """
    first: dict[tuple[int, int], int] = {}
    longest: dict[tuple[int, int], int] = {}
    rows = epoch.records[epoch.records["bytes"] > 0]  # nobody waits for what carries nothing
    first_receive = _first_receive(rows)
    columns = (rows[name].tolist() for name in ("src", "dst", "wait_ns", "transfer_ns", "side", "step", "graph"))
    for src, dst, wait, timed, side, step, graph in zip(*columns, strict=True):
        if side == SENDER:
            longest[dst, src] = max(longest.get((dst, src), 0), wait)
        elif timed and step <= first_receive.get((graph, src), 1 << 30):
            first[src, dst] = min(first.get((src, dst), wait), wait)
    signals: list[list[int]] = [[] for _ in range(nranks)]
    for rank, peer in first.keys() | longest.keys():
        signals[rank].append(max(first.get((rank, peer), 0), longest.get((rank, peer), 0)))
    return np.array([int(np.median(seen)) if seen else 0 for seen in signals], np.int64)


def behind(late: npt.NDArray[np.floating | np.integer]) -> Floats:
    """How much later each rank is than the middle of all others, by the last axis; 0 where it is the only one."""
    n = late.shape[-1]
    if n < 2:
        return np.zeros(late.shape)
    return np.stack([late[..., r] - np.median(np.delete(late, r, axis=-1), axis=-1) for r in range(n)], axis=-1)


def _first_receive(records: Records) -> dict[tuple[int, int], int]:
    """The step of the first edge into each rank, by (graph, rank)."""
    first: dict[tuple[int, int], int] = {}
    rows = records[records["side"] == RECEIVER]
    for graph, dst, step in zip(*(rows[name].tolist() for name in ("graph", "dst", "step")), strict=True):
        first[graph, dst] = min(first.get((graph, dst), step), step)
    return first


def epoch_seconds(epoch: Epoch) -> float:
    """Seconds that this execution took, told from the receivers' own clocks; waiting for a late rank is taken out.

    A rank's time runs from when it was ready until its last byte came; what the latest rank came later than this one is
    taken off. The slowest rank counts.
    """
    rows = epoch.receiver
    if not len(rows):
        return 0.0
    nranks = int(max(rows["src"].max(), rows["dst"].max())) + 1
    late = lateness(epoch, nranks)
    took = epoch.spans_ns(nranks) - (late.max() - late)
    return max(int(took.max()), 0) / 1e9


def find_stragglers(
    epochs: Sequence[Epoch], nranks: int, least_ns: int = 1_000_000, factor: float = 0.25, share: float = 0.5
) -> tuple[Straggler, ...]:
    """Ranks late by `least_ns` and by `factor` of the median transfer time, in at least `share` of the epochs."""
    if not epochs:
        return ()
    late = np.stack([lateness(epoch, nranks) for epoch in epochs])
    transfers = np.concatenate([epoch.receiver["transfer_ns"] for epoch in epochs])
    timed = transfers[transfers > 0]
    usual = np.median(timed) if len(timed) else 0
    # Lateness is relative: where everybody waits a little for everybody, nobody is late.
    relative = behind(late)
    hit = relative >= max(least_ns, factor * float(usual))
    found = [r for r in range(nranks) if hit[:, r].mean() >= share]
    return tuple(
        Straggler(r, int(np.median(relative[hit[:, r], r])), float(hit[:, r].mean()))
        for r in sorted(found, key=lambda r: -float(np.median(relative[:, r])))
    )


def diagnose(
    records: Records, nranks: int, drop: float = 0.2, hosts: Sequence[int] | None = None, least_late_ns: int = 1_000_000
) -> Diagnosis:
    """Stragglers, slow hosts by direction, and single slow links in `records`.

    Args:
        drop: how far below the usual throughput of its likes (links between hosts, or links inside one) counts as slow.
        hosts: host of each rank; default: every rank is a host.
    """
    stragglers = find_stragglers(group_epochs(records), nranks, least_late_ns)
    host_of = np.arange(nranks) if hosts is None else np.asarray(hosts)
    throughput = measurement_matrix(records, nranks).throughput
    usual = _usual(throughput, host_of)
    slow = throughput < usual * (1 - drop)  # nothing is slow that nobody could time: NaN is less than nothing
    slow_hosts = _slow_hosts(throughput, usual, slow, host_of)
    single = slow.copy()
    for found in slow_hosts:
        single &= ~_mask((found.host, found.direction), host_of)
    links = tuple(
        SlowLink(int(a), int(b), float(throughput[a, b]), float(usual[a, b]))
        for a, b in zip(*np.nonzero(single), strict=True)
    )
    return Diagnosis(stragglers, slow_hosts, links)


def _across(host_of: npt.NDArray[np.int64]) -> Bools:
    """Pairs of ranks on two hosts, [nranks, nranks]."""
    return host_of[:, None] != host_of[None, :]


def _usual(throughput: Floats, host_of: npt.NDArray[np.int64]) -> Floats:
    """What the likes of each pair move, bytes/s, [nranks, nranks]: memory is no measure of a network."""
    across = _across(host_of)
    usual = np.zeros_like(throughput)
    for likes in (across, ~across):
        seen = throughput[likes & ~np.isnan(throughput)]
        # The upper quartile: a pattern in which half of the flows cross a bad place still shows what the good ones do.
        usual[likes] = np.percentile(seen, 75) if len(seen) else 0.0
    return usual


def _slow_hosts(throughput: Floats, usual: Floats, slow: Bools, host_of: npt.NDArray[np.int64]) -> tuple[SlowHost, ...]:
    seen = ~np.isnan(throughput)
    unexplained = slow & _across(host_of)
    found: list[SlowHost] = []
    while unexplained.any():
        best = max(_directions(host_of), key=lambda where: _evidence(where, slow, seen, unexplained, host_of))
        evidence = _evidence(best, slow, seen, unexplained, host_of)
        if evidence[0] <= 0:
            break
        mask = _mask(best, host_of)
        here = mask & slow
        found.append(SlowHost(best[0], best[1], float(np.median(throughput[here])), float(np.median(usual[here]))))
        unexplained &= ~mask
    return tuple(found)


def _directions(host_of: npt.NDArray[np.int64]) -> list[tuple[int, str]]:
    return [(int(h), direction) for h in np.unique(host_of) for direction in ("incoming", "outgoing")]


def _mask(where: tuple[int, str], host_of: npt.NDArray[np.int64]) -> Bools:
    at_host = host_of == where[0]
    mask = at_host[:, None] if where[1] == "outgoing" else at_host[None, :]
    return mask & _across(host_of)


def _evidence(
    where: tuple[int, str],
    slow: Bools,
    seen: Bools,
    unexplained: Bools,
    host_of: npt.NDArray[np.int64],
) -> tuple[float, float]:
    """(slow links newly explained, slow share of the direction); no evidence below two links or 3/4."""
    mask = _mask(where, host_of)
    total = int((mask & seen).sum())
    share = float((mask & slow).sum()) / total if total else 0.0
    new = int((mask & unexplained).sum())
    return (float(new), share) if new >= 2 and share >= 0.75 else (0.0, share)
