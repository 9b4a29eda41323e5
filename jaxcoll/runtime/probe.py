"""How fast the ranks of this job reach each other: alpha and beta, measured in milliseconds when the world is made.

Every process measures its own links through the engine itself (a permutation to the next process, a small and a larger
message); all take the medians over all processes, so that they choose alike.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxcoll.errors import CollectiveError

if TYPE_CHECKING:
    from jaxcoll.runtime.world import World

_SMALL, _LARGE, _REPEATS = 64, 128 << 10, 9
_F32 = 11
_UNFINISHED: list[Any] = []


@dataclasses.dataclass(frozen=True)
class Speed:
    """What the cost model needs.

    alpha: seconds of the smallest exchange in which all ranks take part; beta: seconds a byte from process to process,
    0 where there is one (the model counts it between hosts only); copy_beta: seconds a byte of a copy by one core;
    local_ranks: the most ranks on one host, which share its cores; cores: of a host; remote: there are other hosts.
    """

    alpha: float
    beta: float
    copy_beta: float
    local_ranks: int
    cores: int
    remote: bool


def nominal(speed: Speed) -> Speed:
    """The same layout at usual speeds: what is measured differs a little from run to run, and with it the choice."""
    return dataclasses.replace(speed, alpha=20e-6, beta=1e-9 if speed.beta else 0.0, copy_beta=2e-10)


def copy_beta() -> float:
    """Seconds a byte of a copy in this process's memory (1 MiB, best of three)."""
    source = np.ones(1 << 18, np.float32)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begin)
    return best / source.nbytes


def _exchange(world: World, nbytes: int, launch: int) -> float:
    """Seconds of one permutation p -> p+1 over the first devices of all processes."""
    native, job = world.native, world.job
    devices = native.int64s([d[0] for d in job.devices])
    count = nbytes // 4
    source, target = np.ones(count, np.float32), np.empty(count, np.float32)
    inputs = native.ffi.new("void*[]", [native.ffi.cast("void*", source.ctypes.data)])
    outputs = native.ffi.new("void*[]", [native.ffi.cast("void*", target.ctypes.data)])
    begin = time.perf_counter()
    op = native.lib.jc_op_start(
        world.handle, job.devices[job.me][0], launch, 6, 4, _F32, -1, world.PROBE_SET, devices, job.processes, 1, 1,
        inputs, outputs, native.int64s([count]),
    )  # fmt: skip
    result = native.lib.jc_op_wait(op, int(world.settings.timeout * 2e9))
    elapsed = time.perf_counter() - begin
    if result == 1:  # it may still complete into what is kept here, so nothing is freed
        _UNFINISHED.append((op, source, target, inputs, outputs))
        raise CollectiveError("the measurement of the links at the start has not ended in time")
    native.lib.jc_op_free(op)
    native.check(result)
    return elapsed


def measure(world: World) -> tuple[float, float]:
    """(alpha, beta) of this process toward its neighbours; every process must call it at the same time."""
    small = [_exchange(world, _SMALL, i) for i in range(_REPEATS)]
    large = [_exchange(world, _LARGE, _REPEATS + i) for i in range(_REPEATS)]
    # The quickest of each: other processes are still starting, and what they disturb must not decide for the whole run.
    alpha, total = min(small), min(large)
    return alpha, max(total - alpha, 1e-9) / _LARGE
