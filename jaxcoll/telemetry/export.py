"""Records for other programs: JSON lines, Chrome/Perfetto trace events, Prometheus text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TextIO

import numpy as np

from jaxcoll.telemetry.diagnose import epoch_seconds
from jaxcoll.telemetry.matrix import measurement_matrix
from jaxcoll.telemetry.record import FIELD_NAMES, RECEIVER, Records, to_record
from jaxcoll.telemetry.store import Counts, Epoch, group_epochs


def write_jsonl(out: TextIO, records: Records) -> None:
    """One JSON object a line, `{"type": "record", ...}` with the fields of `Record`."""
    for row in records:
        fields = {name: int(row[name]) for name in FIELD_NAMES}
        out.write(json.dumps({"type": "record", **fields}, separators=(",", ":")) + "\n")


def chrome_trace(records: Records) -> dict[str, Any]:
    """Trace events for chrome://tracing or ui.perfetto.dev: a process per rank, a thread per graph and side.

    Waiting and transferring are two slices of one edge; times are microseconds since the first record.
    """
    events: list[dict[str, Any]] = []
    origin = int(records["start_ns"].min()) if len(records) else 0
    tracks: set[tuple[int, int]] = set()
    for record in map(to_record, records):
        rank = record.dst if record.side == RECEIVER else record.src
        track = record.graph * 2 + record.side
        tracks.add((rank, track))
        begin = (record.start_ns - origin) / 1e3
        common = {"ph": "X", "pid": rank, "tid": track, "cat": "edge"}
        args = {"bytes": record.bytes, "step": record.step, "program": record.program, "version": record.version}
        args |= {"launch": record.launch, "index": record.index, "site": f"{record.site:#x}"}
        name = f"{record.src}->{record.dst}"
        if record.wait_ns:
            events.append({**common, "name": f"wait {name}", "ts": begin, "dur": record.wait_ns / 1e3, "args": args})
        start = begin + record.wait_ns / 1e3
        events.append({**common, "name": name, "ts": start, "dur": record.transfer_ns / 1e3, "args": args})
    for rank in sorted({rank for rank, _ in tracks}):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
    for rank, track in sorted(tracks):
        name = f"graph {track // 2} {'receive' if track % 2 == RECEIVER else 'send'}"
        events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


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
        matrix = measurement_matrix(records[records["comm"] == comm], nranks)
        where = {"set": key, "comm": f"{comm:#x}"}
        for a, b in np.argwhere(matrix.count).tolist():
            sent, received = _labels(**where, rank=a, peer=b), _labels(**where, rank=b, peer=a)
            if not np.isnan(matrix.throughput[a, b]):
                speeds.append((sent, matrix.throughput[a, b] / 1e9))
            waits.append((received, matrix.wait_ns[a, b] / 1e3))
            volume.append((sent, float(matrix.bytes[a, b])))
    _metric(lines, "nccl_p2p_bus_bandwidth_gbs", "gauge", "Median throughput of a pair of ranks, GB/s.", speeds)
    _metric(lines, "jaxcoll_wait_us", "gauge", "Median time that rank waited for peer, microseconds.", waits)
    _metric(lines, "jaxcoll_edge_bytes_total", "counter", "Bytes that rank sent to peer.", volume)


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
    _metric(lines, "nccl_collective_exec_time_microseconds", "gauge", "Median time of an execution.", times)
    _metric(lines, "nccl_bus_bandwidth_gbs", "gauge", "Bytes that a rank received, by time, GB/s.", speeds)


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
