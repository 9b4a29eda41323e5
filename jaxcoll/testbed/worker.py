"""A rank of the testbed's benchmark: a tight loop of one jitted psum, timed epoch by epoch and checked every time."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import launch
from jaxcoll.bench.control import ENV, Channel, Message

AXIS = "ranks"
_PERIOD = 4093
_COMPILED = "/jax/core/compile/backend_compile_duration"

# Two inputs take turns, so that a result left over from the epoch before can't pass for the right one.
_INPUTS = 2


def _starved() -> float:
    """Seconds that this process's threads have been ready to run and were given no core, all threads together."""
    nanoseconds = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/schedstat") as file:
            nanoseconds += int(file.read().split()[1])
    return nanoseconds / 1e9


def _pattern(rank: int, which: int) -> np.ndarray:
    # Small whole numbers: every order of adding them gives the same float.
    return np.random.default_rng((rank, which)).integers(-8, 9, _PERIOD).astype(np.float32)


class Worker:
    """The commands of the driver."""

    def __init__(self) -> None:
        self._program: Callable[[jax.Array], jax.Array] | None = None
        self._inputs: list[jax.Array] = []
        self._expected: list[np.ndarray] = []
        self._compilations = 0
        self._tuned = False

    def prepare(self, impl: str, schedule: str | None, nbytes: int, warmup: int, tuned: bool) -> Message:
        """Compile the psum of `nbytes` bytes of float32 a rank and run it `warmup` times. Answers {"wrong"}."""
        devices, count = jax.devices(), nbytes // 4
        mesh = Mesh(np.array(devices), (AXIS,))
        sharding = NamedSharding(mesh, P(AXIS))
        for which in range(_INPUTS):
            mine = np.resize(_pattern(jax.process_index(), which), count)
            self._inputs.append(jax.make_array_from_process_local_data(sharding, mine, (count * len(devices),)))
            total = sum(_pattern(rank, which) for rank in range(len(devices)))
            self._expected.append(np.resize(total, count))

        def body(x: jax.Array) -> Any:
            return jax.lax.psum(x, AXIS) if impl == "lax" else jaxcoll.psum(x, AXIS, schedule=schedule)

        self._program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(AXIS), out_specs=P()))
        wrong = self._epoch(0)[1]
        jax.monitoring.register_event_duration_secs_listener(self._count)
        self._tuned = tuned
        return {"wrong": wrong + sum(self._epoch(i)[1] for i in range(1, warmup))}

    def _count(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self._compilations += event == _COMPILED

    def _epoch(self, i: int) -> tuple[float, int]:
        assert self._program is not None, "block before prepare"
        x = self._inputs[i % _INPUTS]
        start = time.perf_counter()
        y = self._program(x).block_until_ready()
        seconds = time.perf_counter() - start
        got = np.asarray(y.addressable_shards[0].data)
        return seconds, int(np.count_nonzero(got != self._expected[i % _INPUTS]))

    def block(self, epochs: int, settle: int) -> Message:
        """Run `settle` epochs without the clock (ranks leave the command loop at different times), then time `epochs`.

        Answers {"seconds": [...], "starved", "wrong", "compilations", "swaps", "reverts"}: starved is the seconds
        without a core per epoch; the last three are totals of this process.
        """
        seconds: list[float] = []
        wrong, before = 0, _starved()
        gc.disable()
        try:
            for i in range(settle + epochs):
                taken, bad = self._epoch(i)
                wrong += bad
                if i >= settle:
                    seconds.append(taken)
        finally:
            gc.enable()
        # Rank 0 leads: it alone decides on swaps, and counts them.
        tuner = jaxcoll.status()["tuner"] if self._tuned and jax.process_index() == 0 else {"swaps": 0, "reverts": 0}
        counts = {"swaps": int(tuner["swaps"]), "reverts": int(tuner["reverts"]), "compilations": self._compilations}
        starved = max(0.0, _starved() - before) / (settle + epochs)
        return {"seconds": seconds, "starved": starved, "wrong": wrong, **counts}


def main() -> int:
    """Serve one driver over the connection that was made before this process entered its host. Returns the status."""
    channel = Channel(socket.socket(fileno=int(os.environ[ENV + "_FD"])))
    launch.initialize()
    worker = Worker()
    commands: dict[str, Callable[..., Message]] = {"prepare": worker.prepare, "block": worker.block}
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return 0
        name = message.pop("do")
        if name == "quit":
            return 0
        try:
            answer = commands[name](**message)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.send(answer)


if __name__ == "__main__":
    sys.exit(main())
