"""A failure in one process reaches all ranks of the communicator, over the links and life lines between processes."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import numpy as np
import pytest
from native.harness import Cluster, LogCollector, guarded

from jaxcoll.runtime.native import NativeError
from jaxcoll.schedule import Kind, build

from .harness import NS, Gpu, clock, on_threads, standin

pytestmark = pytest.mark.timeout(120)

RANKS = 4
AT_ONCE = 1.0  # seconds
VALUES = np.arange(RANKS * 50, dtype=np.float32).reshape(RANKS, 50)
PLACE = r"step \d, edge \d->\d"


class Processes:
    """A world for each rank, joined as processes are; every one opens the GPU side for itself."""

    def __init__(self, gpu: Gpu, cluster: Cluster) -> None:
        self.gpu, self.cluster, self.native = gpu, cluster, gpu.native
        empty = self.native.ffi.new("char*[]", 0)
        path = str(standin().path).encode()
        self.gpus = [self.native.lib.jc_gpu_open(path, empty, 0) for _ in cluster.worlds]
        self.devices = self.native.int64s(range(RANKS))
        self.streams = [standin().stream(r) for r in range(RANKS)]
        self.launch = itertools.count(1)
        self.key = cluster.define([build("ring", Kind.ALL_REDUCE, RANKS)])
        self.join()

    def join(self) -> None:
        """All ranks join with a new id, and connect."""
        ffi, lib = self.native.ffi, self.native.lib
        unique = ffi.new("uint8_t[128]")
        self.native.check(lib.jc_gpu_unique_id(self.gpus[0], unique))
        options = ffi.new(
            "jc_gpu_options*", {"timeout_ns": 60 * NS, "pairs": 1, "record": 1, "max_streams": 32, "max_ctas": 0}
        )

        def one(rank: int) -> None:
            world = self.cluster.worlds[rank]
            ordinal = ffi.new("int[]", [rank])
            self.native.check(
                lib.jc_world_gpu_join(world, self.gpus[rank], options, self.devices, RANKS, ordinal, 1, unique)
            )
            self.native.check(lib.jc_world_gpu_connect(world, self.cluster.group(), self.key))

        failures = on_threads([lambda r=r: one(r) for r in range(RANKS)])
        if failures:
            raise failures[0]

    def enqueue(self, rank: int, launch: int) -> Any:
        ffi, result = self.native.ffi, guarded(50, VALUES.dtype)
        self.gpu.kept.append(result)
        pointers = [ffi.new("void*[]", [ffi.cast("void*", a.ctypes.data)]) for a in (VALUES[rank], result)]
        stream = ffi.cast("void*", int(standin().ffi.cast("intptr_t", self.streams[rank])))
        self.native.check(
            self.native.lib.jc_world_gpu_enqueue(
                self.cluster.worlds[rank], rank, launch, int(Kind.ALL_REDUCE), 0, 11, 7, self.key, self.devices, RANKS,
                1, 1, *pointers, self.native.int64s([50]), stream,
            )
        )  # fmt: skip
        return result

    def run(self) -> None:
        launch = next(self.launch)
        results = [self.enqueue(r, launch) for r in range(RANKS)]
        while standin().stuck():
            time.sleep(0.0005)
        assert all((r == VALUES.sum(axis=0)).all() for r in results)

    def failure(self, rank: int) -> str:
        out = self.native.ffi.new("char[]", 4096)
        failed = self.native.lib.jc_world_gpu_failed(self.cluster.worlds[rank], self.cluster.group(), out, 4096)
        return self.native.text(out) if failed else ""

    def all_know(self, ranks: range, pattern: str, *, own: bool = False) -> None:
        """Within a second every process knows one cause, and its next call raises it.

        `own`: each may have seen it by itself, with the place where it waits itself.
        """
        until = clock().now() + AT_ONCE
        while not all(self.failure(r) for r in ranks) and clock().now() < until:
            time.sleep(0.002)
        causes = {r: self.failure(r) for r in ranks}
        assert own or len(set(causes.values())) == 1, causes
        for rank, cause in causes.items():
            assert re.search(pattern, cause), cause
            with pytest.raises(NativeError) as error:
                self.enqueue(rank, 1000)
            assert cause in str(error.value)
            assert f"rank {rank} of" in str(error.value)
            assert "jaxcoll.init()" in str(error.value)

    def lost(self, rank: int, pattern: str) -> None:
        """Its next call fails so, as soon as it is known."""
        until, said = clock().now() + AT_ONCE, ""
        while not said and clock().now() < until:
            try:
                self.enqueue(rank, next(self.launch))
                time.sleep(0.01)
            except NativeError as error:
                said = str(error)
        assert re.search(pattern, said), said

    def close(self) -> None:
        """After the worlds."""
        for handle in self.gpus:
            self.native.lib.jc_gpu_close(handle)


@pytest.fixture(params=["tcp", "shm"])
def processes(request: pytest.FixtureRequest):
    with Gpu() as gpu:
        # Late ranks aren't logged, as with JAXCOLL_LOG=error; failures are.
        with Cluster(request.param, RANKS, quiet=True) as cluster:
            made = Processes(gpu, cluster)
            yield made
        made.close()


def test_an_error_at_enqueue_in_one_process(processes: Processes):
    processes.run()
    launch = next(processes.launch)
    for rank in (0, 1, 3):
        processes.enqueue(rank, launch)
    standin().lib.standin_fail(b"ncclSend", 2, 2)
    with LogCollector() as log:
        with pytest.raises(NativeError, match=f"rank 2.*{PLACE}.*ncclSend"):
            processes.enqueue(2, launch)
        processes.all_know(range(RANKS), f"rank 2.*{PLACE}.*ncclSend")
        until = clock().now() + AT_ONCE  # a line follows its failure, on the thread that found it
        while len(lines := [x for x in log.lines if "GPU side of" in x and "ncclSend" in x]) < RANKS:
            assert clock().now() < until, log.lines
            time.sleep(0.002)
        assert len(lines) == RANKS
    processes.join()
    processes.run()


def test_an_asynchronous_error_in_one_process(processes: Processes):
    launch = next(processes.launch)
    for rank in (0, 1, 3):
        processes.enqueue(rank, launch)
    standin().lib.standin_break(1)
    processes.all_know(range(RANKS), f"rank 1 of.*edge.*a transfer failed.*waits at {PLACE}")
    processes.join()
    processes.run()


def test_a_process_that_dies(processes: Processes):
    launch = next(processes.launch)
    for rank in (0, 1, 3):
        processes.enqueue(rank, launch)
    processes.cluster.kill(2)
    processes.all_know(range(2), f"rank 2 is lost.*waits at {PLACE}", own=True)


def test_a_process_that_is_gone_when_nothing_is_under_way(processes: Processes):
    processes.run()
    processes.cluster.kill(2)
    time.sleep(0.3)
    assert not processes.failure(0)
    with pytest.raises(NativeError, match="rank 2 is lost"):
        processes.enqueue(0, 50)
    processes.all_know(range(2), "rank 2 is lost")


def test_a_process_that_dies_while_the_others_connect(processes: Processes):
    # The pairs of another schedule: all ranks but one have come when it dies, and nothing is under way.
    native, cluster = processes.native, processes.cluster
    processes.run()
    key = cluster.define([build("binomial", Kind.ALL_REDUCE, RANKS)])

    def connect(rank: int) -> None:
        native.check(native.lib.jc_world_gpu_connect(cluster.worlds[rank], cluster.group(), key))

    def die() -> None:
        time.sleep(0.1)
        cluster.kill(2)

    begin = clock().now()
    failures = on_threads([*(lambda r=r: connect(r) for r in (0, 1, 3)), die])
    assert clock().now() - begin < 0.1 + AT_ONCE
    assert len(failures) == 3
    assert all("rank 2 is lost" in str(failure) for failure in failures), failures


def test_a_process_that_is_gone_when_the_others_join_again(processes: Processes):
    native, lib = processes.native, processes.native.lib
    processes.run()
    processes.cluster.kill(2)
    processes.lost(0, "rank 2 is lost")
    unique = native.ffi.new("uint8_t[128]")
    native.check(lib.jc_gpu_unique_id(processes.gpus[0], unique))
    options = native.ffi.new(
        "jc_gpu_options*", {"timeout_ns": 60 * NS, "pairs": 1, "record": 1, "max_streams": 32, "max_ctas": 0}
    )
    begin = clock().now()
    arguments = (processes.devices, RANKS, native.ffi.new("int[]", [0]), 1, unique)
    assert lib.jc_world_gpu_join(processes.cluster.worlds[0], processes.gpus[0], options, *arguments) != 0
    assert "rank 2 is lost" in native.text(lib.jc_last_error())
    assert clock().now() - begin < AT_ONCE


def test_a_process_that_fails_before_another_comes_to_join(processes: Processes):
    native, lib = processes.native, processes.native.lib
    unique = native.ffi.new("uint8_t[128]")
    native.check(lib.jc_gpu_unique_id(processes.gpus[0], unique))
    options = native.ffi.new(
        "jc_gpu_options*", {"timeout_ns": 60 * NS, "pairs": 1, "record": 1, "max_streams": 32, "max_ctas": 0}
    )
    standin().lib.standin_break(0)
    processes.all_know(range(RANKS), "rank 0 of.*a transfer failed")

    def join(rank: int) -> str:
        ordinal = native.ffi.new("int[]", [rank])
        arguments = (processes.devices, RANKS, ordinal, 1, unique)
        done = lib.jc_world_gpu_join(processes.cluster.worlds[rank], processes.gpus[rank], options, *arguments)
        return native.text(lib.jc_last_error()) if done else ""

    standin().lib.standin_fail(b"cudaStreamCreateWithFlags", 1, 719)
    assert "cudaStreamCreateWithFlags" in join(0)
    begin = clock().now()
    time.sleep(0.1)
    for rank in range(1, RANKS):
        assert "rank 0 of" in join(rank)
    assert clock().now() - begin < AT_ONCE
    processes.join()
    processes.run()
