"""Records for other programs: JSON lines, Chrome/Perfetto trace events, Prometheus text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np

from jaxcoll.telemetry.diagnose import epoch_seconds
from jaxcoll.telemetry.matrix import measurement_matrix
from jaxcoll.telemetry.record import FIELD_NAMES, RECEIVER, SENDER, Record, Records, to_record
from jaxcoll.telemetry.store import Counts, Epoch, group_epochs

_BYTES_TEXT = (
    "Bytes that rank sent to peer in an execution: mean over those recorded, maybe a sample of those that ran."
)
_TIME_TEXT = "Median time of a recorded execution, microseconds, without the waiting for late ranks."


def write_jsonl(out: TextIO, records: Records) -> None:
    """One JSON object a line, `{"type": "record", ...}` with the fields of `Record`."""
    for row in records:
        fields = {name: int(row[name]) for name in FIELD_NAMES}
        out.write(json.dumps({"type": "record", **fields}, separators=(",", ":")) + "\n")


def chrome_trace(records: Records) -> dict[str, Any]:
    """Trace events for chrome://tracing or ui.perfetto.dev: a process per communicator and rank, threads per graph,
    side and peer, as many as it takes for no two of a thread's edges to overlap.

    Waiting and transferring are two slices of one edge; times are microseconds since the first record.
    """
    edges = [to_record(row) for row in records[np.argsort(records["start_ns"], kind="stable")]]
    tracks = _tracks(edges)
    tids = {track: tid for tid, track in enumerate(sorted(set(tracks)))}
    pids = _pids(tids)
    origin = edges[0].start_ns if edges else 0
    events: list[dict[str, Any]] = []
    for track, edge in zip(tracks, edges, strict=True):
        begin, moving = edge.start_ns - origin, edge.start_ns + edge.wait_ns - origin
        common = {"ph": "X", "pid": pids[track.comm, track.rank], "tid": tids[track], "cat": "edge"}
        args = {"bytes": edge.bytes, "step": edge.step, "program": edge.program, "version": edge.version}
        args |= {"comm": f"{edge.comm:#x}", "site": f"{edge.site:#x}", "launch": edge.launch, "index": edge.index}
        name = f"{edge.src}->{edge.dst}"
        if edge.wait_ns:
            wait = {"name": f"wait {name}", "ts": begin / 1e3, "dur": edge.wait_ns / 1e3, "args": args}
            events.append({**common, **wait})
        events.append({**common, "name": name, "ts": moving / 1e3, "dur": edge.transfer_ns / 1e3, "args": args})
    for (comm, rank), pid in pids.items():
        name = f"comm {comm:#x}, rank {rank}"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
    for track, tid in tids.items():
        pid = pids[track.comm, track.rank]
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": str(track)}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Track(NamedTuple):
    """A thread of a trace; `lane` counts those of one rank, graph, side and peer."""

    comm: int
    rank: int
    graph: int
    side: int
    peer: int
    lane: int

    def __str__(self) -> str:
        way = "receive from" if self.side == RECEIVER else "send to"
        more = f", lane {self.lane + 1}" if self.lane else ""
        return f"graph {self.graph}, {way} {self.peer}{more}"


def _tracks(edges: Sequence[Record]) -> list[_Track]:
    """The track of each edge; they come in the order in which they start.

    An edge that starts before the last one of its graph, side and peer has ended gets a further lane.
    """
    ends: dict[tuple[int, ...], list[int]] = {}
    tracks: list[_Track] = []
    for edge in edges:
        side = edge.side & SENDER
        rank, peer = (edge.dst, edge.src) if side == RECEIVER else (edge.src, edge.dst)
        where = (edge.comm, rank, edge.graph, side, peer)
        taken = ends.setdefault(where, [])
        lane = next((i for i, end in enumerate(taken) if end <= edge.start_ns), len(taken))
        taken[lane : lane + 1] = [edge.start_ns + edge.wait_ns + edge.transfer_ns]
        tracks.append(_Track(*where, lane))
    return tracks


def _pids(tracks: Iterable[_Track]) -> dict[tuple[int, int], int]:
    """A trace's process id of each (communicator, rank): the rank itself where there is one communicator."""
    found = sorted({(track.comm, track.rank) for track in tracks})
    width = max((rank for _, rank in found), default=0) + 1
    first = {comm: i * width for i, comm in enumerate(sorted({comm for comm, _ in found}))}
    return {(comm, rank): first[comm] + rank for comm, rank in found}


def prometheus(
    records: Records, nranks: int, counts: Counts | None = None, collective: str = "unknown", key: str = ""
) -> str:
    """Prometheus text exposition; NCCL Inspector's metric names where the meaning is the same, `jaxcoll_` elsewhere.

    Args:
        key: of the schedule set that the records are of, for the label `set`: two sets of one communicator may run the
            same program between the same ranks.
    """
    lines: list[str] = []
    _pair_metrics(lines, records, nranks, key)
    _collective_metrics(lines, records, nranks, collective, key)
    if counts is not None:
        for name, value in vars(counts).items():
            text = f"Telemetry records {name}."
            _metric(lines, f"jaxcoll_telemetry_records_{name}_total", "counter", text, [("", float(value))])
    return "\n".join(lines) + "\n"


def _pair_metrics(lines: list[str], records: Records, nranks: int, key: str) -> None:
    speeds: list[tuple[str, float]] = []
    waits: list[tuple[str, float]] = []
    volume: list[tuple[str, float]] = []
    for comm in np.unique(records["comm"]).tolist():
        rows = records[records["comm"] == comm]
        matrix, executions = measurement_matrix(rows, nranks), len(group_epochs(rows))
        where = {"set": key, "comm": f"{comm:#x}"}
        for a, b in np.argwhere(matrix.count).tolist():
            sent, received = _labels(**where, rank=a, peer=b), _labels(**where, rank=b, peer=a)
            if not np.isnan(matrix.throughput[a, b]):
                speeds.append((sent, matrix.throughput[a, b] / 1e9))
            waits.append((received, matrix.wait_ns[a, b] / 1e3))
            volume.append((sent, float(matrix.bytes[a, b]) / executions))
    _metric(lines, "nccl_p2p_bus_bandwidth_gbs", "gauge", "Median throughput of a pair of ranks, GB/s.", speeds)
    _metric(lines, "jaxcoll_wait_us", "gauge", "Median time that rank waited for peer, microseconds.", waits)
    _metric(lines, "jaxcoll_edge_bytes", "gauge", _BYTES_TEXT, volume)


def _collective_metrics(lines: list[str], records: Records, nranks: int, collective: str, key: str) -> None:
    by_program: dict[tuple[int, int], list[Epoch]] = {}
    for epoch in group_epochs(records):
        by_program.setdefault((epoch.id[0], epoch.program), []).append(epoch)
    times: list[tuple[str, float]] = []
    speeds: list[tuple[str, float]] = []
    for (comm, program), epochs in sorted(by_program.items()):
        labels = _labels(set=key, comm=f"{comm:#x}", program=program, coll=collective, n_ranks=nranks)
        seconds = float(np.median([epoch_seconds(epoch) for epoch in epochs]))
        received = float(np.median([int(epoch.receiver["bytes"].sum()) for epoch in epochs])) / max(1, nranks)
        times.append((labels, seconds * 1e6))
        speeds.append((labels, received / seconds / 1e9 if seconds else 0.0))
    _metric(lines, "nccl_collective_exec_time_microseconds", "gauge", _TIME_TEXT, times)
    _metric(lines, "nccl_bus_bandwidth_gbs", "gauge", "Bytes that a rank received, by that time, GB/s.", speeds)


def _labels(**labels: object) -> str:
    texts = {name: str(value) for name, value in labels.items()}
    # To Prometheus an empty label is none.
    return "{" + ",".join(f'{name}="{_escape(text)}"' for name, text in texts.items() if text) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _metric(lines: list[str], name: str, kind: str, text: str, values: Iterable[tuple[str, float]]) -> None:
    lines.append(f"# HELP {name} {text}")
    lines.append(f"# TYPE {name} {kind}")
    lines.extend(f"{name}{labels} {value:.9g}" for labels, value in values)
