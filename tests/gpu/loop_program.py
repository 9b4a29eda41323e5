"""One process whose eight ranks are the stand-in's devices, under the whole tuning loop: `loop_program.py SECONDS LOG`.

After some epochs the link between two ranks gets slow. Prints one line of JSON: what the tuner decided, and what the
swap cost. JAX's own devices are CPUs; they lend their numbers.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402

import jaxcoll  # noqa: E402
from gpu.harness import on_threads, standin  # noqa: E402
from jaxcoll import runtime  # noqa: E402
from jaxcoll.runtime import gpu, loop, world  # noqa: E402
from jaxcoll.schedule import Kind, Table  # noqa: E402
from jaxcoll.steering import runlog  # noqa: E402

RANKS, COUNT, QUIET = 8, 16384, 1
BASE_NS, SLOW_NS = 3_000_000, 30_000_000
LOOKS = 20_000


class Job:
    """All-reduces of one call site over all ranks, enqueued as XLA would, and checked."""

    def __init__(self) -> None:
        self.key = runtime.prepare(
            kind=Kind.ALL_REDUCE, groups=(tuple(range(RANKS)),), nbytes=4 * COUNT, reduce="sum", root=None, perm=None,
            schedule="dual_tree", deterministic=False,
        )  # fmt: skip
        self.world = world.get()
        self.native, self.launch = self.world.native, 0
        (self.info,) = runtime.get_sets().all()
        rng = np.random.default_rng(3)
        self.values = rng.integers(-9, 9, (RANKS, COUNT)).astype(np.float32)
        self.results = np.zeros((RANKS, COUNT), np.float32)
        self.streams = [standin().stream(r) for r in range(RANKS)]
        self.devices = self.native.int64s(range(RANKS))

    def _enqueue(self, rank: int) -> None:
        ffi = self.native.ffi
        ins, outs = (ffi.new("void*[]", [ffi.cast("void*", a[rank].ctypes.data)]) for a in (self.values, self.results))
        stream = ffi.cast("void*", int(standin().ffi.cast("intptr_t", self.streams[rank])))
        self.native.check(
            self.native.lib.jc_world_gpu_enqueue(
                self.world.handle, rank, self.launch, int(Kind.ALL_REDUCE), 0, 11, 7, self.key, self.devices, RANKS, 1,
                1, ins, outs, self.native.int64s([COUNT]), stream,
            )
        )  # fmt: skip

    def run(self) -> None:
        """One execution on all ranks."""
        self.launch += 1
        self.results[:] = 0
        failures = on_threads([lambda r=r: self._enqueue(r) for r in range(RANKS)])
        if failures:
            raise failures[0]
        for _ in range(LOOKS):  # counted, not timed: a process that is stopped for a while doesn't hang
            if not standin().stuck():
                break
            time.sleep(0.0005)
        assert not standin().stuck(), f"hangs: {standin().stuck()}"
        assert (self.results == self.values.sum(axis=0)).all()

    def pairs(self, table: Table) -> set[tuple[int, int]]:
        """Which ranks send to which under a table."""
        edges = [(g, e) for g, graph in enumerate(self.info.schedules[0].graphs) for e in graph.edges]
        return {(int(table.vertex[g][e.step][e.src]), int(table.vertex[g][e.step + 1][e.dst])) for g, e in edges}


def until(job: Job, condition: Any, seconds: float) -> None:
    """Runs until `condition` holds or the time is over."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        job.run()


def table_of(run_log: str) -> str:
    """The first decision's table, out of the run log."""
    return next(line["table"] for line in runlog.read(Path(run_log)) if line["type"] == "decision")


def main() -> None:
    seconds = float(sys.argv[1])
    gpu.opened(str(standin().path))
    gpu.present = lambda: True
    made = standin().lib.standin_communicators
    standin().lib.standin_delay(-1, -1, BASE_NS)
    job = Job()
    running = loop.current()
    assert running is not None
    assert running.leader is not None
    leader = running.leader
    identity = Table.identity(job.info.schedules[0])
    slow = (job.info.schedules[0].graphs[0].edges[0].src, job.info.schedules[0].graphs[0].edges[0].dst)
    for _ in range(QUIET):
        job.run()
    before, compiled = made(), standin().calls()["nvrtcCompileProgram"]
    standin().lib.standin_delay(*slow, SLOW_NS)
    until(job, lambda: running.worker.swaps.commits > 0, seconds)
    for _ in range(3):
        job.run()
    until(job, lambda: leader.report["decisions"], 5)
    decision: dict[str, Any] = (leader.report["decisions"] or [{}])[0]
    moved = Table.from_bytes(base64.b64decode(table_of(sys.argv[2]))) if decision else identity
    report = {
        "slow": slow,
        "decision": decision,
        "made": made() - before,
        "compiled": standin().calls()["nvrtcCompileProgram"] - compiled,
        "findings": jaxcoll.status()["tuner"]["sets"][0]["findings"],
        "breaches": standin().breaches(),
        "fresh": len(job.pairs(moved) - job.pairs(identity)) if decision else 0,
        "versions": [running.worker.swaps.version(s) for s in running.worker.swaps.known()],
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
