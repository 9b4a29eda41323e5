"""What goes wrong is an error on every rank, in time, naming rank, operation, step and edge; what can go on goes on."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxcoll.runtime.native import NativeError, load
from jaxcoll.schedule import Kind, Schedule, Table, build

from .harness import TRANSPORTS, Array, Cluster, LogCollector, Op, within

pytestmark = pytest.mark.timeout(60)

N = 4
PLACE = re.compile(r"step \d+, edge \d->\d of graph \d+ \(schedule \w+\)")
SEPARATE = ("fake", "fake-push", "shm", "shm-ring", "tcp")  # every rank a process of its own


def begin(cluster: Cluster, schedule: Schedule, ranks: Sequence[int], count: int = 5000, launch: int | None = None,
          **what: Any) -> list[Op]:  # fmt: skip
    key = what.pop("key", None) or cluster.define([schedule])
    launch = cluster.new_launch() if launch is None else launch
    size = count * schedule.collective.input_blocks
    return [
        cluster.start(r, schedule.kind, np.full(size, r + 1, np.float32), key, launch=launch, **what) for r in ranks
    ]


def run_until(cluster: Cluster, ops: Sequence[Op], limit: float) -> list[str]:
    """The errors of the operations, which must be over within `limit` seconds ("" where one succeeded)."""
    until, errors = time.monotonic() + limit, {}
    while len(errors) < len(ops):
        assert time.monotonic() < until, f"not over in {limit} s: ranks {[o.rank for o in ops if o.rank not in errors]}"
        if cluster.fake is not None:
            cluster.settle(lambda: False, limit)
            cluster.tick()
        for op in ops:
            if op.rank not in errors:
                try:
                    if op.wait(0.005):
                        errors[op.rank] = ""
                except NativeError as error:
                    errors[op.rank] = str(error)
    return [errors[op.rank] for op in ops]


def still_works(cluster: Cluster, devices: Sequence[int]) -> None:
    """A sum over some of the devices."""
    schedule = build("ring", Kind.ALL_REDUCE, len(devices))
    key, launch = cluster.define([schedule], devices), cluster.new_launch()
    ops = [
        cluster.start(r, Kind.ALL_REDUCE, np.full(300, r, np.int32), key, launch=launch, devices=devices)
        for r in range(len(devices))
    ]
    cluster.finish(ops)
    assert all((op.result() == sum(range(len(devices)))).all() for op in ops)


@pytest.mark.parametrize("name", ["ring", "dual_tree"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_never_begins(transport: str, name: str):
    timeout = 0.8
    with Cluster(transport, N, timeout=timeout, mismatch=0.15) as cluster:
        ops = begin(cluster, build(name, Kind.ALL_REDUCE, N), [0, 1, 3])
        errors = run_until(cluster, ops, timeout + 1)
        for error in errors:
            assert "all_reduce sum f32[5000]" in error
            assert "JAXCOLL_TIMEOUT" in error
            assert "rank 2 has not arrived" in error, error
            assert PLACE.search(error), error
        still_works(cluster, range(N))  # all live: the same communicator goes on


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_comes_after_the_verdict(transport: str):
    with Cluster(transport, N, timeout=0.3, mismatch=0.1) as cluster:
        schedule = build("ring", Kind.ALL_REDUCE, N)
        key, launch = cluster.define([schedule]), cluster.new_launch()
        early = begin(cluster, schedule, [0, 1, 3], key=key, launch=launch)
        assert all(run_until(cluster, early, 1.3))
        late = begin(cluster, schedule, [2], key=key, launch=launch)
        assert "JAXCOLL_TIMEOUT" in run_until(cluster, late, 0.3)[0]  # at once, with the others' reason


@pytest.mark.parametrize("transport", ["shm", "shm-ring", "tcp"])
def test_a_late_rank_reads_nothing_of_an_operation_that_has_failed(transport: str):
    # Rank 1 hears of the broadcast in another operation; then it reads no more messages until it begins, and rank 0
    # has given up by then and uses its memory for something else.
    with Cluster(transport, 3, timeout=0.8, mismatch=0.3) as cluster:
        late = cluster.define([build("direct", Kind.BROADCAST, 3, root=0)])
        other = cluster.define([build("ring", Kind.ALL_REDUCE, 2)], [1, 2])
        sums = [cluster.start(0, Kind.ALL_REDUCE, np.ones(9, np.int32), other, launch=50, devices=[1, 2])]
        root = cluster.start(0, Kind.BROADCAST, np.ones(100_000, np.float32), late, launch=1)
        time.sleep(0.1)
        sums.append(cluster.start(1, Kind.ALL_REDUCE, np.ones(9, np.int32), other, launch=50, devices=[1, 2]))
        cluster.finish(sums)
        assert "JAXCOLL_TIMEOUT" in root.error(3)
        root.inputs[0][:] = 7
        error = cluster.start(1, Kind.BROADCAST, np.zeros(100_000, np.float32), late, launch=1).error(3)
        assert error == root.error(), error


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_rank_only_warns(transport: str):
    with LogCollector() as log, Cluster(transport, 3, warn=0.3, mismatch=0.1) as cluster:
        schedule = build("ring", Kind.ALL_REDUCE, 3)
        key, launch = cluster.define([schedule]), cluster.new_launch()
        ops = begin(cluster, schedule, [0, 2], key=key, launch=launch)
        begun = time.monotonic()
        while len(log.lines) < 2 or time.monotonic() < begun + (2.0 if transport == "tcp" else 0):
            assert time.monotonic() < begun + 20
            if cluster.fake is not None:
                cluster.settle(lambda: False)
                cluster.tick()
            time.sleep(0.02)
        warnings = list(log.lines)
        ops += begin(cluster, schedule, [1], key=key, launch=launch)
        assert run_until(cluster, ops, 5) == ["", "", ""]
        assert all((op.result() == 6).all() for op in ops)
    assert all(PLACE.search(line) for line in warnings), warnings
    assert any("rank 1 has not arrived" in line for line in warnings), warnings


def test_late_ranks_are_no_error():
    """Whoever wants to hear of errors only isn't told of them."""
    with LogCollector() as log, Cluster("shm", 2, warn=0.05, mismatch=0.02, quiet=True) as cluster:
        schedule = build("ring", Kind.ALL_REDUCE, 2)
        key, launch = cluster.define([schedule]), cluster.new_launch()
        ops = begin(cluster, schedule, [0], key=key, launch=launch)
        time.sleep(0.3)
        ops += begin(cluster, schedule, [1], key=key, launch=launch)
        assert run_until(cluster, ops, 5) == ["", ""]
    assert not log.lines


def test_a_log_that_nobody_reads_holds_up_nobody():
    """Standard error may be a full pipe."""
    stuck, go = threading.Event(), threading.Event()

    def log(_: str) -> None:
        stuck.set()
        go.wait(20)

    schedule = build("ring", Kind.ALL_REDUCE, 2)
    with LogCollector(log), Cluster("shm", 2, warn=0.05) as cluster:
        key, late = cluster.define([schedule]), cluster.new_launch()
        ops = begin(cluster, schedule, [0], key=key, launch=late)
        try:
            assert stuck.wait(10)
            with within(5):
                other = begin(cluster, schedule, [0, 1], key=key, site=2)
                assert run_until(cluster, other, 4) == ["", ""]
        finally:
            go.set()
        ops += begin(cluster, schedule, [1], key=key, launch=late)
        assert run_until(cluster, ops, 5) == ["", ""]


@pytest.mark.parametrize("name", ["ring", "dual_tree", "halving_doubling"])
@pytest.mark.parametrize("transport", SEPARATE)
def test_a_killed_process(transport: str, name: str):
    with Cluster(transport, N, seed=5) as cluster:
        schedule = build(name, Kind.ALL_REDUCE, N)
        open_ops = [begin(cluster, schedule, [0, 1, 2], site=s) for s in (1, 2)]
        if cluster.fake is not None:
            cluster.settle(lambda: False)
        cluster.kill(3)
        for ops in open_ops:
            for error in run_until(cluster, ops, 1.0):
                assert "rank 3 is lost" in error
                assert "all_reduce sum f32[5000]" in error
                assert PLACE.search(error), error
        for refused in run_until(cluster, begin(cluster, schedule, [0, 1, 2]), 1.0):
            assert "rank 3 is lost" in refused
            assert PLACE.search(refused), refused
        still_works(cluster, [0, 1, 2])


@pytest.mark.parametrize("transport", ["shm", "shm-ring", "tcp"])
def test_a_process_that_leaves_has_served_its_operations(transport: str):
    # The root of a broadcast is done as soon as its data are on their way, and may be gone before they are read.
    with Cluster(transport, 3) as cluster:
        schedule = build("binomial", Kind.BROADCAST, 3, root=0)
        key = cluster.define([schedule])
        launches = [cluster.new_launch() for _ in range(5)]
        roots = [begin(cluster, schedule, [0], count=1000, launch=i, key=key) for i in launches]
        assert [e for ops in roots for e in run_until(cluster, ops, 5)] == [""] * 5
        cluster.native.lib.jc_world_stop(cluster.worlds[0])
        cluster.kill(0)
        for launch in launches:
            ops = begin(cluster, schedule, [1, 2], count=1000, launch=launch, key=key)
            assert run_until(cluster, ops, 5) == ["", ""]
            assert all((op.result() == 1).all() for op in ops)
            time.sleep(0.03)  # the later ones begin when the loss is known
        (error,) = run_until(cluster, begin(cluster, schedule, [1], key=key), 1)
        assert "rank 0 is lost (its process has left)" in error


@pytest.mark.parametrize("transport", ["shm", "shm-ring", "tcp"])
def test_what_is_still_to_be_sent_is_known_and_goes_out(transport: str):
    # More than slab, ring and socket hold: the root must not leave with it.
    with Cluster(transport, 2) as cluster:
        schedule = build("binomial", Kind.BROADCAST, 2, root=0)
        key = cluster.define([schedule])
        launches = [cluster.new_launch() for _ in range(900)]
        for launch in launches:
            (op,) = begin(cluster, schedule, [0], count=1000, launch=launch, key=key)
            assert op.wait(5)
        sending, world = cluster.native.lib.jc_world_sending, cluster.worlds[0]
        assert transport == "tcp" or sending(world) == 1  # over tcp a peer reads also while it has nothing to do
        late = [begin(cluster, schedule, [1], count=1000, launch=launch, key=key)[0] for launch in launches]
        until = time.monotonic() + 20
        while sending(world) >= 0:
            assert time.monotonic() < until
            time.sleep(0.01)
        cluster.native.lib.jc_world_stop(world)
        cluster.kill(0)
        assert all((op.error(5), op.result().tolist()) == ("", [1.0] * 1000) for op in late)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rank_that_is_too_far_ahead_is_told(transport: str):
    with Cluster(transport, 2, early_bytes=10_000) as cluster:
        schedule = build("binomial", Kind.BROADCAST, 2, root=0)
        key, first = cluster.define([schedule]), cluster.new_launch()
        # Something to wait for, so that rank 1 takes messages; and, for what is ahead of it, nobody.
        (waits,) = begin(cluster, schedule, [1], launch=first, key=key)
        launches = [cluster.new_launch() for _ in range(200)]
        errors = [begin(cluster, schedule, [0], count=1000, launch=i, key=key)[0].error(5) for i in launches]
        begin(cluster, schedule, [0], launch=first, key=key)
        assert run_until(cluster, [waits], 5) == [""]
        late = [begin(cluster, schedule, [1], count=1000, launch=i, key=key)[0].error(5) for i in launches]
        assert "rank 0 is too far ahead" in late[-1], late[-1]
        assert not late[0], "what was kept is still good"
        assert all(not e or "too far ahead" in e for e in [*errors, *late])


def test_small_messages_that_are_kept_count_with_what_is_around_them():
    with Cluster("tcp", 2, early_bytes=100_000) as cluster:
        schedule = build("binomial", Kind.BROADCAST, 2, root=0)
        key, launches = cluster.define([schedule]), [cluster.new_launch() for _ in range(300)]
        for launch in launches:
            begin(cluster, schedule, [0], count=1, launch=launch, key=key)
        until, refused = time.monotonic() + 10, len(launches) - 100_000 // (512 + 4)
        while cluster.native.lib.jc_world_failures(cluster.worlds[1]) < refused:
            assert time.monotonic() < until
            time.sleep(0.01)
        errors = [begin(cluster, schedule, [1], count=1, launch=i, key=key)[0].error(5) for i in launches]
        assert sum("rank 0 is too far ahead" in e for e in errors) == refused == sum(bool(e) for e in errors)


def test_a_rank_that_waits_costs_those_that_have_not_begun_or_are_done_nothing():
    # Rank 0 says again and again that it waits for rank 2, also to rank 1, which is done.
    with Cluster("tcp", 3, mismatch=0.05, early_bytes=3000) as cluster:
        schedule = build("ring", Kind.BROADCAST, 3, root=1)
        key, launch = cluster.define([schedule]), cluster.new_launch()
        ops = begin(cluster, schedule, [1], count=9, launch=launch, key=key)
        assert ops[0].error(5) == ""
        ops += begin(cluster, schedule, [0], count=9, launch=launch, key=key)
        assert not ops[1].wait(1)
        ops += begin(cluster, schedule, [2], count=9, launch=launch, key=key)
        assert run_until(cluster, ops, 5) == ["", "", ""]


@pytest.mark.parametrize("transport", ["shm", "shm-ring", "tcp"])
def test_a_rank_that_sends_to_one_that_takes_nothing_is_told(transport: str):
    # Process 1 reads neither ring nor socket: what process 0 keeps for it has a limit of its own.
    with Cluster(transport, 2, early_bytes=100_000, mismatch=10, only=0) as cluster:
        schedule = build("binomial", Kind.BROADCAST, 2, root=0)
        key, launches, errors = cluster.define([schedule]), [cluster.new_launch() for _ in range(3000)], [""]
        ahead = iter(launches)
        while not errors[-1]:
            (op,) = begin(cluster, schedule, [0], count=1000, launch=next(ahead), key=key)
            errors.append(op.error(5))
        assert "rank 0 is too far ahead: process 0 holds 0 MiB that process 1 has yet to take" in errors[-1]
        cluster.native.check(cluster.native.lib.jc_world_start(cluster.worlds[1]))
        (late,) = begin(cluster, schedule, [1], count=1000, launch=launches[0], key=key)
        assert run_until(cluster, [late], 5) == [""]
        assert (late.result() == 1).all(), "what was sent before is still good"
        still_works(cluster, [1, 0])  # process 1 begins: it keeps no more for later


def _disagree(cluster: Cluster, odd: dict[str, Any]) -> list[str]:
    """Rank 2 calls something else than the others, under the same name; the errors of all."""
    schedule = build("ring", Kind.ALL_REDUCE, N)
    key, launch = cluster.define([schedule]), cluster.new_launch()
    ops = begin(cluster, schedule, [0, 1, 3], key=key, launch=launch)
    other = odd.get("schedule", schedule)
    other_key = key if other is schedule else cluster.define([other])
    size = odd.get("count", 5000) * other.collective.input_blocks
    value = np.ones(size, odd.get("dtype", np.float32))
    ops.append(cluster.start(2, other.kind, value, other_key, launch=launch, reduce=odd.get("reduce", "sum")))
    return run_until(cluster, ops, 3.0)


@pytest.mark.parametrize(
    ("odd", "name"),
    [
        ({"count": 4999}, "all_reduce sum f32[4999]"),
        ({"count": 0}, "all_reduce sum f32[0]"),
        ({"dtype": np.int32}, "all_reduce sum s32[5000]"),
        ({"reduce": "max"}, "all_reduce max f32[5000]"),
        ({"schedule": build("ring", Kind.ALL_GATHER, N)}, "all_gather none f32[5000]"),
        ({"schedule": build("ring", Kind.REDUCE_SCATTER, N)}, "reduce_scatter sum f32[5000]"),
    ],
    ids=["count", "nothing", "dtype", "reduction", "kind", "kind with larger operands"],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_disagree(transport: str, odd: dict[str, Any], name: str):
    with Cluster(transport, N, timeout=20, mismatch=0.2) as cluster:
        for error in _disagree(cluster, odd):
            assert "the ranks disagree" in error, error
            assert "all_reduce sum f32[5000]" in error
            assert name in error
            assert "rank 2" in error
        still_works(cluster, range(N))


@pytest.mark.parametrize("transport", [t for t in TRANSPORTS if t != "inproc"])
def test_a_rank_that_is_ahead_under_a_new_table_disagrees_with_nobody(transport: str):
    # Rank 3 waits long for the late rank 2, and meanwhile hears of the next execution from rank 0, of which it has
    # heard nothing in this one: 0 -> 2 -> 3 and 0 -> 1 before the swap, 0 -> 3 -> 2 and 0 -> 1 after it.
    schedule = build("binomial", Kind.BROADCAST, N, root=0)
    with Cluster(transport, N, timeout=20, mismatch=0.2) as cluster:
        key, first, second = cluster.define([schedule]), cluster.new_launch(), cluster.new_launch()
        ops = begin(cluster, schedule, [0, 1, 3], key=key, launch=first)
        for world in range(len(cluster.worlds)):
            cluster.stage(world, key, 1, cluster.programs[key, world][0], Table.identity(schedule).swap_graph(0, 2, 3))
            cluster.propose(world, key, 1, [(1, second, 0)])
            cluster.decide(world, key, 1, commit=True)
        later = begin(cluster, schedule, [0], key=key, launch=second)
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            if cluster.fake is not None:
                cluster.settle(lambda: False)
                cluster.tick()
            time.sleep(0.01)
        ops += begin(cluster, schedule, [2], key=key, launch=first)
        later += begin(cluster, schedule, [1, 2, 3], key=key, launch=second)
        assert run_until(cluster, ops, 10) == [""] * 4
        assert run_until(cluster, later, 10) == [""] * 4


@pytest.mark.parametrize("transport", [t for t in TRANSPORTS if t != "inproc"])
def test_a_rank_that_is_ahead_with_another_size_disagrees_with_nobody(transport: str):
    # The program was compiled again for a smaller batch, so that its call site is the same. Rank 0 is done with the
    # first execution, of which rank 3 hears only through the late rank 2, and goes on to the second, directly to 3.
    first, second = build("binomial", Kind.BROADCAST, N, root=0), build("direct", Kind.BROADCAST, N, root=0)
    with Cluster(transport, N, timeout=20, mismatch=0.2) as cluster:
        keys, launches = [cluster.define([s]) for s in (first, second)], [cluster.new_launch() for _ in range(2)]
        ops = begin(cluster, first, [0, 1, 3], key=keys[0], launch=launches[0])
        later = begin(cluster, second, [0], count=77, key=keys[1], launch=launches[1])
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            if cluster.fake is not None:
                cluster.settle(lambda: False)
                cluster.tick()
            time.sleep(0.01)
        ops += begin(cluster, first, [2], key=keys[0], launch=launches[0])
        later += begin(cluster, second, [1, 2, 3], count=77, key=keys[1], launch=launches[1])
        assert run_until(cluster, ops, 10) == [""] * 4
        assert run_until(cluster, later, 10) == [""] * 4


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_operation_on_nothing_ends(transport: str, kind: Kind):
    # Its messages are empty, but they are sent: a rank with something to say would be waited for until the deadline.
    with Cluster(transport, 3) as cluster:
        schedule = build("ring", kind, 3)
        key, launch = cluster.define([schedule]), cluster.new_launch()
        first = begin(cluster, schedule, [0, 1], count=0, key=key, launch=launch)
        if cluster.fake is not None:
            cluster.settle(lambda: False)
        assert not first[0].wait(0.05)
        ops = first + begin(cluster, schedule, [2], count=0, key=key, launch=launch)
        assert run_until(cluster, ops, 5) == ["", "", ""]


def test_different_schedules_are_noticed():
    with Cluster("shm", N) as cluster:
        errors = _disagree(cluster, {"schedule": build("halving_doubling", Kind.ALL_REDUCE, N)})
        assert all("with another schedule or table" in e for e in errors), errors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stop_with_open_operations(transport: str):
    # Whoever leaves, its own operations end, those that wait for a verdict on a table too, and the others' with them.
    with Cluster(transport, N, seed=2) as cluster:
        schedule = build("ring", Kind.ALL_REDUCE, N)
        key = cluster.define([schedule])
        ops = begin(cluster, schedule, range(N - 1), key=key)
        waiting_key = cluster.define([schedule])
        cluster.stage(0, waiting_key, 1, cluster.load(0, schedule), None)
        cluster.propose(0, waiting_key, 1, [])
        waiting = begin(cluster, schedule, [0], key=waiting_key)
        assert not waiting[0].wait(0.05)
        for world in cluster.worlds:
            cluster.native.lib.jc_world_stop(world)
        assert all("leaving" in op.error(1.0) or "lost" in op.error(1.0) for op in ops)
        assert "leaving" in waiting[0].error(1.0)
        assert "shut down" in begin(cluster, schedule, [0], key=key)[0].error(1.0)


def test_a_verdict_that_never_comes():
    with Cluster("shm", 2, timeout=0.4) as cluster:
        schedule = build("ring", Kind.ALL_REDUCE, 2)
        key = cluster.define([schedule])
        cluster.stage(0, key, 1, cluster.load(0, schedule), None)
        cluster.propose(0, key, 1, [])
        error = begin(cluster, schedule, [0], key=key)[0].error(1.4)
        assert "no verdict came on a proposed table" in error


@pytest.mark.parametrize("transport", ["inproc", "fake", "shm", "tcp"])
def test_a_world_that_never_started(transport: str):
    with Cluster(transport, 2, run=False) as cluster:
        assert all(load().lib.jc_world_open_operations(world) == 0 for world in cluster.worlds)


def test_calls_that_make_no_sense():
    with Cluster("inproc", 2) as cluster:
        native, lib = cluster.native, cluster.native.lib
        schedule = build("ring", Kind.ALL_REDUCE, 2)
        key = cluster.define([schedule])
        value: Array = np.ones(4, np.float32)
        assert "no schedule set" in cluster.start(0, Kind.ALL_REDUCE, value, 999, launch=1).error()
        assert "another collective" in cluster.start(0, Kind.ALL_GATHER, value, key, launch=2).error()
        complex_max = cluster.start(0, Kind.ALL_REDUCE, np.ones(4, np.complex64), key, launch=3, reduce="max")
        assert "max of c64 is not supported" in complex_max.error()
        with pytest.raises(NativeError, match="unknown to jaxcoll"):
            cluster.native.check(
                lib.jc_set_define(cluster.worlds[0], 7, native.int64s([0, 5]), 2, native.int64s([0]), 1, 0)
            )
        with pytest.raises(NativeError, match="for 2 ranks, the communicator has 1"):
            native.check(lib.jc_set_define(cluster.worlds[0], 7, native.int64s([0]), 1, native.int64s([0]), 1, 0))
        with pytest.raises(NativeError, match="no program 9"):
            native.check(lib.jc_set_define(cluster.worlds[0], 7, native.int64s([0, 1]), 2, native.int64s([9]), 1, 0))
        with pytest.raises(NativeError, match="two processes"):
            native.check(lib.jc_world_add_devices(cluster.worlds[0], 0, native.int64s([1]), 1))


def test_results_of_failed_operations_are_left_alone():
    with Cluster("tcp", 3, timeout=0.3, mismatch=0.1) as cluster:
        ops = begin(cluster, build("ring", Kind.ALL_REDUCE, 3), [0, 1])
        assert all(run_until(cluster, ops, 1.3))
        before = [op.outputs[0].copy() for op in ops]
        late = begin(cluster, build("ring", Kind.ALL_REDUCE, 3), [2])
        time.sleep(0.1)
        assert all(np.array_equal(op.outputs[0], b) for op, b in zip(ops, before))
        assert run_until(cluster, late, 1.3)[0]
