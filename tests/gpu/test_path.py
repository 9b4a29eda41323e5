"""What an execution costs on the host, what swaps cost, and what the records say."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from jaxcoll.schedule import Kind, Table, build
from jaxcoll.telemetry import RECEIVER, SENDER, UNSPLIT, find_stragglers, group_epochs, split_waits

from .harness import Gpu, Team, on_threads, standin

pytestmark = pytest.mark.timeout(120)

# All that may be called while an execution is enqueued: none of these waits for the device.
ENQUEUE = {
    "cudaGetDevice", "cudaSetDevice", "cudaStreamWaitEvent", "cudaEventRecord", "cudaMallocAsync", "cudaFreeAsync",
    "cudaMemcpyAsync", "cudaMemsetAsync", "cuLaunchKernel", "ncclGroupStart", "ncclGroupEnd", "ncclSend", "ncclRecv",
}  # fmt: skip
MONITOR = {"cudaEventQuery", "cudaEventElapsedTime", "ncclCommGetAsyncError"}


def host_calls(pairs: bool) -> dict[str, int]:
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8)
    values = [np.ones(4096, np.float32)] * 8
    with Gpu() as gpu:
        team = gpu.team(8, pairs=pairs)
        program, _ = team.program(schedule)
        team.run(schedule, values, program=program)  # streams, events and kernels are made by the first
        standin().lib.standin_reset(1)
        team.run(schedule, values, program=program)
        return standin().calls()


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "groups"])
def test_host_calls_of_a_dual_tree(pairs: bool):
    calls = host_calls(pairs)
    assert set(calls) <= ENQUEUE | MONITOR, sorted(set(calls) - ENQUEUE - MONITOR)
    # 2 trees of 7 edges each, up and down again: every edge is one send and one receive.
    assert calls["ncclSend"] == calls["ncclRecv"] == 28
    assert calls["cuLaunchKernel"] > 0
    assert "cudaEventCreateWithFlags" not in calls
    print({name: count for name, count in sorted(calls.items()) if name in ENQUEUE})


def test_recording_costs_one_event_an_edge():
    counts: dict[bool, int] = {}
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8)
    for record in (True, False):
        with Gpu() as gpu:
            team = gpu.team(8, record=record)
            program, _ = team.program(schedule)
            team.run(schedule, [np.ones(64, np.float32)] * 8, program=program)
            counts[record] = standin().calls()["cudaEventRecord"]
            assert (len(gpu.records()) > 0) == record
    assert counts[True] - counts[False] == 56  # both ends of 28 edges


def test_swaps_under_load():
    # Executions follow each other without a pause; the table changes between them and back. The pairs of a new table
    # are connected meanwhile by another thread.
    schedule = build("dual_tree", Kind.ALL_REDUCE, 6, pipeline=2)
    identity = Table.identity(schedule)
    tables = [identity, identity.swap_global(0, 4), identity.swap_graph(1, 2, 3)]
    rng = np.random.default_rng(11)
    with Gpu(seed=4) as gpu:
        team = gpu.team(6)
        handles = [team.program(schedule, identity)[0]]
        connected, fresh = threading.Event(), list[int]()

        def connect() -> None:
            for table in tables[1:]:
                handle, made = team.program(schedule, table)
                fresh.append(made)
                handles.append(handle)
            connected.set()

        background = threading.Thread(target=connect, daemon=True)
        values = rng.integers(-1000, 1000, (40, 6, 200)).astype(np.int32)
        runs = []
        background.start()
        for i in range(40):
            if i == 20:
                assert connected.wait(20), standin().stuck()
            program = handles[i % len(handles)]
            runs.append([team.enqueue(r, program, Kind.ALL_REDUCE, values[i, r], "sum", i) for r in range(6)])
        team.wait()
        background.join(10)
        assert len(handles) == 3
        assert sum(fresh) > 0
        for i, each in enumerate(runs):
            assert all(np.array_equal(run.result(), values[i].sum(axis=0, dtype=np.int32)) for run in each), i


def test_a_swap_back_makes_no_communicator():
    schedule = build("ring", Kind.ALL_REDUCE, 5)
    identity = Table.identity(schedule)
    with Gpu() as gpu:
        team = gpu.team(5)
        _, first = team.program(schedule, identity)
        assert first == 2 * 5  # both ends of every pair
        _, fresh = team.program(schedule, identity.swap_global(1, 3))
        assert 0 < fresh < first  # pairs that both tables use are there already
        before = standin().lib.standin_communicators()
        for table in (identity, identity.swap_global(1, 3), identity):
            program, made = team.program(schedule, table)
            assert made == 0
            team.run(schedule, [np.ones(10, np.float32)] * 5, program=program)
        assert standin().lib.standin_communicators() == before
        assert "nvrtcCompileProgram" in standin().calls()
        compiled = standin().calls()["nvrtcCompileProgram"]
        team.run(schedule, [np.ones(10, np.float32)] * 5, program=program)
        assert standin().calls()["nvrtcCompileProgram"] == compiled == 1


def test_records_of_every_edge():
    schedule = build("ring", Kind.ALL_REDUCE, 4, pipeline=2)
    with Gpu() as gpu:
        team = gpu.team(4)
        team.run(schedule, [np.ones(1000, np.float32)] * 4)
        records = gpu.records()
        assert (records["side"] & UNSPLIT).all()
        records = split_waits(records)
        edges = [(g, e.step, e.src, e.dst) for g, graph in enumerate(schedule.graphs) for e in graph.edges]
        for side in (RECEIVER, SENDER):
            rows = records[records["side"] == side]
            got = sorted(zip(*(rows[k].tolist() for k in ("graph", "step", "src", "dst")), strict=True))
            assert got == sorted(edges)
            assert rows["bytes"].sum() == 2 * 3 * 4000  # 2 (N - 1) / N of the vector, on each of N ranks
        assert (records["comm"] == team.id).all()


def test_a_slow_edge_shows_in_its_own_record():
    # Pairs: edges progress by themselves, so only the transfers of the slow pair take long at both of its ends.
    schedule = build("one_shot", Kind.ALL_REDUCE, 4)
    with Gpu() as gpu:
        team = gpu.team(4)
        program, _ = team.program(schedule)
        values = [np.ones(256, np.float32)] * 4
        team.run(schedule, values, program=program)
        gpu.records()
        standin().lib.standin_delay(2, 0, 60_000_000)
        team.run(schedule, values, program=program)
        records = split_waits(gpu.records())
        slow = (records["src"] == 2) & (records["dst"] == 0)
        assert (records["transfer_ns"][slow] >= 55_000_000).all()
        assert records["transfer_ns"][~slow].max() < 50_000_000


def test_a_late_rank_shows_as_waiting_and_not_as_a_slow_edge():
    schedule = build("one_shot", Kind.ALL_REDUCE, 4)
    values = [np.ones(256, np.float32)] * 4
    with Gpu() as gpu:
        team = gpu.team(4)
        program, _ = team.program(schedule)
        team.run(schedule, values, program=program)
        gpu.records()
        for rank in (0, 1, 3):
            team.enqueue(rank, program, Kind.ALL_REDUCE, values[rank], "sum", 50)
        time.sleep(0.06)
        team.enqueue(2, program, Kind.ALL_REDUCE, values[2], "sum", 50)
        team.wait()
        records = split_waits(gpu.records())
        at_peers = ((records["src"] == 2) & (records["side"] == RECEIVER)) | (
            (records["dst"] == 2) & (records["side"] == SENDER)
        )
        assert at_peers.sum() == 6
        assert (records["wait_ns"][at_peers] >= 50_000_000).all()
        assert records["wait_ns"][~at_peers].max() < 50_000_000
        assert records["transfer_ns"].max() < 50_000_000
        late = {s.rank: s.late_ns for s in find_stragglers(group_epochs(records), 4)}
        assert late.pop(2) >= 50_000_000
        assert all(ns < 50_000_000 for ns in late.values())  # ranks that waited for a core


def test_no_order_of_two_ranks_enqueueing_can_deadlock():
    # Rank threads run at their own pace through many executions with many streams on few.
    schedule = build("pairwise", Kind.ALL_TO_ALL, 6)
    rng = np.random.default_rng(1)
    values = rng.integers(0, 100, (10, 6, 60)).astype(np.int32)
    with Gpu(seed=6) as gpu:
        team = gpu.team(6, max_streams=2)
        program, _ = team.program(schedule)
        runs: list[list[object]] = [[] for _ in range(6)]

        def rank(r: int, team: Team = team) -> None:
            for i in range(10):
                runs[r].append(team.enqueue(r, program, Kind.ALL_TO_ALL, values[i, r], "none", i))

        assert not on_threads([lambda r=r: rank(r) for r in range(6)])
        team.wait()
        for r in range(6):
            for i, run in enumerate(runs[r]):
                want = values[i].reshape(6, 6, 10)[:, r].reshape(-1)
                assert np.array_equal(run.result(), want)  # type: ignore[attr-defined]
