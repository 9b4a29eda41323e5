"""A call on the GPU goes the CPU's way: call sites, schedule sets, staged and committed tables."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from native.harness import DTYPE, Cluster, guarded

from jaxcoll.config import Config
from jaxcoll.runtime import gpu as runtime_gpu
from jaxcoll.runtime.native import NativeError
from jaxcoll.schedule import Kind, Table, build

from .harness import NS, Gpu, on_threads, standin

pytestmark = pytest.mark.timeout(120)


class GpuWorld:
    """A world of one process whose ranks are CUDA devices; ordinals run against the ranks' order."""

    def __init__(self, gpu: Gpu, cluster: Cluster, hosts: Sequence[int] | None = None) -> None:
        self.gpu, self.cluster, self.native, self.n = gpu, cluster, gpu.native, cluster.ranks
        self.world = cluster.worlds[0]
        self.devices = self.native.int64s(range(self.n))
        self.ordinals = list(reversed(range(self.n)))
        self.streams = [standin().stream(o) for o in self.ordinals]
        self.launch = itertools.count(1)
        self.hosts = self.native.ffi.NULL if hosts is None else self.native.ffi.new("int32_t[]", list(hosts))
        self.join()

    def join(self) -> None:
        ffi, lib = self.native.ffi, self.native.lib
        unique = ffi.new("uint8_t[128]")
        assert lib.jc_gpu_unique_id(self.gpu.handle, unique) == 0
        options = ffi.new(
            "jc_gpu_options*",
            {"timeout_ns": 5 * NS, "pairs": 1, "record": 1, "max_streams": 32, "max_ctas": 0, "hosts": self.hosts},
        )
        self.native.check(
            lib.jc_world_gpu_join(
                self.world,
                self.gpu.handle,
                options,
                self.devices,
                self.n,
                ffi.new("int[]", self.ordinals),
                self.n,
                unique,
            )
        )

    def connect(self, key: int) -> int:
        return self.native.check(self.native.lib.jc_world_gpu_connect(self.world, self.cluster.group(), key))

    def all_reduce(self, key: int, values: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Enqueues on all ranks; the results are there when the streams are through."""
        ffi, launch = self.native.ffi, next(self.launch)
        outputs = [guarded(values.shape[1], values.dtype) for _ in range(self.n)]
        self.gpu.kept.append((values, outputs))  # after a failure the streams may still use them

        def one(rank: int) -> None:
            pointers = [ffi.new("void*[]", [ffi.cast("void*", a.ctypes.data)]) for a in (values[rank], outputs[rank])]
            stream = ffi.cast("void*", int(standin().ffi.cast("intptr_t", self.streams[rank])))
            self.native.check(
                self.native.lib.jc_world_gpu_enqueue(
                    self.world, self.ordinals[rank], launch, int(Kind.ALL_REDUCE), 0, DTYPE[values.dtype.name], 7, key,
                    self.devices, self.n, 1, 1, *pointers, self.native.int64s([values.shape[1]]), stream,
                )
            )  # fmt: skip

        failures = on_threads([lambda r=r: one(r) for r in range(self.n)])
        if failures:
            raise failures[0]
        while standin().stuck():
            pass
        return outputs


def test_a_swap_by_the_cpus_protocol():
    schedule = build("ring", Kind.ALL_REDUCE, 5)
    values = np.random.default_rng(5).integers(-99, 99, (5, 100)).astype(np.int32)
    want = values.sum(axis=0, dtype=np.int32)
    with Gpu() as gpu, Cluster("inproc", 5) as cluster:
        world = GpuWorld(gpu, cluster)
        key = cluster.define([schedule])
        assert world.connect(key) > 0
        assert all(np.array_equal(r, want) for r in world.all_reduce(key, values))
        before = standin().lib.standin_communicators()
        cluster.put_in_force(key, Table.identity(schedule).swap_global(1, 3), version=1)
        connected = standin().lib.standin_communicators()
        assert connected > before  # by staging, before the commit
        for _ in range(3):
            assert all(np.array_equal(r, want) for r in world.all_reduce(key, values))
        cluster.put_in_force(key, Table.identity(schedule), version=2)
        assert all(np.array_equal(r, want) for r in world.all_reduce(key, values))
        assert standin().lib.standin_communicators() == connected
        versions: set[int] = set()
        until = time.monotonic() + 10
        while versions != {0, 1, 2} and time.monotonic() < until:  # the monitor reads the times a moment later
            versions |= set(gpu.records()["version"].tolist())
        assert versions == {0, 1, 2}


def test_hosts_exchanged_by_the_cpus_protocol():
    # The exchange across hosts gets another order; inside, NCCL's own collectives go on, with nothing new to connect.
    hosts = [0, 0, 1, 1]
    schedule = build("hierarchical", Kind.ALL_REDUCE, 4, groups=[[0, 1], [2, 3]])
    values = np.random.default_rng(5).integers(-99, 99, (4, 128)).astype(np.int32)
    want = values.sum(axis=0, dtype=np.int32)
    with Gpu() as gpu, Cluster("inproc", 4) as cluster:
        world = GpuWorld(gpu, cluster, hosts)
        key = cluster.define([schedule])
        # Both ends of the pairs inside (for types that NCCL doesn't reduce as we do) and across, and one a rank.
        assert world.connect(key) == 2 * (4 + 4) + 4
        assert all(np.array_equal(r, want) for r in world.all_reduce(key, values))
        cluster.put_in_force(key, Table.identity(schedule).swap_global(0, 2).swap_global(1, 3), version=1)
        assert world.connect(key) == 0
        assert all(np.array_equal(r, want) for r in world.all_reduce(key, values))
        calls = standin().calls()
        assert calls["ncclReduceScatter"] == calls["ncclAllGather"] == 4 * 3  # one a rank to connect, two executions


class FakeWorld:
    """What gpu.hosts asks of a world."""

    def __init__(self, inside: str, hosts: Sequence[int]) -> None:
        self.settings, self._hosts = dataclasses.replace(Config(), gpu_inside=inside), tuple(hosts)

    def hosts_of(self, devices: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._hosts[d] for d in devices)


def test_which_communicators_have_calls_inside_hosts():
    everyone: tuple[int, ...] = (0, 1, 2, 3)
    assert runtime_gpu.hosts(FakeWorld("nccl", [0, 0, 2, 2]), everyone) == (0, 0, 2, 2)  # type: ignore[arg-type]
    assert runtime_gpu.hosts(FakeWorld("nccl", [0, 0, 2, 2]), (3, 0, 1)) == (2, 0, 0)  # type: ignore[arg-type]
    assert runtime_gpu.hosts(FakeWorld("edges", [0, 0, 2, 2]), everyone) is None  # type: ignore[arg-type]
    assert runtime_gpu.hosts(FakeWorld("nccl", [0, 0, 0, 0]), everyone) is None  # type: ignore[arg-type]
    assert runtime_gpu.hosts(FakeWorld("nccl", [0, 1, 2, 3]), everyone) is None  # type: ignore[arg-type]


def test_a_device_that_has_not_joined():
    values = np.ones((2, 4), np.float32)
    with Gpu() as gpu, Cluster("inproc", 2) as cluster:
        world = GpuWorld(gpu, cluster)
        key = cluster.define([build("ring", Kind.ALL_REDUCE, 2)])
        world.connect(key)
        world.ordinals = [5, 6]
        with pytest.raises(NativeError, match=r"CUDA device \d has not joined"):
            world.all_reduce(key, values)


def test_a_table_that_was_not_connected():
    # The rule of staging: pairs are connected before their table comes into force. A breach is an error, no hang.
    values = np.ones((3, 4), np.float32)
    with Gpu() as gpu, Cluster("inproc", 3) as cluster:
        world = GpuWorld(gpu, cluster)
        key = cluster.define([build("ring", Kind.ALL_REDUCE, 3)])
        with pytest.raises(NativeError, match=r"step 0, edge \d->\d of graph \d, lane 0: the pair is not connected"):
            world.all_reduce(key, values)


def test_joining_again_after_a_failure():
    values = np.ones((2, 4), np.float32)
    with Gpu() as gpu, Cluster("inproc", 2) as cluster:
        world = GpuWorld(gpu, cluster)
        key = cluster.define([build("ring", Kind.ALL_REDUCE, 2)])
        world.connect(key)
        standin().lib.standin_fail(b"ncclSend", 1, 2)
        with pytest.raises(NativeError, match="ncclSend"):
            world.all_reduce(key, values)
        with pytest.raises(NativeError, match="can't go on"):
            world.all_reduce(key, values)
        world.join()
        world.connect(key)
        assert all((r == 2).all() for r in world.all_reduce(key, values))
