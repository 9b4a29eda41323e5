"""CUDA's and NCCL's own calls by ctypes, for the rows of one_gpu.py: the same on a device and over the stand-in."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LIMIT_S = 60.0
TO_DEVICE, FROM_DEVICE, ON_DEVICE = 1, 2, 3
FLOAT32, BYTES, SUM = 7, 0, 0


class Cuda:
    """Memory, streams and events of device 0, from the library that jaxcoll has opened."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.main = self.stream()

    def _check(self, code: int) -> None:
        if code != 0:
            self.lib.cudaGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"CUDA error {code}: {self.lib.cudaGetErrorString(code).decode()}")

    def stream(self) -> int:
        s = ctypes.c_void_p()
        self._check(self.lib.cudaStreamCreateWithFlags(ctypes.byref(s), 1))
        return s.value or 0

    def event(self) -> ctypes.c_void_p:
        e = ctypes.c_void_p()
        self._check(self.lib.cudaEventCreateWithFlags(ctypes.byref(e), 0))
        return e

    def record(self, event: ctypes.c_void_p, stream: int) -> None:
        self._check(self.lib.cudaEventRecord(event, ctypes.c_void_p(stream)))

    def wait(self, stream: int) -> None:
        """Until all that the stream holds is done."""
        event = self.event()
        self.record(event, stream)
        until = time.monotonic() + LIMIT_S
        while (code := self.lib.cudaEventQuery(event)) == 600:
            if time.monotonic() > until:
                raise TimeoutError(f"a stream hangs for {LIMIT_S:.0f} s")
            time.sleep(0.0001)
        self._check(code)

    def _copy(self, target: Any, source: Any, nbytes: int, kind: int) -> None:
        self._check(
            self.lib.cudaMemcpyAsync(
                ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(nbytes), kind,
                ctypes.c_void_p(self.main),
            )
        )  # fmt: skip

    def upload(self, value: np.ndarray[Any, Any]) -> int:
        p, value = ctypes.c_void_p(), np.ascontiguousarray(value)
        size = ctypes.c_size_t(max(1, value.nbytes))
        self._check(self.lib.cudaMallocAsync(ctypes.byref(p), size, ctypes.c_void_p(self.main)))
        self._copy(p.value, value.ctypes.data, value.nbytes, TO_DEVICE)
        self.wait(self.main)
        return p.value or 0

    def download(self, p: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.empty_like(like)
        self._copy(out.ctypes.data, p, out.nbytes, FROM_DEVICE)
        self.wait(self.main)
        return out

    def free(self, memory: Sequence[int]) -> None:
        for p in memory:
            self._check(self.lib.cudaFreeAsync(ctypes.c_void_p(p), ctypes.c_void_p(self.main)))
        self.wait(self.main)

    def timed_ms(self, work: Callable[[], None], stream: int, rounds: int) -> float:
        """Milliseconds between two events around `rounds` times `work`, over `rounds`; once before, unmeasured."""
        begin, end, ms = self.event(), self.event(), ctypes.c_float()
        work()
        self.record(begin, stream)
        for _ in range(rounds):
            work()
        self.record(end, stream)
        self.wait(stream)
        self._check(self.lib.cudaEventElapsedTime(ctypes.byref(ms), begin, end))
        return ms.value / rounds

    def copy_ms(self, source: int, target: int, nbytes: int, rounds: int) -> float:
        return self.timed_ms(lambda: self._copy(target, source, nbytes, ON_DEVICE), self.main, rounds)

    def calls(self, function: str) -> int | None:
        """How often the stand-in was called; None on a device, where nobody counts."""
        counter = getattr(self.lib, "standin_calls", None)
        return None if counter is None else int(counter(function.encode()))

    def breaches(self) -> str:
        """What rules of use the stand-in saw broken; nothing on a device."""
        tell = getattr(self.lib, "standin_breaches", None)
        out = ctypes.create_string_buffer(1 << 16)
        if tell is not None:
            tell(out, ctypes.c_int64(len(out)))
        return out.value.decode()


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


class Nccl:
    """NCCL's blocking calls, for a comparison with its own AllReduce."""

    def __init__(self, path: str, cuda: Cuda) -> None:
        self.lib, self.cuda = ctypes.CDLL(path), cuda

    def _check(self, code: int) -> None:
        if code != 0:
            self.lib.ncclGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"NCCL error {code}: {self.lib.ncclGetErrorString(code).decode()}")

    def _join(self, ranks: int) -> list[ctypes.c_void_p]:
        unique, comms = UniqueId(), [ctypes.c_void_p() for _ in range(ranks)]
        self._check(self.lib.ncclGetUniqueId(ctypes.byref(unique)))
        codes = [0] * ranks

        def one(rank: int) -> None:
            codes[rank] = self.lib.ncclCommInitRank(ctypes.byref(comms[rank]), ranks, unique, rank)

        threads = [threading.Thread(target=one, args=(r,)) for r in range(ranks)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for code in codes:
            self._check(code)
        return comms

    def all_reduce_ms(self, sources: Sequence[int], targets: Sequence[int], count: int, rounds: int) -> float:
        """Milliseconds of a float32 sum over all ranks: the slowest rank's, each with a stream and a thread."""
        comms = self._join(len(sources))
        took, failures = [0.0] * len(sources), list[BaseException]()

        def one(rank: int) -> None:
            stream = self.cuda.stream()

            def work() -> None:
                self._check(
                    self.lib.ncclAllReduce(
                        ctypes.c_void_p(sources[rank]), ctypes.c_void_p(targets[rank]), ctypes.c_size_t(count), FLOAT32,
                        SUM, comms[rank], ctypes.c_void_p(stream),
                    )
                )  # fmt: skip

            try:
                took[rank] = self.cuda.timed_ms(work, stream, rounds)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=(r,)) for r in range(len(sources))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failures:
            raise failures[0]
        for comm in comms:
            self._check(self.lib.ncclCommDestroy(comm))
        return max(took)

    def to_itself_ms(self, source: int, target: int, nbytes: int, rounds: int) -> float:
        """Milliseconds of a send of one rank to itself, in one group with its receive."""
        (comm,) = self._join(1)
        stream = ctypes.c_void_p(self.cuda.main)

        def work() -> None:
            size = ctypes.c_size_t(nbytes)
            self._check(self.lib.ncclGroupStart())
            self._check(self.lib.ncclSend(ctypes.c_void_p(source), size, BYTES, 0, comm, stream))
            self._check(self.lib.ncclRecv(ctypes.c_void_p(target), size, BYTES, 0, comm, stream))
            self._check(self.lib.ncclGroupEnd())

        took = self.cuda.timed_ms(work, self.cuda.main, rounds)
        self._check(self.lib.ncclCommDestroy(comm))
        return took
