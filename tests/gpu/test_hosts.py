"""Inside a host NCCL's own ReduceScatter and AllGather run; across hosts the edges stay edges, tuned and timed."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from native import cases

from jaxcoll.runtime.native import NativeError
from jaxcoll.schedule import Kind, Schedule, Table, build, verify
from jaxcoll.telemetry import RECEIVER, SENDER, TOGETHER, UNSPLIT, split_waits

from .harness import Gpu, clock, standin
from .test_path import ENQUEUE, MONITOR

pytestmark = pytest.mark.timeout(120)

INSIDE = {"ncclReduceScatter", "ncclAllGather"}
HOSTS = {
    4: [0, 0, 1, 1], 5: [0, 0, 1, 1, 1], 6: [0, 1, 2, 0, 1, 2], 7: [0, 0, 0, 1, 1, 1, 2], 8: [0, 0, 0, 0, 1, 1, 1, 1],
}  # fmt: skip


def groups(hosts: Sequence[int]) -> list[list[int]]:
    return [[r for r, h in enumerate(hosts) if h == host] for host in sorted(set(hosts))]


def hierarchical(kind: Kind, hosts: Sequence[int], **params: Any) -> Schedule:
    return build("hierarchical", kind, len(hosts), groups=groups(hosts), **params)


def close(case: cases.Case, got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> bool:
    """Equal to the bit, or, for sums and products of floats, but for the order of adding up: NCCL has its own."""
    if case.reduce in ("sum", "prod") and got.dtype.kind in "fc" and case.schedule.kind.reduces:
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        return bool(np.allclose(got, want, rtol=1e-5, atol=scale * 1e-5))
    return cases.same(got, want)


@pytest.mark.parametrize("n", sorted(HOSTS))
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "groups"])
def test_results(n: int, pairs: bool):
    types = (
        ("int32", "sum"), ("float32", "sum"), ("uint64", "prod"), ("complex64", "sum"), ("int8", "min"),
        ("bfloat16", "sum"), ("float32", "max"), ("int16", "sum"), ("float64", "prod"), ("bool", "max"),
    )  # fmt: skip
    turn = 0
    with Gpu(seed=n) as gpu:
        team = gpu.team(n, pairs=pairs, hosts=HOSTS[n])
        for kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER):
            for pipeline, count in ((1, 960), (1, 1001), (3, 7), (3, 4096)):
                program, _ = team.program(schedule := hierarchical(kind, HOSTS[n], pipeline=pipeline))
                for dtype, reduce in (types[(turn + i) % len(types)] for i in range(3)):
                    case = cases.Case(schedule, count, dtype, reduce)
                    inputs, want = cases.expected(case)
                    results = team.run(schedule, list(inputs), reduce, program=program)
                    wrong = [r for r in range(n) if not close(case, results[r], want[r])]
                    assert not wrong, f"{case}: {wrong}"
                turn += 1


def calls_of(hosts: Sequence[int] | None, kind: Kind, dtype: str, reduce: str, count: int = 8192) -> dict[str, int]:
    schedule = hierarchical(kind, hosts or HOSTS[8])
    values = [np.ones(count, np.dtype(dtype))] * len(hosts or HOSTS[8])
    with Gpu() as gpu:
        team = gpu.team(len(values), hosts=hosts)
        program, _ = team.program(schedule)
        team.run(schedule, values, reduce, program=program)
        standin().lib.standin_reset(1)
        team.run(schedule, values, reduce, program=program)
        calls = standin().calls()
    assert set(calls) <= ENQUEUE | MONITOR | INSIDE
    return {name: count for name, count in sorted(calls.items()) if name in ENQUEUE | INSIDE}


def test_host_calls_of_the_hierarchical_schedule():
    calls = calls_of(HOSTS[8], Kind.ALL_REDUCE, "float32", "sum")
    alone = calls_of(None, Kind.ALL_REDUCE, "float32", "sum")
    print(calls, alone, sep="\n")
    assert calls["ncclReduceScatter"] == calls["ncclAllGather"] == 8  # once a rank
    assert calls["ncclSend"] == calls["ncclRecv"] == 16  # a ring of two across hosts: two steps on 8 ranks
    assert alone["ncclSend"] == alone["ncclRecv"] == 16 + 2 * 48  # two phases of 24 edges of two chunks
    assert calls["cudaMemcpyAsync"] == alone["cudaMemcpyAsync"]  # the shares lie where NCCL wants them
    assert not INSIDE & set(alone)


@pytest.mark.parametrize(
    ("dtype", "reduce", "reduced"),
    [("float32", "max", False), ("float16", "sum", False), ("int16", "sum", False), ("int32", "max", True)],
)
def test_what_nccl_would_reduce_otherwise_goes_edge_by_edge(dtype: str, reduce: str, reduced: bool):
    calls = calls_of(HOSTS[8], Kind.ALL_REDUCE, dtype, reduce)
    assert calls["ncclAllGather"] == 8
    assert ("ncclReduceScatter" in calls) == reduced


def test_blocks_need_no_copy():
    # Kinds with a block for each rank: a call a row of neighbouring blocks, in one group.
    gathered = calls_of(HOSTS[8], Kind.ALL_GATHER, "float32", "none")
    assert gathered["ncclAllGather"] == 16  # two rows of four blocks on 8 ranks
    assert gathered["cudaMemcpyAsync"] == 8  # each rank's own block into its result
    scattered = calls_of(HOSTS[8], Kind.REDUCE_SCATTER, "float32", "sum")
    assert scattered["ncclReduceScatter"] == 16
    assert "cudaMemcpyAsync" not in scattered


def test_leaves_are_packed():
    schedule = hierarchical(Kind.ALL_REDUCE, HOSTS[4])
    case = cases.Case(schedule, 1001, "int32", "sum")
    inputs, want = cases.expected(case)
    with Gpu() as gpu:
        team = gpu.team(4, hosts=HOSTS[4])
        program, _ = team.program(schedule)
        for leaves in ([0, 3, 0, 900, 98, 0], [1] * 5 + [996], [1001, 0]):
            assert not cases.compare(case, team.run(schedule, list(inputs), program=program, leaves=leaves), want)
        assert standin().calls()["ncclReduceScatter"] >= 4 * 3


def test_records_say_that_edges_ran_together():
    schedule = hierarchical(Kind.ALL_REDUCE, HOSTS[8])
    host = HOSTS[8]
    with Gpu() as gpu:
        team = gpu.team(8, hosts=host)
        team.run(schedule, [np.ones(8192, np.float32)] * 8)
        raw = gpu.records()
        inside = np.array([host[r["src"]] == host[r["dst"]] for r in raw])
        assert (raw["side"] & UNSPLIT).all()
        assert ((raw["side"] & TOGETHER != 0) == inside).all()
        records = split_waits(raw)
        edges = sorted((g, e.step, e.src, e.dst) for g, graph in enumerate(schedule.graphs) for e in graph.edges)
        for side in (RECEIVER, SENDER):
            rows = records[records["side"] == side]
            assert sorted(zip(*(rows[k].tolist() for k in ("graph", "step", "src", "dst")), strict=True)) == edges
            # Inside: a quarter of the vector to each of three peers, twice; across: a quarter, once around two hosts.
            assert rows["bytes"].sum() == 8 * (2 * 3 * 8192 + 8192)


def test_a_slow_host_and_a_slow_edge_across():
    schedule = hierarchical(Kind.ALL_REDUCE, HOSTS[4])
    values = [np.ones(256, np.float32)] * 4
    with Gpu() as gpu:
        team = gpu.team(4, hosts=HOSTS[4])
        program, _ = team.program(schedule)
        team.run(schedule, values, program=program)
        for pair in ((2, 3), (2, 0)):
            gpu.records()
            standin().lib.standin_delay(*pair, 60_000_000)
            team.run(schedule, values, program=program)
            standin().lib.standin_delay(0, 0, 0)
            records = split_waits(gpu.records())
            # Inside a host the call is timed as one: its edges share what is slow.
            slow = np.isin(records["src"], pair) & np.isin(records["dst"], pair)
            if pair == (2, 0):
                slow &= records["src"] == 2
            assert slow.sum() == (8 if pair == (2, 3) else 4)  # both ends of four edges; of two
            assert (records["transfer_ns"][slow] >= 55_000_000).all()
            assert records["transfer_ns"][~slow].max() < 50_000_000


def test_swaps_under_load():
    hosts = HOSTS[8]
    schedule = hierarchical(Kind.ALL_REDUCE, hosts)
    identity = Table.identity(schedule)
    tables = [
        identity,
        identity.swap_global(1, 2),  # inside a host: still whole hosts, in another order
        identity.swap_global(3, 4),  # across: the in-host steps are no calls any more
        identity.swap_graph(0, 0, 4),  # the same for one slot
        functools.reduce(lambda t, r: t.swap_graph(0, r, r + 4), range(4), identity),  # hosts change places in one slot
        functools.reduce(lambda t, r: t.swap_global(r, r + 4), range(4), identity),  # and in all: the tuner's lever
        identity,
    ]
    rng = np.random.default_rng(3)
    values = rng.integers(-1000, 1000, (len(tables) * 4, 8, 640)).astype(np.int32)
    reduced: list[int] = []
    made: list[int] = []
    with Gpu(seed=5) as gpu:
        team = gpu.team(8, hosts=hosts)
        runs = []
        for i, table in enumerate(tables):
            program, fresh = team.program(schedule, table)
            made.append(fresh)
            before = standin().calls().get("ncclReduceScatter", 0)
            for k in range(4):
                launch = 100 + i * 4 + k
                runs.append([team.enqueue(r, program, Kind.ALL_REDUCE, values[i * 4 + k, r], "sum", launch)
                             for r in range(8)])  # fmt: skip
            reduced.append(standin().calls().get("ncclReduceScatter", 0) - before)
        team.wait()
        for value, each in zip(values, runs, strict=True):
            assert all(np.array_equal(run.result(), value.sum(axis=0, dtype=np.int32)) for run in each)
    assert reduced == [32, 32, 0, 0, 32, 32, 32]
    assert made[0] > 0
    assert made[-1] == 0


@pytest.mark.parametrize("seed", range(6))
def test_any_table(seed: int):
    rng = np.random.default_rng(seed)
    n = int(rng.choice([4, 6, 8]))
    kind = [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER][seed % 3]
    schedule = hierarchical(kind, HOSTS[n])
    case = cases.Case(schedule, 333, "int64", "sum")
    inputs, want = cases.expected(case)
    with Gpu(seed=seed) as gpu:
        team = gpu.team(n, hosts=HOSTS[n])
        table = Table.identity(schedule)
        for _ in range(5):
            a, b = (int(x) for x in rng.choice(n, 2, replace=False))
            changed = table.swap_global(a, b) if rng.random() < 0.5 else table.swap_graph(
                int(rng.integers(len(schedule.graphs))), a, b
            )  # fmt: skip
            if verify(schedule, changed):
                continue
            table = changed
            program, _ = team.program(schedule, table)
            assert not cases.compare(case, team.run(schedule, list(inputs), program=program), want)


def test_a_rank_that_never_comes():
    schedule = hierarchical(Kind.ALL_REDUCE, HOSTS[4])
    with Gpu() as gpu:
        team = gpu.team(4, timeout=0.3, hosts=HOSTS[4])
        program, _ = team.program(schedule)
        for rank in (0, 2, 3):
            team.enqueue(rank, program, Kind.ALL_REDUCE, np.ones(64, np.float32), "sum", 1)
        time.sleep(0.05)
        assert "device 0: a collective of rank 0" in standin().stuck()
        with pytest.raises(NativeError, match=r"rank 0 in team\d+ has not ended within 0\.3 s .*step 0, "
                                              r"ncclReduceScatter among ranks 0, 1 of a host, lane 0"):  # fmt: skip
            team.wait()
        again = gpu.team(4, hosts=HOSTS[4])
        assert all((r == 4).all() for r in again.run(schedule, [np.ones(64, np.float32)] * 4))


def test_a_device_that_breaks():
    schedule = hierarchical(Kind.ALL_REDUCE, HOSTS[4])
    with Gpu() as gpu:
        team = gpu.team(4, hosts=HOSTS[4])
        program, _ = team.program(schedule)
        team.enqueue(0, program, Kind.ALL_REDUCE, np.ones(64, np.float32), "sum", 1)
        standin().lib.standin_break(1)
        begin = clock().now()
        with pytest.raises(NativeError, match=r"rank 1 of team\d+, .*all_reduce .* of rank 0 waits at step 0, nccl"):
            team.wait()
        assert clock().now() - begin < 1.0


def test_ranks_of_a_host_that_disagree():
    schedule = hierarchical(Kind.ALL_REDUCE, HOSTS[4])
    with Gpu() as gpu:
        team = gpu.team(4, timeout=0.5, hosts=HOSTS[4])
        program, _ = team.program(schedule)
        for rank, count in enumerate((64, 128)):
            team.enqueue(rank, program, Kind.ALL_REDUCE, np.ones(count, np.float32), "sum", 1)
        with pytest.raises(NativeError, match=r"rank [01] of team\d+, the collectives inside its host: a transfer"):
            team.wait()
        assert "ranks disagree about a collective" in standin().breaches()
        standin().lib.standin_reset(1)  # the breach is what was provoked


def test_one_host_has_no_calls():
    # Nothing is left for the tuner where a schedule of one host is a call: its edges stay edges.
    schedule = build("direct", Kind.ALL_REDUCE, 4)
    with Gpu() as gpu:
        team = gpu.team(4, hosts=[3] * 4)
        team.run(schedule, [np.ones(64, np.float32)] * 4)
        assert not INSIDE & set(standin().calls())
