"""The GPU executor over the stand-in: teams of ranks in one process, driven through the C interface."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cffi
import numpy as np
import numpy.typing as npt
from native.harness import DTYPE, REDUCE, guarded
from needs import need

from jaxcoll.runtime.native import NATIVE_DIR, Native, NativeError, load
from jaxcoll.schedule import Kind, Schedule, Table, encode
from jaxcoll.telemetry import RECORD_DTYPE

Array = npt.NDArray[Any]

NS = 1_000_000_000
LIMIT_S = 20.0  # of one wait: what takes longer hangs
SLICE_S = 0.25  # of a wait
CANARY = 64
STANDIN_DECLARATIONS = """
void standin_reset(uint64_t seed);
void standin_fail(const char* function, int64_t nth, int code);
int64_t standin_calls(const char* function);
int64_t standin_all_calls(char* out, int64_t size);
int64_t standin_breaches(char* out, int64_t size);
int64_t standin_stuck(char* out, int64_t size);
void standin_break(int device);
void standin_delay(int from, int to, int64_t ns);
int64_t standin_communicators(void);
int64_t standin_left(char* out, int64_t size);
void* standin_stream(int device);
void standin_stream_end(void* stream);
"""


class Clock:
    """Seconds in which this process ran. It may be stopped for minutes (SIGSTOP): nothing hangs meanwhile."""

    def __init__(self) -> None:
        self._ran, self._seen = 0.0, time.monotonic()
        threading.Thread(target=self._tick, daemon=True).start()

    def _since(self) -> float:
        return min(time.monotonic() - self._seen, SLICE_S)

    def _tick(self) -> None:
        while True:
            time.sleep(SLICE_S / 10)
            self._ran, self._seen = self._ran + self._since(), time.monotonic()

    def now(self) -> float:
        return self._ran + self._since()


@functools.cache
def clock() -> Clock:
    return Clock()


class Standin:
    """The stand-in library's controls."""

    def __init__(self) -> None:
        path = load().path.parent / "libjaxcoll_standin.so"
        if not path.is_file():
            path = NATIVE_DIR / "libjaxcoll_standin.so"
        need(path.is_file(), f"{path} (make native builds it)", "NATIVE")
        self.path = path
        self.ffi = cffi.FFI()
        self.ffi.cdef(STANDIN_DECLARATIONS)
        self.lib: Any = self.ffi.dlopen(str(path), os.RTLD_NOW | os.RTLD_NODELETE)

    def _text(self, call: Any) -> str:
        out = self.ffi.new("char[]", 1 << 16)
        call(out, 1 << 16)
        return self.ffi.string(out).decode()  # type: ignore[union-attr]

    def _counts(self, call: Any) -> dict[str, int]:
        return {name: int(count) for name, count in (line.split() for line in self._text(call).splitlines())}

    def calls(self) -> dict[str, int]:
        """How often each function was called since the last reset or injection."""
        return self._counts(self.lib.standin_all_calls)

    def breaches(self) -> str:
        return self._text(self.lib.standin_breaches)

    def stuck(self) -> str:
        return self._text(self.lib.standin_stuck)

    def left(self) -> dict[str, int]:
        """The communicators, streams, events and blocks of memory that are there once the streams are through."""
        until = clock().now() + LIMIT_S
        while self.stuck() and clock().now() < until:
            time.sleep(0.0005)
        return self._counts(self.lib.standin_left)

    def stream(self, device: int) -> Any:
        """A stream of a rank's program, on which its collectives are enqueued."""
        return self.lib.standin_stream(device)


@functools.cache
def standin() -> Standin:
    return Standin()


@dataclass
class Run:
    """One rank's operands and results: they must live until the execution is over."""

    inputs: list[Array]
    outputs: list[Array]
    blocks: int

    def result(self) -> Array:
        for leaf in self.outputs:
            assert (leaf.base[-CANARY:] == 0xA5).all(), "bytes behind a result were written"
        return np.concatenate([leaf.reshape(self.blocks, -1) for leaf in self.outputs], axis=1).reshape(-1)


class Team:
    """A communicator of `ranks` stand-in devices, all in this process. hosts: a number for the host of each rank."""

    _ids = itertools.count(1)

    def __init__(
        self,
        gpu: Gpu,
        ranks: int,
        *,
        pairs: bool = True,
        record: bool = True,
        timeout: float = 3600.0,
        max_streams: int = 32,
        hosts: Sequence[int] | None = None,
    ) -> None:
        self.gpu, self.native, self.ranks = gpu, gpu.native, ranks
        ffi, lib = self.native.ffi, self.native.lib
        self.id = next(self._ids)
        unique = ffi.new("uint8_t[128]")
        self.native.check(lib.jc_gpu_unique_id(gpu.handle, unique))
        on_host = ffi.NULL if hosts is None else ffi.new("int32_t[]", list(hosts))
        options = ffi.new(
            "jc_gpu_options*",
            {
                "timeout_ns": int(timeout * NS),
                "pairs": pairs,
                "record": record,
                "max_streams": max_streams,
                "max_ctas": 0,
                "hosts": on_host,
            },
        )
        everyone = ffi.new("int[]", list(range(ranks)))
        self.handle = lib.jc_gpu_join(
            gpu.handle, options, self.id, f"team{self.id}".encode(), ranks, everyone, everyone, ranks, unique
        )
        if self.handle == ffi.NULL:
            raise NativeError(self.native.text(lib.jc_last_error()))
        gpu.teams.append(self)
        self._launch = itertools.count(1)
        self.streams = [standin().stream(r) for r in range(ranks)]

    def program(self, schedule: Schedule, table: Table | None = None) -> tuple[int, int]:
        """(handle, communicators made) of a schedule under a table, connected."""
        blob, rows = encode(schedule), b"" if table is None else table.to_bytes()
        made = self.native.ffi.new("int*")
        handle = self.native.lib.jc_gpu_program(
            self.handle, self.native.buffer(blob), len(blob), self.native.buffer(rows), len(rows), made
        )
        return self.native.check(handle), made[0]

    def enqueue(
        self,
        rank: int,
        program: int,
        kind: Kind,
        value: Array,
        reduce: str,
        launch: int,
        leaves: Sequence[int] | None = None,
    ) -> Run:
        n, ffi = self.ranks, self.native.ffi
        in_blocks = n if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1
        out_blocks = n if kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) else 1
        counts = [value.size // in_blocks] if leaves is None else list(leaves)
        cuts = np.cumsum(counts)[:-1]
        inputs = [np.ascontiguousarray(p) for p in np.split(value.reshape(in_blocks, sum(counts)), cuts, axis=1)]
        run = Run(inputs, [guarded(c * out_blocks, value.dtype) for c in counts], out_blocks)
        self.gpu.kept.append(run)
        pointers = [
            ffi.new("void*[]", [ffi.cast("void*", a.ctypes.data) for a in s]) for s in (run.inputs, run.outputs)
        ]
        code = REDUCE[reduce] if kind.reduces else REDUCE["none"]
        stream = ffi.cast("void*", int(standin().ffi.cast("intptr_t", self.streams[rank])))
        self.native.check(
            self.native.lib.jc_gpu_enqueue(
                self.handle, program, rank, launch, 1, 0, code, DTYPE[value.dtype.name], len(counts), *pointers,
                self.native.int64s(counts), stream,
            )
        )  # fmt: skip
        return run

    def wait(self, timeout: float = LIMIT_S) -> None:
        """Until all executions are over; raises NativeError with the communicator's failure."""
        until = clock().now() + timeout
        while self.native.check(self.native.lib.jc_gpu_wait(self.handle, int(SLICE_S * NS))) != 0:
            assert clock().now() < until, f"hangs: {standin().stuck()}"

    def run(
        self, schedule: Schedule, inputs: Sequence[Array], reduce: str = "sum", *, program: int | None = None,
        leaves: Sequence[int] | None = None,
    ) -> list[Array]:  # fmt: skip
        """One execution on all ranks, enqueued by a thread each, and its results."""
        program = self.program(schedule)[0] if program is None else program
        launch, runs = next(self._launch), dict[int, Run]()

        def one(rank: int) -> None:
            runs[rank] = self.enqueue(rank, program, schedule.kind, inputs[rank], reduce, launch, leaves)

        failures = on_threads([functools.partial(one, r) for r in range(self.ranks)])
        if failures:
            raise failures[0]
        self.wait()
        return [runs[r].result() for r in range(self.ranks)]

    def leave(self) -> None:
        if self.handle is not None:
            self.native.lib.jc_gpu_leave(self.handle)
            self.handle = None
            for stream in self.streams:
                standin().lib.standin_stream_end(stream)


class Gpu:
    """The GPU side of the library, opened on the stand-in.

    Leaving the block checks that no rule of use was broken and nothing was left behind, but one of the kind `leaves`.
    """

    def __init__(self, seed: int = 1, leaves: str = "") -> None:
        self.leaves = leaves
        self.native: Native = load()
        self.seed = seed
        self.teams: list[Team] = []
        self.kept: list[object] = []

    def __enter__(self) -> Gpu:
        standin().lib.standin_reset(self.seed)
        self.before = standin().left()
        ffi = self.native.ffi
        self.handle = self.native.lib.jc_gpu_open(str(standin().path).encode(), ffi.new("char*[]", 0), 0)
        if self.handle == ffi.NULL:
            raise NativeError(self.native.text(self.native.lib.jc_last_error()))
        return self

    def team(self, ranks: int, **options: Any) -> Team:
        return Team(self, ranks, **options)

    def records(self) -> npt.NDArray[Any]:
        out = np.zeros(1 << 14, RECORD_DTYPE)
        dropped = self.native.ffi.new("uint64_t*")
        n = self.native.lib.jc_gpu_records_drain(
            self.handle, self.native.ffi.cast("void*", out.ctypes.data), len(out), dropped
        )
        assert dropped[0] == 0
        return out[:n]

    def __exit__(self, kind: Any, *_: object) -> None:
        for team in self.teams:
            team.leave()
        self.native.lib.jc_gpu_close(self.handle)
        standin().lib.standin_delay(0, 0, 0)
        breaches, left = standin().breaches(), standin().left()
        standin().lib.standin_reset(self.seed)
        if kind is None:
            assert not breaches, breaches
            more = {name: count - self.before[name] for name, count in left.items() if count != self.before[name]}
            assert more in ({}, {self.leaves: 1}), f"left behind: {more}"


def on_threads(calls: Sequence[Any]) -> list[BaseException]:
    """Runs each call on a thread of its own; returns the exceptions, in the order of calls."""
    failures: dict[int, BaseException] = {}

    def guard(index: int) -> None:
        try:
            calls[index]()
        except BaseException as error:
            failures[index] = error

    threads = [threading.Thread(target=guard, args=(i,), daemon=True) for i in range(len(calls))]
    for t in threads:
        t.start()
    until = clock().now() + LIMIT_S
    for t in threads:
        while t.is_alive():
            t.join(SLICE_S)
            assert not t.is_alive() or clock().now() < until, f"a thread hangs; the device: {standin().stuck()}"
    return [failures[i] for i in sorted(failures)]
