"""The record's layout, the store, the exporters."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import threading

import numpy as np
import pytest

from jaxcoll import telemetry
from jaxcoll.errors import UsageError
from jaxcoll.telemetry import RECEIVER, SENDER


def make(**fields: int) -> telemetry.Record:
    base = dict.fromkeys(telemetry.RECORD_DTYPE.names, 0) | {"bytes": 1000, "transfer_ns": 1000, "start_ns": 10}
    return telemetry.Record(**(base | fields))


def test_layout_is_the_native_one() -> None:
    offsets = {name: telemetry.RECORD_DTYPE.fields[name][1] for name in telemetry.RECORD_DTYPE.names}
    assert telemetry.RECORD_DTYPE.itemsize == 80
    assert offsets == {
        "comm": 0, "launch": 8, "site": 16, "start_ns": 24, "transfer_ns": 32, "wait_ns": 40, "bytes": 48,
        "index": 56, "version": 60, "program": 64, "graph": 68, "step": 70, "src": 72, "dst": 74, "side": 76,
    }  # fmt: skip
    assert telemetry.RECORD_DTYPE["launch"] == np.dtype("<i8")


def test_bytes_round_trip_and_a_cut_buffer_is_told() -> None:
    records = telemetry.from_records([make(launch=-3, site=2**63, src=4, dst=5)])
    again = telemetry.as_records(records.tobytes())
    assert telemetry.to_record(again[0]) == telemetry.to_record(records[0])
    with pytest.raises(UsageError, match="80-byte"):
        telemetry.as_records(records.tobytes()[:-1])


def test_joined_records_keep_their_layout() -> None:
    parts = [telemetry.from_records([make(dst=i)] * i) for i in range(4)]
    for joined in (telemetry.concatenate(parts), telemetry.concatenate([]), telemetry.concatenate(iter(parts[:1]))):
        assert joined.dtype == telemetry.RECORD_DTYPE
        assert joined.itemsize == telemetry.RECORD_SIZE
    assert telemetry.concatenate(parts)["dst"].tolist() == [1, 2, 2, 3, 3, 3]
    store = telemetry.Store()
    for part in (telemetry.from_records([make(step=0)]), telemetry.from_records([make(step=1)])):
        store.push(part)
    (epoch,) = store.take((0, 0), {0: 2})
    for records in (epoch.records, epoch.receiver):
        # What is sent on or logged is read back as whole records.
        assert telemetry.as_records(records.tobytes())["step"].tolist() == [0, 1]


def test_epochs_are_cut_by_site_launch_and_index() -> None:
    rows = [
        make(site=2**63 + s, launch=n, index=i, start_ns=100 - n, src=k)
        for s in (0, 1)
        for n in (0, 1)
        for i in (0, 1)
        for k in (0, 1)
    ]
    epochs = telemetry.group_epochs(telemetry.from_records(rows))
    assert len(epochs) == 8
    assert all(len(epoch.records) == 2 for epoch in epochs)
    assert epochs[0].id[2] == 1, "the epoch that started first comes first"
    assert epochs[0].id[1] >= 2**63


def test_store_waits_for_all_edges_of_an_epoch() -> None:
    store = telemetry.Store()
    store.bind(7, 1, "set")
    store.push(telemetry.from_records([make(comm=7, site=1, dst=0), make(comm=7, site=1, dst=0, side=SENDER)]))
    assert store.take("set", {0: 2}) == []
    store.push(telemetry.from_records([make(comm=7, site=1, dst=1)]))
    (epoch,) = store.take("set", {0: 2})
    assert len(epoch.records) == 3
    assert len(epoch.receiver) == 2
    assert store.take("set", {0: 2}) == []


def test_store_counts_what_it_loses() -> None:
    store = telemetry.Store(patience=2)
    for index in range(10):
        store.push(telemetry.from_records([make(index=index), make(index=index, dst=1)]), dropped=1)
    assert store.counts().pushed == 20
    assert store.counts().dropped == 10
    store.push(telemetry.from_records([make(index=99), make(index=99, dst=1), make(index=99, dst=2)]))
    assert [epoch.id[3] for epoch in store.take((0, 0), {0: 3})] == [99]
    assert store.counts().incomplete == 16, "8 of the 10 epochs that lack an edge are given up, 2 may still come"
    assert vars(store.counts()).keys() == {"pushed", "dropped", "incomplete"}, "what was taken is not lost"


def test_store_takes_pushes_from_threads() -> None:
    store = telemetry.Store()

    def push(launch: int) -> None:
        for index in range(50):
            store.push(telemetry.from_records([make(launch=launch, index=index)]))

    threads = [threading.Thread(target=push, args=(launch,)) for launch in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.take((0, 0), {})) == 200


def test_jsonl_holds_every_field() -> None:
    records = telemetry.from_records([make(launch=-1, wait_ns=2**63), make(dst=3)])
    out = io.StringIO()
    telemetry.write_jsonl(out, records)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line.pop("type") for line in lines] == ["record"] * 2
    assert telemetry.from_records([telemetry.Record(**line) for line in lines]).tobytes() == records.tobytes()


def test_trace_shows_waiting_and_transfer_one_after_the_other() -> None:
    trace = telemetry.chrome_trace(telemetry.from_records([make(src=1, dst=2, start_ns=5000, wait_ns=2000)]))
    slices = [event for event in json.loads(json.dumps(trace))["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"], event["pid"]) for event in slices] == [
        ("wait 1->2", 0.0, 2.0, 2),
        ("1->2", 2.0, 1.0, 2),
    ]


def slices_of(trace: dict) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """(begin, end) of a trace's slices, microseconds, by process and thread."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    return found


def test_a_trace_has_no_slices_that_cross() -> None:
    # Two peers at once, one of them twice: a step's lanes still come when the next step has begun.
    rows = [make(src=s, dst=0, start_ns=t, wait_ns=1000, transfer_ns=4000) for s, t in ((1, 0), (2, 2000), (1, 4000))]
    rows += [make(src=1, dst=0, start_ns=5000), make(src=0, dst=1, side=SENDER | telemetry.UNSPLIT)]
    trace = telemetry.chrome_trace(telemetry.from_records(rows[::-1]))
    for slices in slices_of(trace).values():
        in_order = sorted(slices)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(in_order))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["graph 0, receive from 1", "graph 0, receive from 1, lane 2", "graph 0, receive from 2",
                     "graph 0, send to 1"]  # fmt: skip


def test_a_trace_tells_communicators_apart() -> None:
    trace = telemetry.chrome_trace(telemetry.from_records([make(comm=c, src=1, dst=2) for c in (7, 9)]))
    assert len(slices_of(trace)) == 2
    events = {event["name"]: event for event in trace["traceEvents"] if event["pid"] == 5}
    assert events["process_name"]["args"] == {"name": "comm 0x9, rank 2"}
    assert events["1->2"]["args"]["comm"] == "0x9"


def test_a_trace_of_nothing_is_empty() -> None:
    assert telemetry.chrome_trace(telemetry.empty_records())["traceEvents"] == []


def test_prometheus_text() -> None:
    rows = [make(src=0, dst=1, bytes=2000, start_ns=0), make(src=1, dst=0, bytes=1000, start_ns=0)]
    text = telemetry.prometheus(telemetry.from_records(rows), 2, telemetry.Counts(pushed=2), collective="AllReduce")
    assert 'nccl_p2p_bus_bandwidth_gbs{comm="0x0",rank="0",peer="1"} 2\n' in text
    assert 'nccl_bus_bandwidth_gbs{comm="0x0",program="0",coll="AllReduce",n_ranks="2"} 1.5\n' in text
    assert "jaxcoll_telemetry_records_pushed_total 2\n" in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


def test_prometheus_metrics_mean_what_a_sample_of_the_executions_can_tell() -> None:
    rows = [make(src=0, dst=1, launch=n, bytes=1000, wait_ns=9000 * n) for n in range(3)]
    rows += [make(src=1, dst=0, launch=n, bytes=1000) for n in range(2)]
    text = telemetry.prometheus(telemetry.from_records(rows), 2)
    assert "# TYPE jaxcoll_edge_bytes gauge\n" in text
    assert 'jaxcoll_edge_bytes{comm="0x0",rank="0",peer="1"} 1000\n' in text
    assert 'jaxcoll_edge_bytes{comm="0x0",rank="1",peer="0"} 666.666667\n' in text
    counters = [line for line in text.splitlines() if line.endswith(" counter") or "_total" in line]
    assert counters == [], "they would only count what was recorded"
    (time,) = [line for line in text.splitlines() if line.startswith("# HELP nccl_collective_exec_time")]
    assert "without the waiting for late ranks" in time


def test_prometheus_tells_communicators_and_sets_apart() -> None:
    rows = [make(comm=c, src=0, dst=1, transfer_ns=1000 * c) for c in (1, 2)]
    text = telemetry.prometheus(telemetry.from_records(rows), 2, key='up to "4M"')
    for comm, speed in (("0x1", "1"), ("0x2", "0.5")):
        assert f'gbs{{set="up to \\"4M\\"",comm="{comm}",rank="0",peer="1"}} {speed}\n' in text
        assert f'wait_us{{set="up to \\"4M\\"",comm="{comm}",rank="1",peer="0"}} 0\n' in text
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(series) == len(set(series)) == 3 * 2 + 2 * 2


def test_matrix_holds_medians_of_receivers() -> None:
    rows = [make(src=0, dst=1, transfer_ns=t) for t in (1000, 2000, 4000)] + [
        make(src=0, dst=1, side=SENDER, transfer_ns=9)
    ]
    matrix = telemetry.measurement_matrix(telemetry.from_records(rows), 2)
    assert matrix.throughput[0, 1] == pytest.approx(0.5e9)
    assert matrix.count[0, 1] == 3
    assert np.isnan(matrix.throughput[1, 0])
    with pytest.raises(UsageError, match="rank 1"):
        telemetry.measurement_matrix(telemetry.from_records(rows), 1)


def test_what_was_not_timed_is_left_out() -> None:
    rows = [make(src=0, dst=1, transfer_ns=t, wait_ns=7) for t in (0, 0, 0, 2000)] + [make(src=1, dst=0, transfer_ns=0)]
    records = telemetry.from_records(rows)
    matrix = telemetry.measurement_matrix(records, 2)
    assert matrix.throughput[0, 1] == pytest.approx(0.5e9)
    assert matrix.transfer_ns[0, 1] == 2000
    assert matrix.count[0, 1] == 4
    assert matrix.bytes[0, 1] == 4000
    assert np.isnan(matrix.throughput[1, 0])
    assert matrix.wait_ns[0, 1] == 7
    assert np.isnan(rows[0].throughput)
    text = telemetry.prometheus(records, 2)
    assert 'nccl_p2p_bus_bandwidth_gbs{comm="0x0",rank="0",peer="1"} 0.5\n' in text
    assert 'bandwidth_gbs{comm="0x0",rank="1"' not in text
    assert 'jaxcoll_edge_bytes{comm="0x0",rank="1",peer="0"} 1000\n' in text
    assert "nan" not in text


def test_untimed_links_are_neither_slow_nor_usual() -> None:
    rows = [row for launch in range(6) for row in exchange(5, {}, {(1, 2): 3.0}, launch)]
    rows = [dataclasses.replace(row, transfer_ns=0) if row.src in (0, 3) else row for row in rows]
    found = telemetry.diagnose(telemetry.from_records(rows), 5)
    assert [(link.src, link.dst) for link in found.links] == [(1, 2)]
    assert not found.hosts
    assert not found.stragglers


def exchange(
    n: int, late: dict[int, int], slow: dict[tuple[int, int], float], launch: int = 0
) -> list[telemetry.Record]:
    """Everybody sends to everybody at once; rank r comes late[r] ns late, pair (a, b) is slow by a factor."""
    rows = []
    for a in range(n):
        for b in range(n):
            if a != b:
                behind = late.get(a, 0) - late.get(b, 0)
                took = int(4_000_000 * slow.get((a, b), 1.0))
                common = {"src": a, "dst": b, "bytes": 4_000_000, "transfer_ns": took, "launch": launch}
                rows.append(make(**common, side=RECEIVER, start_ns=late.get(b, 0), wait_ns=max(0, behind)))
                rows.append(make(**common, side=SENDER, start_ns=late.get(a, 0), wait_ns=max(0, -behind)))
    return rows


def test_a_late_rank_is_no_slow_link() -> None:
    rows = [row for launch in range(6) for row in exchange(5, {3: 50_000_000}, {}, launch)]
    found = telemetry.diagnose(telemetry.from_records(rows), 5)
    assert [straggler.rank for straggler in found.stragglers] == [3]
    assert found.stragglers[0].late_ns == pytest.approx(50e6, rel=0.05)
    assert not found.links
    assert not found.hosts
    seconds = telemetry.epoch_seconds(
        telemetry.group_epochs(telemetry.from_records(exchange(5, {3: 50_000_000}, {})))[0]
    )
    assert seconds == pytest.approx(0.004, rel=0.01), "the collective's own time has no lateness in it"


def test_of_two_ranks_the_late_one_is_late_in_full() -> None:
    rows = [row for launch in range(6) for row in exchange(2, {1: 50_000_000}, {}, launch)]
    (straggler,) = telemetry.diagnose(telemetry.from_records(rows), 2).stragglers
    assert (straggler.rank, straggler.late_ns) == (1, pytest.approx(50e6, rel=0.05))
    assert telemetry.behind(np.array([0.1])).tolist() == [0.0]
    assert telemetry.behind(np.array([[0.3, 0.0, 0.1]])).tolist() == [pytest.approx([0.25, -0.2, -0.05])]


def test_nobody_is_waited_for_by_what_carries_nothing() -> None:
    empty = [make(src=3, dst=b, bytes=0, transfer_ns=0, side=RECEIVER) for b in (0, 1, 2)]
    records = telemetry.from_records([*exchange(4, {3: 50_000_000}, {}), *empty])
    late = telemetry.lateness(telemetry.group_epochs(records)[0], 4)
    assert late[3] == pytest.approx(50e6, rel=0.05)


def test_a_wait_that_holds_the_transfer_is_no_lateness() -> None:
    # Nobody could time what rank 0 sends: a record says only that it took so long until all was there.
    rows = [
        make(src=0, dst=b, bytes=48_000, transfer_ns=0, wait_ns=2_000_000 * b, launch=launch, side=RECEIVER)
        for launch in range(6)
        for b in range(1, 8)
    ]
    records = telemetry.from_records(rows)
    assert telemetry.diagnose(records, 8).stragglers == ()
    (epoch, *_) = telemetry.group_epochs(records)
    assert telemetry.epoch_seconds(epoch) == pytest.approx(0.014)


def test_an_epoch_is_as_long_whatever_the_hosts_clocks_say() -> None:
    rows = [make(src=a, dst=1 - a, start_ns=10**9, wait_ns=3_000, transfer_ns=2_000 + a, side=RECEIVER) for a in (0, 1)]
    apart = [rows[0], dataclasses.replace(rows[1], start_ns=10**9 + 20_000_000)]
    for records in map(telemetry.from_records, (rows, apart)):
        (epoch,) = telemetry.group_epochs(records)
        assert epoch.span_ns == 5_001


def test_a_slow_link_is_no_late_rank() -> None:
    rows = [row for launch in range(6) for row in exchange(5, {}, {(1, 4): 3.0}, launch)]
    found = telemetry.diagnose(telemetry.from_records(rows), 5)
    assert not found.stragglers
    assert not found.hosts
    assert [(link.src, link.dst) for link in found.links] == [(1, 4)]
    assert found.links[0].throughput == pytest.approx(1e9 / 3, rel=0.01)


@pytest.mark.parametrize("direction", ["outgoing", "incoming"])
def test_a_host_direction_is_told(direction: str) -> None:
    slow = {((2, b) if direction == "outgoing" else (b, 2)): 2.0 for b in range(5) if b != 2}
    found = telemetry.diagnose(telemetry.from_records(exchange(5, {}, slow)), 5)
    assert [(host.host, host.direction) for host in found.hosts] == [(2, direction)]
    assert not found.links
    assert found.lines() == [f"host 2: its {direction} direction is slow: 0.50 GB/s against 1.00 GB/s"]


def hosts_of_three(hosts: int, slow: dict[tuple[int, int], float]) -> telemetry.Diagnosis:
    """What is said of hosts with three ranks each, inside which all goes a hundred times as fast."""
    n = 3 * hosts
    inner = {(a, b): 0.01 for a in range(n) for b in range(n) if a // 3 == b // 3}
    pace = {pair: inner.get(pair, 1.0) * slow.get(pair, 1.0) for pair in inner | slow}
    return telemetry.diagnose(telemetry.from_records(exchange(n, {}, pace)), n, hosts=[r // 3 for r in range(n)])


def test_links_between_hosts_are_not_measured_by_those_inside_one() -> None:
    assert hosts_of_three(2, {}) == telemetry.Diagnosis()
    found = hosts_of_three(2, {(1, 5): 3.0, (3, 4): 2.0})
    assert found.lines() == [
        "link 1->5 is slow: 0.33 GB/s against 1.00 GB/s",
        "link 3->4 is slow: 50.00 GB/s against 100.00 GB/s",
    ]


def test_what_a_host_sends_says_nothing_of_its_memory() -> None:
    outgoing = {(a, b): 2.0 for a in (3, 4, 5) for b in (0, 1, 2, 6, 7, 8)}
    told = "host 1: its outgoing direction is slow: 0.50 GB/s against 1.00 GB/s"
    assert hosts_of_three(3, outgoing).lines() == [told]
    found = hosts_of_three(3, outgoing | {(3, 5): 2.0})
    assert found.lines() == [told, "link 3->5 is slow: 50.00 GB/s against 100.00 GB/s"]


def test_quiet_network_gives_no_finding() -> None:
    assert telemetry.diagnose(telemetry.from_records(exchange(6, {}, {})), 6) == telemetry.Diagnosis()
