"""A rank of the testbed's benchmark: a tight loop of one jitted psum, timed epoch by epoch and checked every time."""

from __future__ import annotations

import base64
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
from jaxcoll import launch, runtime
from jaxcoll.bench.control import ENV, Channel, Message, obey
from jaxcoll.errors import UsageError
from jaxcoll.runtime.job import MemoryStore
from jaxcoll.runtime.swap import LocalSwaps, SetId, points_behind, program_id
from jaxcoll.schedule import Table, encode

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
        self._swaps: LocalSwaps | None = None

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

    def block(self, epochs: int, settle: int, late: float = 0.0) -> Message:
        """Run `settle` epochs without the clock (ranks leave the command loop at different times), then time `epochs`.

        late: seconds that this process is late in each. Answers {"seconds": [...], "ended", "starved", "wrong",
        "compilations", "tuner"}: ended is the wall clock after every epoch, the settling ones too; starved is the
        seconds without a core per epoch; compilations is the total of this process; tuner is its status where it leads.
        """
        seconds: list[float] = []
        ended: list[float] = []
        wrong, before = 0, _starved()
        gc.disable()
        try:
            for i in range(settle + epochs):
                if late:
                    time.sleep(late)
                taken, bad = self._epoch(i)
                wrong += bad
                ended.append(time.time())
                if i >= settle:
                    seconds.append(taken)
        finally:
            gc.enable()
        starved = max(0.0, _starved() - before) / (settle + epochs)
        out: Message = {"seconds": seconds, "ended": ended, "starved": starved, "wrong": wrong}
        return out | {"compilations": self._compilations, "tuner": self._tuner()}

    def told(self) -> Message:
        """Answers {"tuner"} as `block` does, later: the tuner works in a process of its own."""
        return {"tuner": self._tuner()}

    def _tuner(self) -> Message | None:
        # Rank 0 leads: it alone decides on swaps, and counts them.
        if not self._tuned or jax.process_index() != 0:
            return None
        status = jaxcoll.status()["tuner"]
        findings = [line for one in status["sets"] for line in one["findings"]]
        kept = {key: status[key] for key in ("state", "swaps", "reverts", "decisions")}
        return {**kept, "findings": findings, "programs": [one["program"] for one in status["sets"]]}

    # ------------------------------------------------------------------------------- tables put in force by the driver

    def _only_set(self) -> tuple[LocalSwaps, SetId]:
        if self._swaps is None:
            sets = runtime.get_sets()
            self._swaps = LocalSwaps(sets.world, sets, MemoryStore())
        known = list(self._swaps.known())
        if len(known) != 1:
            raise UsageError(f"one schedule set was expected in this process, there are {len(known)}")
        return self._swaps, known[0]

    def program(self) -> Message:
        """Answers {"blob"}: the schedule in force, in its binary form, as base64."""
        swaps, set_id = self._only_set()
        info = swaps.known()[set_id]
        return {"blob": base64.b64encode(encode(info.schedules[info.chosen])).decode("ascii")}

    def install(self, table: str, version: int) -> Message:
        """Bring a table (binary form, base64) into force from the next execution on, in every process alike; none may
        be running. Answers {"points"}, to be compared: they must be the same everywhere."""
        swaps, set_id = self._only_set()
        info = swaps.known()[set_id]
        data = Table.from_bytes(base64.b64decode(table)).with_version(version).to_bytes()
        program = program_id(info.schedules[info.chosen])
        if not swaps.has(program):
            raise UsageError("the schedule in force is not known to this process's library")
        swaps.stage(set_id, version, program, data)
        points = points_behind([swaps.started(set_id)], 1)
        swaps.promise(str(version), set_id, version, points)
        swaps.decide(str(version), True)
        return {"points": points}


def main() -> int:
    """Serve one driver over the connection that was made before this process entered its host. Returns the status."""
    channel = Channel(socket.socket(fileno=int(os.environ[ENV + "_FD"])))
    launch.initialize()
    worker = Worker()
    commands: dict[str, Callable[..., Message]] = {
        name: getattr(worker, name) for name in ("prepare", "block", "told", "program", "install")
    }
    obey(channel, commands)
    return 0


if __name__ == "__main__":
    sys.exit(main())
