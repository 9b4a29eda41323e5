"""Several ranks on one real GPU: correctness and times of the executor, without XLA. Run by run.sh; prints one table.

Not yet run on a device: written against the stand-in's interface and the public headers.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from native.harness import DTYPE  # noqa: E402

from jaxcoll.runtime import gpu  # noqa: E402
from jaxcoll.runtime.native import load  # noqa: E402
from jaxcoll.schedule import Kind, build, encode  # noqa: E402

ROUNDS = 20


class Cuda:
    """Device memory and streams, straight from the runtime that jaxcoll has opened."""

    def __init__(self) -> None:
        path = next(line.split()[-1] for line in gpu.versions() if line.startswith("CUDA runtime"))
        self.lib = ctypes.CDLL(path)

    def check(self, code: int) -> None:
        assert code == 0, f"CUDA error {code}"

    def upload(self, value: np.ndarray[Any, Any]) -> int:
        p = ctypes.c_void_p()
        self.check(self.lib.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(value.nbytes)))
        self.check(self.lib.cudaMemcpy(p, value.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(value.nbytes), 1))
        return p.value or 0

    def download(self, p: int, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        out = np.empty_like(like)
        self.check(
            self.lib.cudaMemcpy(out.ctypes.data_as(ctypes.c_void_p), ctypes.c_void_p(p), ctypes.c_size_t(out.nbytes), 2)
        )
        return out

    def stream(self) -> int:
        s = ctypes.c_void_p()
        self.check(self.lib.cudaStreamCreateWithFlags(ctypes.byref(s), 1))
        return s.value or 0


def measure(ranks: int, name: str, nbytes: int, pairs: bool, record: bool, cuda: Cuda) -> float:
    """Milliseconds of an all_reduce of float32, wall clock over ROUNDS executions in a queue; checks the sum first."""
    native, handle = load(), gpu.opened()
    ffi, lib = native.ffi, native.lib
    unique, made = ffi.new("uint8_t[128]"), ffi.new("int*")
    native.check(lib.jc_gpu_unique_id(handle, unique))
    options = ffi.new(
        "jc_gpu_options*",
        {"timeout_ns": 60_000_000_000, "pairs": pairs, "record": record, "max_streams": 16, "max_ctas": 1},
    )
    team = lib.jc_gpu_join(
        handle,
        options,
        1,
        b"one GPU",
        ranks,
        ffi.new("int[]", list(range(ranks))),
        ffi.new("int[]", [0] * ranks),
        ranks,
        unique,
    )
    assert team != ffi.NULL, native.text(lib.jc_last_error())
    schedule = build(name, Kind.ALL_REDUCE, ranks)
    blob = encode(schedule)
    program = native.check(lib.jc_gpu_program(team, native.buffer(blob), len(blob), native.buffer(b""), 0, made))
    values = [np.full(nbytes // 4, r + 1, np.float32) for r in range(ranks)]
    sources, targets = [cuda.upload(v) for v in values], [cuda.upload(v) for v in values]
    streams = [cuda.stream() for _ in range(ranks)]

    def rank(r: int, rounds: int) -> None:
        ins, outs = (ffi.new("void*[]", [ffi.cast("void*", p)]) for p in (sources[r], targets[r]))
        for i in range(rounds):
            native.check(
                lib.jc_gpu_enqueue(team, program, r, i, 1, 0, 0, DTYPE["float32"], 1, ins, outs,
                                   native.int64s([nbytes // 4]), ffi.cast("void*", streams[r]))
            )  # fmt: skip

    def everyone(rounds: int) -> float:
        begin = time.perf_counter()
        threads = [threading.Thread(target=rank, args=(r, rounds)) for r in range(ranks)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert native.check(lib.jc_gpu_wait(team, 60_000_000_000)) == 0, "hangs"
        return time.perf_counter() - begin

    everyone(2)
    for r in range(ranks):
        assert (cuda.download(targets[r], values[r]) == ranks * (ranks + 1) / 2).all(), f"rank {r}: a wrong sum"
    took = everyone(ROUNDS) / ROUNDS * 1e3
    lib.jc_gpu_leave(team)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    cuda = Cuda()
    print("\n".join(gpu.versions()))
    print("| schedule | bytes | layout | recorded | ms |\n|---|---|---|---|---|")
    for name in ("ring", "dual_tree"):
        for nbytes in (4096, 1 << 20, 64 << 20):
            for pairs in (True, False):
                for record in (True, False):
                    ms = measure(arguments.ranks, name, nbytes, pairs, record, cuda)
                    row = (name, str(nbytes), "pairs" if pairs else "groups", "yes" if record else "no", f"{ms:.3f}")
                    print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
