"""Takes records out of the native library, the CPU's and the GPU's, off the collective's path.

The library wakes us with `sem_post`, given to it as a plain C function: no Python runs, and no interpreter lock is
waited for, on a thread that moves data.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxcoll.runtime import gpu
from jaxcoll.runtime.world import World
from jaxcoll.telemetry import RECORD_SIZE, Records, as_records, empty_records

log = logging.getLogger("jaxcoll")

BATCH = 8192  # records taken at a time
_WAKE_AT = 1024  # records held by the library at which it wakes us
_PATIENCE_S = 0.1  # few records wait no longer than this
_SAMPLED_S = 0.5  # nor where executions are so many that only some are recorded

Sink = Callable[[Records, int], None]


class _Semaphore:
    """A POSIX semaphore, for the sake of `sem_post`'s address."""

    class _Time(ctypes.Structure):
        _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._memory = ctypes.create_string_buffer(64)  # sem_t is 32 bytes or fewer on every Linux
        if self._libc.sem_init(self._memory, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "sem_init")
        self.post_address = ctypes.cast(self._libc.sem_post, ctypes.c_void_p).value or 0
        self.address = ctypes.addressof(self._memory)

    def post(self) -> None:
        self._libc.sem_post(self._memory)

    def wait(self, timeout: float) -> None:
        """Until posted or `timeout` seconds are over; posts that have heaped up count as one."""
        at = time.clock_gettime(time.CLOCK_REALTIME) + timeout
        until = self._Time(int(at), int(at % 1 * 1e9))
        self._libc.sem_timedwait(self._memory, ctypes.byref(until))
        while self._libc.sem_trywait(self._memory) == 0:
            pass


class Drain:
    """A thread that hands every batch of records to `sink(records, dropped)`.

    `dropped`: records that the library has lost since the last batch, because they weren't taken in time.
    """

    # The library may still post while a world ends, so the semaphores are never freed: one a world.
    _kept: list[_Semaphore] = []

    def __init__(self, world: World, sink: Sink):
        self._world, self._sink = world, sink
        self._semaphore = _Semaphore()
        Drain._kept.append(self._semaphore)
        self._stopping = False
        self._patience = _PATIENCE_S
        self._dropped = [0, 0]  # of the CPU's, of the GPU's
        self._gpu: Any = None
        self._stride = 1
        self.batches = self.records = 0
        ffi = world.native.ffi
        self._buffer = ffi.new("uint8_t[]", BATCH * RECORD_SIZE)
        self._wake = ffi.cast("void (*)(void*)", self._semaphore.post_address)
        self._notify(self._wake)
        self._thread = threading.Thread(target=self._run, name="jaxcoll-drain", daemon=True)
        self._thread.start()

    def _notify(self, wake: Any) -> None:
        """Says whom the library is to wake; nobody with NULL."""
        ffi, lib = self._world.native.ffi, self._world.native.lib
        about = (wake, ffi.cast("void*", self._semaphore.address), _WAKE_AT)
        lib.jc_records_notify(self._world.handle, *about)
        if self._gpu is not None:
            lib.jc_gpu_records_notify(self._gpu, *about)

    @property
    def dropped(self) -> int:
        """Records lost in the library so far."""
        return sum(self._dropped)

    @property
    def running(self) -> bool:
        """Whether records are taken."""
        return self._thread.is_alive()

    def take(self) -> int:
        """Drains what is there. Returns how many records."""
        if self._gpu is None and gpu.running() is not None and not self._stopping:  # they join at the first lowering
            self._gpu = gpu.running()
            self._notify(self._wake)
            self.sample(self._stride)
        lib = self._world.native.lib
        total = self._empty(0, lib.jc_records_drain, self._world.handle)
        return total if self._gpu is None else total + self._empty(1, lib.jc_gpu_records_drain, self._gpu)

    def _empty(self, source: int, drain: Callable[..., int], handle: Any) -> int:
        total = 0
        while True:
            records, dropped = self._take(source, drain, handle)
            if len(records) or dropped:
                self.batches += 1
                self.records += len(records)
                self._sink(records, dropped)
            total += len(records)
            if len(records) < BATCH:
                return total

    def _take(self, source: int, drain: Callable[..., int], handle: Any) -> tuple[Records, int]:
        ffi = self._world.native.ffi
        dropped: Any = ffi.new("uint64_t*")
        count = drain(handle, self._buffer, BATCH, dropped)
        data = bytes(ffi.buffer(self._buffer, count * RECORD_SIZE))
        lost = int(dropped[0]) - self._dropped[source]
        self._dropped[source] = int(dropped[0])
        return (as_records(data) if count else empty_records()), lost

    def sample(self, stride: int) -> None:
        """Has one execution in `stride` recorded from now on, the same ones in every process."""
        self._stride = stride
        self._world.native.lib.jc_records_sample(self._world.handle, stride)
        if self._gpu is not None:
            self._world.native.lib.jc_gpu_records_sample(self._gpu, stride)
        self._patience = _PATIENCE_S if stride <= 1 else _SAMPLED_S

    def _run(self) -> None:
        while not self._stopping:
            # By the clock, so that all processes of a job wake together: what one is held up by, all others wait for.
            self._semaphore.wait(self._patience - time.time() % self._patience)
            try:
                self.take()
            except Exception:
                # A store that is away for a while must not end the tuning for good.
                log.exception("jaxcoll could not hand records on; collectives are not affected")
                time.sleep(1.0)

    def stop(self) -> bool:
        """Ends the thread, once and for all; call it before the world stops. Returns whether it has ended."""
        self._stopping = True
        self._notify(self._world.native.ffi.NULL)
        self._semaphore.post()
        self._thread.join(2.0)
        return not self._thread.is_alive()
