"""Worlds inside one process, joined by every transport, driven through the C interface: no JAX, no second process."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxcoll.runtime.native import NativeError, load
from jaxcoll.schedule import Kind, Schedule, Table, encode
from jaxcoll.telemetry import RECORD_SIZE, Record, as_records
from jaxcoll.telemetry.record import to_record

Array = npt.NDArray[Any]
Place = tuple[int, int, int]
"""(call site, launch, index): an execution."""

NS = 1_000_000_000
LIMIT_S = 40.0  # of one wait: what takes longer hangs
REDUCE = {"sum": 0, "max": 1, "min": 2, "prod": 3, "none": 4}
DTYPE = {
    "bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "uint32": 8, "uint64": 9,
    "float16": 10, "float32": 11, "float64": 12, "complex64": 15, "bfloat16": 16, "complex128": 18, "float8_e5m2": 19,
    "float8_e4m3fn": 20, "float8_e4m3b11fnuz": 23, "float8_e5m2fnuz": 24, "float8_e4m3fnuz": 25, "float8_e4m3": 28,
    "float8_e3m4": 29,
}  # fmt: skip
TRANSPORTS = ("inproc", "fake", "fake-push", "shm", "shm-ring", "tcp", "mixed")
CANARY = 64  # bytes behind every result that nobody may write


def numpy_dtype(name: str) -> np.dtype[Any]:
    """A dtype by name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


class LogCollector:
    """What the native library logs while this is in force (the log is one a process); `also` hears every line."""

    _kept: ClassVar[list[Any]] = []  # a native thread may still be about to call one that is no longer in force

    def __init__(self, also: Callable[[str], None] | None = None) -> None:
        self.lines: list[str] = []
        native = load()

        def keep(message: Any) -> None:
            self.lines.append(native.text(message))
            if also is not None:
                also(self.lines[-1])

        self._callback = native.ffi.callback("void(const char*)", keep)
        self._kept.append(self._callback)

    def __enter__(self) -> LogCollector:
        load().lib.jc_set_log(self._callback)
        return self

    def __exit__(self, *_: object) -> None:
        load().lib.jc_set_log(load().ffi.NULL)


@dataclass
class Op:
    """One rank's execution: its buffers live as long as this does."""

    cluster: Cluster
    handle: Any
    rank: int
    inputs: list[Array]
    outputs: list[Array]
    kept: list[Any]
    blocks: int

    def wait(self, timeout: float = LIMIT_S) -> bool:
        """True: done; False: not yet. Raises NativeError with the operation's failure."""
        result = self.cluster.native.lib.jc_op_wait(self.handle, int(timeout * NS))
        self.cluster.native.check(result)
        return result == 0

    def error(self, timeout: float = LIMIT_S) -> str:
        """The text with which the operation failed; empty if it succeeded."""
        try:
            assert self.wait(timeout), f"rank {self.rank} has neither finished nor failed after {timeout} s"
        except NativeError as error:
            return str(error)
        return ""

    def result(self) -> Array:
        """The rank's result as one 1-D array, blocks one behind the other; checks what lies behind it."""
        for leaf in self.outputs:
            assert (leaf.base[-CANARY:] == 0xA5).all(), f"rank {self.rank}: bytes behind its result were written"
        return np.concatenate([leaf.reshape(self.blocks, -1) for leaf in self.outputs], axis=1).reshape(-1)

    def free(self) -> None:
        self.cluster.native.lib.jc_op_free(self.handle)


def guarded(size: int, dtype: np.dtype[Any]) -> Array:
    """A result buffer full of 0xA5, with a canary behind it."""
    raw = np.full(size * dtype.itemsize + CANARY, 0xA5, dtype=np.uint8)
    return raw[: size * dtype.itemsize].view(dtype)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection over the loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@dataclass
class Options:
    """jc_options in seconds and bytes; `threads` off where the fake network drives everything."""

    timeout: float = 30.0
    warn: float = 20.0
    mismatch: float = 0.3
    spin: float = 0.0
    helpers: int = 0
    record: bool = False
    lane_bytes: int = 0
    landing_bytes: int = 0
    early_bytes: int = 0
    connections: int = 2
    loopback: bool = False  # tcp: real TCP connections, not UNIX sockets
    threads: bool = True  # off: nobody reads but `jc_world_pump`
    quiet: bool = False
    keep_segments: bool = False  # shared memory stays open for the test, as `Cluster.segments`
    seed: int = 1
    read: Callable[[int, int], bool] = field(default=lambda _a, _b: True)  # may process a read process b?


class Cluster:
    """`ranks` devices over as many worlds as the transport wants; device ids are 0..ranks-1.

    Close it (or use it as a context manager) only when no operation is open, or when the test wants them to fail.
    """

    def __init__(self, transport: str, ranks: int, *, run: bool = True, only: int | None = None, **options: Any):
        self.transport, self.ranks = transport, ranks
        self.options = Options(**options)
        self.native = load()
        per_world = {"inproc": ranks, "mixed": 2}.get(transport, 1)
        self.devices = [list(range(i, min(i + per_world, ranks))) for i in range(0, ranks, per_world)]
        self.process_of = [p for p, devices in enumerate(self.devices) for _ in devices]
        self.fake: Any = None
        self.sockets: dict[tuple[int, int], list[socket.socket]] = {}  # kept only by tests that break connections
        self.segments: list[int] = []
        self.random = random.Random(self.options.seed)
        self._launch = itertools.count(1)
        self._set_key = itertools.count(1)
        self.programs: dict[tuple[int, int], list[int]] = {}  # (set key, world) -> handles
        self.worlds = [self._create(p) for p in range(len(self.devices))]
        self.alive = set(range(len(self.worlds)))
        self._join()
        for p, world in enumerate(self.worlds if run else []):
            if only in (None, p):  # the others are played by the test
                self.native.check(self.native.lib.jc_world_start(world))

    def _create(self, me: int) -> Any:
        o = self.options
        values = {
            "timeout_ns": int(o.timeout * NS), "warn_ns": int(o.warn * NS), "mismatch_ns": int(o.mismatch * NS),
            "spin_ns": int(o.spin * NS), "helpers": o.helpers, "record": int(o.record),
            "threads": int(o.threads and not self.transport.startswith("fake")), "lane_bytes": o.lane_bytes,
            "landing_bytes": o.landing_bytes, "early_bytes": o.early_bytes, "quiet": int(o.quiet),
        }  # fmt: skip
        world = self.native.lib.jc_world_create(self.native.ffi.new("jc_options*", values), len(self.devices), me)
        for p, devices in enumerate(self.devices):
            self.native.check(self.native.lib.jc_world_add_devices(world, p, self.native.int64s(devices), len(devices)))
        return world

    def drain(self, world: int, most: int = 1000) -> list[Record]:
        """The records of a process that nobody has taken yet."""
        ffi = self.native.ffi
        out, dropped = ffi.new("uint8_t[]", most * RECORD_SIZE), ffi.new("uint64_t*")
        count = self.native.lib.jc_records_drain(self.worlds[world], out, most, dropped)
        return [to_record(r) for r in as_records(bytes(ffi.buffer(out, count * RECORD_SIZE)))]

    def _join(self) -> None:
        lib = self.native.lib
        pairs = list(itertools.permutations(range(len(self.worlds)), 2))
        if self.transport.startswith("fake"):
            self.fake = lib.jc_fake_create(self.options.seed, int(self.transport == "fake"))
            for a, b in pairs:
                self.native.check(lib.jc_world_fake_peer(self.worlds[a], self.fake, b))
        elif self.transport in ("shm", "shm-ring"):
            self._join_shm(range(len(self.worlds)))
            self._join_tcp([(a, b) for a, b in pairs if a < b], carries_data=False)
        elif self.transport == "tcp":
            self._join_tcp([(a, b) for a, b in pairs if a < b], carries_data=True)
        elif self.transport == "mixed":  # worlds of two devices; the first half of them shares memory
            near = range((len(self.worlds) + 1) // 2)
            self._join_shm(near)
            for a, b in pairs:
                if a < b:
                    self._join_tcp([(a, b)], carries_data=not (a in near and b in near))

    def _join_shm(self, processes: range) -> None:
        lib, places = self.native.lib, len(processes)
        fds = [os.memfd_create("jaxcoll-test") for _ in processes]
        for place, p in enumerate(processes):
            os.ftruncate(fds[place], lib.jc_shm_segment_bytes(places))
            self.native.check(lib.jc_world_shm_create(self.worlds[p], fds[place], places, place))
        for a, b in itertools.permutations(range(places), 2):
            read = self.transport != "shm-ring" and self.options.read(processes[a], processes[b])
            self.native.check(
                lib.jc_world_shm_peer(self.worlds[processes[a]], processes[b], fds[b], b, os.getpid(), int(read))
            )
        if self.options.keep_segments:
            self.segments = fds
            return
        for fd in fds:
            os.close(fd)

    def _join_tcp(self, pairs: Sequence[tuple[int, int]], carries_data: bool) -> None:
        for a, b in pairs:
            count = self.options.connections if carries_data else 1
            made = [tcp_pair() if self.options.loopback else socket.socketpair() for _ in range(count)]
            for me, peer, side in ((a, b, 0), (b, a, 1)):
                fds = self.native.ffi.new("int[]", [os.dup(s[side].fileno()) for s in made])
                self.native.check(self.native.lib.jc_world_tcp_peer(self.worlds[me], peer, fds, count, carries_data))
            self.sockets[a, b] = [s[0] for s in made]
            self.sockets[b, a] = [s[1] for s in made]

    def kill(self, p: int) -> None:
        """Process p is gone as after kill -9: its connections end, nothing is said."""
        self.alive.discard(p)
        if self.fake is not None:
            self.native.lib.jc_fake_kill(self.fake, p)
            return
        for (a, _), sockets in self.sockets.items():
            if a == p:
                for s in sockets:
                    s.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for world in self.worlds:
            self.native.lib.jc_world_stop(world)
        for world in self.worlds:
            self.native.lib.jc_world_free(world)
        self.worlds = []
        if self.fake is not None:
            self.native.lib.jc_fake_free(self.fake)
            self.fake = None
        for sockets in self.sockets.values():
            for s in sockets:
                s.close()
        self.sockets = {}
        for fd in self.segments:
            os.close(fd)
        self.segments = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- programs and tables

    def load(self, world: int, schedule: Schedule) -> int:
        blob = encode(schedule)
        return self.native.check(
            self.native.lib.jc_program_load(self.worlds[world], self.native.buffer(blob), len(blob))
        )

    def define(self, schedules: Sequence[Schedule], devices: Sequence[int] | None = None, chosen: int = 0) -> int:
        """A new schedule set for the communicator over `devices` (all); returns its key."""
        devices = range(self.ranks) if devices is None else devices
        key = next(self._set_key)
        for p in sorted({self.process_of[d] for d in devices}):
            self.programs[key, p] = [self.load(p, s) for s in schedules]
            programs = self.native.int64s(self.programs[key, p])
            self.native.check(
                self.native.lib.jc_set_define(
                    self.worlds[p], key, self.native.int64s(devices), len(devices), programs, len(schedules), chosen
                )
            )
        return key

    def group(self, devices: Sequence[int] | None = None) -> int:
        devices = range(self.ranks) if devices is None else devices
        return self.native.lib.jc_group_id(self.native.int64s(devices), len(devices))

    def stage(self, world: int, key: int, version: int, program: int, table: Table | None) -> None:
        blob = table.to_bytes() if table is not None else b""
        self.native.check(
            self.native.lib.jc_set_stage(
                self.worlds[world], self.group(), key, version, program, self.native.buffer(blob), len(blob)
            )
        )

    def started(self, world: int, key: int) -> list[Place]:
        """The last execution begun of every call site and executable."""
        ffi, most = self.native.ffi, 64
        sites, launches, indices = ffi.new("uint64_t[]", most), ffi.new("int64_t[]", most), ffi.new("uint32_t[]", most)
        n = self.native.lib.jc_set_started(self.worlds[world], self.group(), key, sites, launches, indices, most)
        return [(sites[i], launches[i], indices[i]) for i in range(n)]

    def propose(self, world: int, key: int, version: int, points: Sequence[Place]) -> None:
        kinds = ("uint64_t[]", "int64_t[]", "uint32_t[]")
        places = [self.native.ffi.new(kind, [point[i] for point in points]) for i, kind in enumerate(kinds)]
        self.native.check(
            self.native.lib.jc_set_propose(self.worlds[world], self.group(), key, version, *places, len(points))
        )

    def decide(self, world: int, key: int, version: int, commit: bool) -> None:
        self.native.check(self.native.lib.jc_set_decide(self.worlds[world], self.group(), key, version, int(commit)))

    def put_in_force(self, key: int, table: Table | None, version: int = 1) -> None:
        """A table of the set's first program for every execution that has not begun, on all worlds."""
        for world in range(len(self.worlds)):
            self.stage(world, key, version, self.programs[key, world][0], table)
            points = [(site, launch, index + 1) for site, launch, index in self.started(world, key)]
            self.propose(world, key, version, points)
            self.decide(world, key, version, commit=True)

    # ---------------------------------------------------------------- operations

    def start(
        self, rank: int, kind: Kind, value: Array, key: int, *, launch: int, site: int = 1, reduce: str = "sum",
        leaves: Sequence[int] | None = None, devices: Sequence[int] | None = None,
    ) -> Op:  # fmt: skip
        """Begins one rank's execution. `value`: its blocks in a row; `leaves`: elements a block of each leaf."""
        devices = list(range(self.ranks)) if devices is None else list(devices)
        n = len(devices)
        in_blocks = n if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1
        out_blocks = n if kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) else 1
        counts = [value.size // in_blocks] if leaves is None else list(leaves)
        assert sum(counts) * in_blocks == value.size
        cuts = np.cumsum(counts)[:-1]
        inputs = [np.ascontiguousarray(part) for part in np.split(value.reshape(in_blocks, sum(counts)), cuts, axis=1)]
        outputs = [guarded(c * out_blocks, value.dtype) for c in counts]
        ffi, pointers = self.native.ffi, []
        for arrays in (inputs, outputs):
            pointers.append(ffi.new("void*[]", [ffi.cast("void*", a.ctypes.data) for a in arrays]))
        code = REDUCE[reduce] if kind.reduces else REDUCE["none"]
        handle = self.native.lib.jc_op_start(
            self.worlds[self.process_of[devices[rank]]], devices[rank], launch, int(kind), code,
            DTYPE[value.dtype.name], site, key, self.native.int64s(devices), n, 1, len(counts), pointers[0],
            pointers[1], self.native.int64s(counts),
        )  # fmt: skip
        return Op(self, handle, rank, inputs, outputs, [value.copy(), pointers], out_blocks)

    def new_launch(self) -> int:
        return next(self._launch)

    def run(self, schedule: Schedule, inputs: Sequence[Array], reduce: str = "sum", *, key: int | None = None,
            leaves: Sequence[int] | None = None, site: int = 1, threads: bool = False) -> list[Array]:  # fmt: skip
        """One execution on all ranks, and its results; `threads`: every rank begins on a thread of its own."""
        key = self.define([schedule]) if key is None else key
        launch = self.new_launch()

        def begin(rank: int) -> Op:
            return self.start(
                rank, schedule.kind, inputs[rank], key, launch=launch, site=site, reduce=reduce, leaves=leaves
            )

        order = list(range(self.ranks))
        self.random.shuffle(order)
        ops: dict[int, Op] = {}
        if threads:
            on_threads([lambda r=r: ops.__setitem__(r, begin(r)) for r in order])
        else:
            for r in order:
                ops[r] = begin(r)
        self.finish(list(ops.values()))
        results = [ops[r].result() for r in range(self.ranks)]
        for op in ops.values():
            assert np.array_equal(np.concatenate([i.reshape(-1) for i in op.inputs]).view(np.uint8),
                                  self._leafwise(op, leaves).view(np.uint8)), "an operand was written"  # fmt: skip
            op.free()
        return results

    @staticmethod
    def _leafwise(op: Op, leaves: Sequence[int] | None) -> Array:
        value = op.kept[0]
        if leaves is None:
            return value
        blocks = value.size // max(1, sum(leaves)) or 1
        parts = np.split(value.reshape(blocks, sum(leaves)), np.cumsum(leaves)[:-1], axis=1)
        return np.concatenate([np.ascontiguousarray(p).reshape(-1) for p in parts])

    def finish(self, ops: Sequence[Op], limit: float = LIMIT_S) -> None:
        """Waits for all; raises NativeError with the first failure."""
        if self.fake is not None:
            self.settle(lambda: all(op.wait(0) for op in ops), limit)
        for op in ops:
            assert op.wait(limit), f"rank {op.rank} of {self.transport} hangs"

    def settle(self, done: Callable[[], bool], limit: float = LIMIT_S) -> None:
        """Fake network: messages and tasks in a random order until `done`, or until nothing can happen any more."""
        assert self.fake is not None
        lib, until = self.native.lib, time.monotonic() + limit
        while time.monotonic() < until:
            moved = any([lib.jc_fake_step(self.fake) for _ in range(self.random.randrange(1, 24))])
            quiet = not moved
            for p in self.random.sample(sorted(self.alive), len(self.alive) if quiet else 1):
                moved = bool(lib.jc_world_pump(self.worlds[p])) or moved
            if quiet and (done() or not moved):
                return
        raise AssertionError("the fake network doesn't come to rest")

    def tick(self) -> None:
        for p in self.alive:
            self.native.lib.jc_world_tick(self.worlds[p])


def on_threads(calls: Sequence[Callable[[], Any]]) -> None:
    """Runs each call on a thread of its own; raises the first exception."""
    failures: list[BaseException] = []

    def guard(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guard, args=(c,), daemon=True) for c in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join(LIMIT_S)
        assert not t.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails if the block takes longer."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    assert took <= seconds, f"{took:.2f} s, allowed are {seconds} s"
