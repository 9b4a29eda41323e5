"""A brain over the simulator: a job of eight ranks on the dual tree, whose rank 3 gets strangers after a while."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from typing import Any

from jaxcoll.schedule import Kind, Table, build, encode
from jaxcoll.sim.network import star
from jaxcoll.sim.world import Noise, Phase, World
from jaxcoll.steering import policy
from jaxcoll.steering.brain import Brain
from jaxcoll.steering.runlog import RunLog

RANKS, NBYTES, RATE, QUIET = 8, 4 << 20, 25e6, 12
SET = (1, 77)


def schedules() -> list[Any]:
    """The schedules of the set, the dual tree first."""
    made = [("dual_tree", {"pipeline": 8}), ("ring", {}), ("direct", {}), ("direct", {"shares": [0] + [1] * 7})]
    return [build(name, Kind.ALL_REDUCE, RANKS, **params) for name, params in made]


def announcement() -> dict[str, Any]:
    """What a worker would say of the set."""
    programs = [base64.b64encode(encode(s)).decode() for s in schedules()]
    about = {"devices": list(range(RANKS)), "kind": "all_reduce", "size_class": 5, "nbytes": NBYTES}
    return {**about, "deterministic": False, "chosen": 0, "programs": programs}


class Job:
    """The job and its brain, epoch by epoch; `refuse`: so many decisions that can't be brought into force."""

    def __init__(
        self, log: Path | None = None, name: str = "jaxcoll", refuse: int = 0, late: dict[int, float] | None = None
    ):
        self.log = RunLog(str(log) if log else "")
        self.brain = Brain(policy.make(name), self.log, rest=0.0)
        self.refuse = refuse
        net = star(RANKS, RATE, alpha=1e-4)
        busy = net if late else net.congest(3, 2)
        phases = [Phase(0, net, late or {}), Phase(QUIET, busy, late or {})]
        self.world = World(phases, seed=1, noise=Noise(epoch=0.02, edge=0.03))
        self.schedules = {zlib.crc32(encode(s)): s for s in schedules()}
        self.program = next(iter(self.schedules))
        self.table = Table.identity(self.schedules[self.program])
        self.questions: list[dict[str, Any]] = []
        self.seconds: list[float] = []
        assert self.brain.take(("set", SET, announcement(), list(range(RANKS)), list(range(RANKS)))) == []

    def run(self, epochs: int) -> None:
        """Runs `epochs` epochs."""
        for _ in range(epochs):
            schedule = self.schedules[self.program]
            records, times = self.world.run(schedule, self.table, NBYTES, 1, program=self.program)
            self.seconds.append(float(times[0]))
            self.brain.take(("records", SET, 0, records.tobytes()))
            for message in self.brain.think():
                assert message[0] == "decision"
                self._decide(message[1])

    def _decide(self, question: dict[str, Any]) -> None:
        self.questions.append(question)
        committed = len(self.questions) > self.refuse
        outcome = {"committed": committed, "tries": 1, "margin": 3, "exchange_s": 0.01, "stall_s": 1e-5, "waiting": 0}
        if committed:
            self.program, self.table = question["program"], Table.from_bytes(question["table"])
        assert (
            self.brain.take(("outcome", {**outcome, "refusal": "" if committed else "no answer from process 5"})) == []
        )
