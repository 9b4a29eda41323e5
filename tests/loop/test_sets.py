"""Several sets, several executables of one set, several sizes in one class: what the brain makes of them."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxcoll import replay
from jaxcoll.report import run
from jaxcoll.runtime import leader
from jaxcoll.runtime.job import Job, MemoryStore
from jaxcoll.runtime.swap import points_behind
from jaxcoll.sim.network import star
from jaxcoll.sim.world import Noise, Phase, World
from jaxcoll.steering import policy
from jaxcoll.steering.brain import Brain
from jaxcoll.steering.runlog import RunLog
from jaxcoll.steering.sizes import Sizes
from jaxcoll.steering.tuned import Tuned
from jaxcoll.telemetry import Epoch, Record, Records, from_records
from loop import simulated
from loop.simulated import NBYTES, RANKS, RATE, announcement

OTHER = (1, 78)
FAR = 1_500_000_000  # how far the launches of two executables lie apart


class Program(simulated.Job):
    """The simulated job on a quiet network; its records can be those of other call sites, launches and sizes."""

    def __init__(self, name: str = "jaxcoll", log: Path | None = None):
        super().__init__(log, name)
        self.world = World([Phase(0, star(RANKS, RATE, alpha=1e-4))], seed=1, noise=Noise(epoch=0.02, edge=0.03))

    def epoch(self, at: int, nbytes: int = NBYTES, site: int = 0, launch: int | None = None) -> Records:
        """The records of one epoch at the start of second `at`."""
        schedule = self.schedules[self.program]
        records, _ = self.world.run(schedule, self.table, nbytes, 1, program=self.program)
        records = records.copy()
        records["start_ns"] = records["start_ns"] - records["start_ns"].min() + 10**9 * (1 + at)
        records["site"] += site
        records["launch"] = at if launch is None else launch
        return records


def test_two_executables_of_a_set_are_told_apart():
    job = Program()
    for i in range(40):
        for base in (0, FAR):
            job.brain.take(("records", simulated.SET, 0, job.epoch(0, launch=base + i).tobytes()))
    (tuned,) = job.brain.sets.values()
    tuned._starts.extend((base + i, i * 10**8 + base % 7) for i in range(40) for base in (0, FAR))
    assert tuned.launch_rate() == pytest.approx(10, rel=0.05)
    places = [[(7, 3, 0), (7, FAR + 20, 4)], [(7, 5, 1), (7, FAR + 18, 0), (9, 5, 0)]]
    assert sorted(points_behind(places, 4)) == [(7, 9, 0), (7, FAR + 24, 0), (9, 9, 0)]


def test_of_several_sizes_in_a_class_the_one_that_takes_the_most_time_is_tuned_by():
    job = Program()
    sizes = [NBYTES // 3] * 4 + [NBYTES] * 3
    for i in range(30):
        for k, nbytes in enumerate(sizes):
            records = job.epoch(7 * i + k, nbytes, site=nbytes, launch=i)
            job.brain.take(("records", simulated.SET, 0, records.tobytes()))
            assert job.brain.think() == [], "nothing has changed on the network"
    (tuned,) = job.brain.sets.values()
    assert tuned.spec is not None
    assert tuned.spec.nbytes == pytest.approx(NBYTES, rel=0.01)
    summary = tuned.summary()
    assert summary["left_out"] >= 100
    assert summary["median_ms"] == pytest.approx(statistics.median(tuned.seconds) * 1e3)
    assert np.ptp(list(tuned.seconds)) < 0.3 * np.mean(list(tuned.seconds)), "epochs of one size"


def test_an_executable_that_comes_first_under_a_new_program_is_no_new_size():
    sizes = Sizes()

    def seen(site: int, launch: int, program: int, moved: int) -> bool:
        record = dataclasses.replace(Record(*[0] * 15), bytes=moved, transfer_ns=10**6)
        return sizes.admit(Epoch((1, site, launch, 0), program, 0, from_records([record])))

    assert all(seen(1, i, 7, 1000) for i in range(20))
    assert not seen(2, FAR, 8, 1500)
    assert seen(1, 20, 8, 1500)
    assert seen(2, FAR + 1, 8, 1500)
    assert not seen(3, 2 * FAR, 9, 600), "the others have ended ..."
    assert any([seen(3, 2 * FAR + i, 9, 600) for i in range(200)]), "... and this is all there is"


def test_records_of_a_set_that_is_not_tuned_are_not_kept():
    job = Program()
    job.brain.take(("records", OTHER, 0, job.epoch(0, site=1).tobytes()))
    assert job.brain._records.counts().pushed == 0


def test_a_policy_that_begins_anew_goes_on_from_the_table_in_force(tmp_path: Path):
    job = Program(name="shuffle", log=tmp_path / "run.jsonl")
    for i in range(60):
        records = job.epoch(i, launch=i)
        job.brain.take(("records", simulated.SET, 0, records.tobytes()))
        for message in job.brain.think():
            job._decide(message[1])
    (tuned,) = job.brain.sets.values()
    version = job.table.version
    assert version >= 2
    for i in range(60, 160):
        records = job.epoch(i, 4 * NBYTES, site=5, launch=i)
        job.brain.take(("records", simulated.SET, 0, records.tobytes()))
        for message in job.brain.think():
            assert message[1]["version"] == job.table.version + 1
            job._decide(message[1])
    assert tuned.spec is not None
    assert tuned.spec.nbytes == pytest.approx(4 * NBYTES, rel=0.01)
    assert job.table.version > version
    job.log.close()
    steps = replay.replay(tmp_path / "run.jsonl")
    assert len(steps) == len(job.questions)
    assert all(step.same for step in steps)
    parts = run.load(tmp_path / "run.jsonl")
    assert sorted(part.spec.key for part in parts) == [tuned.key, f"{tuned.key}, part 2"]
    assert sum(len(part.swaps) for part in parts) == len(job.questions)


def test_sets_that_are_alike_in_half_of_their_ids_have_names_of_their_own():
    chosen, hosts = policy.make("jaxcoll"), list(range(RANKS))
    ids = [(1, 2), (1, 1 << 31 | 2), (1 << 31 | 1, 2)]
    names = {Tuned(set_id, announcement(), hosts, hosts, chosen).key for set_id in ids}
    assert len(names) == len(ids)


def test_a_busy_set_does_not_starve_another(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr("jaxcoll.steering.brain.time.monotonic", lambda: now)
    monkeypatch.setattr("jaxcoll.steering.brain.time.thread_time", iter(np.arange(1e6)).__next__)
    job = Program()
    job.brain = Brain(policy.make("shuffle", every=1000), RunLog(""), rest=1.0)
    for set_id in (simulated.SET, OTHER):
        job.brain.take(("set", set_id, announcement(), list(range(RANKS)), list(range(RANKS))))
    for i in range(20):
        for site, set_id in enumerate((simulated.SET, OTHER)):
            records = job.epoch(i, site=site, launch=i)
            job.brain.take(("records", set_id, 0, records.tobytes()))
        job.brain.think()  # takes a second of thinking for each epoch, and rests as long
        now += 1.0
    assert [tuned.epochs for tuned in job.brain.sets.values()] == [10, 10]


def test_decisions_that_cannot_be_brought_into_force_are_not_repeated_with_every_epoch(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr("jaxcoll.steering.tuned.time.monotonic", lambda: now)
    job = simulated.Job(name="shuffle", refuse=10**6)
    asked: list[float] = []
    for _ in range(400):
        before = len(job.questions)
        job.run(1)
        asked += [now] * (len(job.questions) - before)
        now += 1.0
    assert np.diff(asked).tolist() == pytest.approx([4, 5, 8, 16, 32, 60, 60, 60, 60, 60], abs=4)


class Store(MemoryStore):
    """A store that fails a few times."""

    failures = 0

    def set_once(self, key: str, value: str) -> bool:
        if self.failures > 0:
            self.failures -= 1
            raise RuntimeError("UNAVAILABLE: socket closed")
        return super().set_once(key, value)

    def delete(self, key: str) -> None:
        raise RuntimeError("UNAVAILABLE: socket closed")


class Channel:
    """A worker at the other end, who agrees to everything but what `errors` names."""

    def __init__(self, errors: dict[str, str]):
        self.errors, self.answers, self.asked = errors, [], []
        self.lost = 0  # so many answers to "stage" behind the first one

    def send(self, process: int, message: dict[str, Any], payload: bytes = b"") -> None:
        word = {"stage": "staged", "program": "loaded", "propose": "promised", "decide": "decided"}[message["do"]]
        self.asked.append(message)
        answer = {"do": word, "attempt": message["attempt"], "error": self.errors.get(word), "places": [(1, 5, 0)]}
        staged = [m for m in self.asked if m["do"] == "stage"]
        unknown = word == "staged" and ("loaded" in self.errors or (self.lost > 0 and len(staged) == 1))
        if word == "staged" and 1 < len(staged) <= 1 + self.lost:
            return
        self.answers.append((process, {**answer, "unknown": unknown, "stall_s": 0.0, "waiting": 0}, b""))

    def receive(self, timeout: float, wake: Any = ()) -> list[Any]:
        answers, self.answers = self.answers, []
        return answers


def led(store: MemoryStore, channel: Channel) -> leader.Leader:
    job = Job(1, 0, ((0,),), store, None)
    return leader.Leader(job, store, channel, [0], {"policy": "jaxcoll"})  # type: ignore[arg-type]


QUESTION = {"set": (1, 2), "processes": (0,), "version": 1, "program": 3, "blob": b"", "table": b"", "rate": 1e15}


def test_a_store_that_fails_for_a_moment_costs_the_leader_nothing_but_time():
    store, channel = Store(), Channel({})
    store.failures = 2
    swap = led(store, channel).commit(QUESTION)
    assert swap.committed
    assert swap.tries == 2, "the first attempt is cancelled: others may have waited"
    verdicts = [m["verdict"] for m in channel.asked if m["do"] == "decide"]
    assert verdicts == ["cancel", "commit"]


def test_a_margin_is_bounded():
    channel = Channel({})
    assert led(Store(), channel).commit(QUESTION).committed
    (point,) = next(m["points"] for m in channel.asked if m["do"] == "propose")
    assert point[1] - 5 <= 1 << 16


@pytest.mark.parametrize("word", ["staged", "loaded"])
def test_what_will_never_be_accepted_is_not_tried_again_and_says_why(word: str):
    channel = Channel({word: "the program has no edges"})
    swap = led(Store(), channel).commit(QUESTION)
    assert not swap.committed
    assert swap.tries == 1
    assert swap.refusal == "process 0: the program has no edges"


def test_a_lost_word_is_no_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leader, "ANSWER_S", 0.1)
    channel = Channel({})
    channel.lost = 1
    swap = led(Store(), channel).commit(QUESTION)
    assert swap.committed
    assert swap.tries == 2
