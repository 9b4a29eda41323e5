"""The brain by itself, over the simulator."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jaxcoll import replay
from jaxcoll.errors import ScheduleError, UsageError
from jaxcoll.report.run import load
from jaxcoll.runtime import leader
from jaxcoll.runtime.worker import Worker
from jaxcoll.steering import brain, policy, runlog, wire
from jaxcoll.steering.tuned import Pace
from jaxcoll.telemetry import Epoch, Record, from_records
from loop.simulated import QUIET, SET, Job, announcement


def test_it_reacts_to_congestion_and_says_why(tmp_path: Path):
    job = Job(tmp_path / "run.jsonl")
    job.run(40)
    congested, end = statistics.median(job.seconds[QUIET : QUIET + 3]), statistics.median(job.seconds[-8:])
    assert end < congested / 1.3
    status = job.brain.status()
    assert status["swaps"] >= 1
    (one,) = status["sets"]
    assert one["version"] == job.table.version
    assert len(one["throughput"]) == 8
    reason = status["decisions"][0]["reason"]
    assert "congested" in reason
    assert "expected" in reason
    json.dumps(status)  # plain data


@pytest.mark.parametrize(("name", "least", "epochs"), [("jaxcoll", 0.02, 3), ("react-paper", 0.05, 6)])
def test_what_a_move_has_come_to_is_told_once(name: str, least: float, epochs: int, monkeypatch: pytest.MonkeyPatch):
    logged: list[str] = []
    monkeypatch.setattr(brain.log, "info", lambda text, *words: logged.append(text % words))
    job = Job(name=name)
    job.run(40)
    first = job.brain.status()["decisions"][0]
    assert first["kept"] == (first["measured"] < 1 - least)
    before, after = job.seconds[: first["epochs"]][-epochs:], job.seconds[first["epochs"] :][:6]
    assert first["measured"] == pytest.approx(statistics.mean(after) / statistics.mean(before), rel=0.05)
    said = [line for line in logged if f"{first['reason']}; measured {first['measured']:.2f}x" in line]
    assert len(said) == 1


@pytest.mark.parametrize("name", ["jaxcoll", "react-paper", "shuffle"])
def test_a_run_with_a_decision_that_failed_replays_alike(name: str, tmp_path: Path):
    log = tmp_path / "run.jsonl"
    job = Job(log, name, refuse=1)
    job.run(50)
    job.log.close()
    steps = replay.replay(log)
    assert len(steps) == len(job.questions) >= 2
    assert all(step.same for step in steps)
    lines = [line for line in runlog.read(log) if line["type"] == "decision"]
    assert [line["committed"] for line in lines[:2]] == [False, True]
    assert lines[0]["version"] == lines[1]["version"] == 1, "a version that never came into force is used again"


def test_only_at_the_end_of_a_run_may_a_decision_be_without_its_outcome(tmp_path: Path):
    log, other = tmp_path / "run.jsonl", tmp_path / "other.jsonl"
    job = Job(log)
    job.run(40)
    job.log.close()
    lines = log.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line)["type"] == "decision")
    for kept, found in ((lines[:at], []), (lines[:at] + lines[at + 1 :], [None])):
        other.write_text("\n".join(kept))
        assert [step.recorded for step in replay.replay(other)][:1] == found


def test_a_failed_decision_leaves_the_policy_where_it_was():
    job = Job(refuse=1)
    job.run(40)
    summary = job.brain.status()["sets"][0]
    assert summary["failed"] == 1
    assert summary["swaps"] >= 1


def test_a_late_rank_is_reported_and_causes_no_swap():
    job = Job(late={5: 0.05})
    job.run(40)
    assert job.questions == []
    findings = job.brain.status()["sets"][0]["findings"]
    assert any("rank 5 is late" in line for line in findings)


def test_nothing_is_decided_while_a_decision_is_open():
    job = Job(name="shuffle")
    job._decide = job.questions.append  # type: ignore[method-assign]
    job.run(30)
    assert len(job.questions) == 1


def test_a_fault_of_the_tuner_ends_the_tuning_of_one_set(monkeypatch: pytest.MonkeyPatch):
    job, other = Job(), (1, 78)
    job.brain.take(("set", other, announcement(), list(range(8)), list(range(8))))
    sound = job.brain.sets[other].policy

    class Broken(type(sound)):
        def step(self, state: Any, samples: Any) -> Any:
            raise ZeroDivisionError("float division by zero")

    job.brain.sets[other].policy = Broken()
    schedule = job.schedules[job.program]
    records, _ = job.world.run(schedule, job.table, 4 << 20, 1, program=job.program)
    job.brain.take(("records", other, 0, records.tobytes()))
    (told,) = job.brain.think()
    assert told[0] == "warning"
    assert "float division by zero" in told[1]
    job.brain.take(("records", other, 0, records.tobytes()))
    assert job.brain.think() == []
    job.run(40)
    summaries = {s["key"]: s for s in job.brain.status()["sets"]}
    assert summaries[job.brain.sets[SET].key]["swaps"] >= 1
    assert "not tuned any more" in summaries[job.brain.sets[other].key]["last"]


def test_deterministic_sets_are_left_alone():
    job = Job()
    job.brain.sets.clear()
    job.brain.take(("set", SET, {**announcement(), "deterministic": True}, [0], [0] * 8))
    assert job.brain.sets == {}


def test_pinned_schedules_move_ranks_only():
    job = Job()
    job.brain.sets.clear()
    job.brain._policy = policy.make("jaxcoll", free=False)
    job.brain.take(("set", SET, announcement(), list(range(8)), list(range(8))))
    job.run(40)
    assert job.questions
    assert {q["program"] for q in job.questions} == {next(iter(job.schedules))}


def test_too_many_records_are_sampled(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("jaxcoll.steering.brain.time.monotonic", lambda: now)
    job = Job()
    now, job.brain._came = 2.0, 100_000
    (message,) = job.brain._throttle()
    kind, stride = message
    assert kind == "stride"
    assert 50_000 / stride <= 4000 < 100_000 / stride
    now, job.brain._came = 4.0, 1200
    assert job.brain._throttle() == [("stride", stride // 2)]
    now, job.brain._came = 6.0, 0
    assert job.brain._throttle() == [("stride", 1)]


def epoch_of(milliseconds: float) -> Epoch:
    record = dataclasses.replace(Record(*[0] * 15), transfer_ns=int(1e6 * milliseconds))
    return Epoch((1, 1, 1, 0), 1, 0, from_records([record]))


def test_while_all_epochs_are_alike_few_are_looked_at_and_no_change_is_missed():
    pace = Pace()
    assert sum(len(pace.admit(epoch_of(10 + 0.1 * (i % 3)), True)) for i in range(24)) == 24
    assert pace.steady
    assert sum(len(pace.admit(epoch_of(10), True)) for _ in range(80)) == 10
    assert pace.admit(epoch_of(15), True) == []  # one odd epoch may be chance ...
    assert sum(len(pace.admit(epoch_of(10), True)) for _ in range(7)) <= 1
    assert pace.steady
    odd = [epoch_of(15), epoch_of(14)]
    assert [*pace.admit(odd[0], True), *pace.admit(odd[1], True)] == odd  # ... two are not
    assert not pace.steady
    assert sum(len(pace.admit(epoch_of(14), True)) for _ in range(24)) == 24
    assert pace.steady
    assert len(pace.admit(epoch_of(14), False)) == 1
    assert not pace.steady


def test_a_change_in_every_second_epoch_is_seen():
    pace = Pace()
    for _ in range(24):
        pace.admit(epoch_of(10), True)
    odd = [epoch_of(15) for _ in range(3)]
    handed: list[Epoch] = []
    for epoch in odd:
        handed += [*pace.admit(epoch, True), *pace.admit(epoch_of(10), True)]
    assert handed[:3] == odd
    assert not pace.steady


def test_a_set_that_does_not_run_keeps_nobody_from_rest(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr("jaxcoll.steering.brain.time.monotonic", lambda: now)
    job = Job(late={5: 0.05})
    other = (1, 78)
    job.brain.take(("set", other, announcement(), list(range(8)), list(range(8))))
    job.run(12)
    assert not job.brain.calm
    for _ in range(30):
        now += 1.0
        job.run(1)
    assert job.brain.calm, "the set that has never run says nothing"
    now += 60.0
    assert job.brain.calm, "a pause"


def test_a_brain_that_is_stopped_ends_the_tuning_and_not_the_leader(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(leader, "_TAKES_S", 1)
    process = leader.BrainProcess({"policy": "jaxcoll", "params": {}, "run_log": "", "log": "warning"})
    try:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(BlockingIOError) as caught:
            process.tell("records", [1, 77], 0, bytes(64 << 20))
        assert "has taken no message for 1 s" in process.fate(caught.value)
        os.kill(process.pid, signal.SIGKILL)
        assert "ended by signal 9 (Killed)" in process.fate(EOFError())
    finally:
        process.close()


def test_a_bad_message_takes_none_behind_it_along():
    class Swaps:
        def load(self, blob: bytes) -> None:
            raise ScheduleError("a program that nobody can read")

    class Channel:
        sent: ClassVar[list[dict[str, object]]] = []

        def send(self, message: dict[str, object]) -> bool:
            self.sent.append(message)
            return True

    one = Worker.__new__(Worker)
    one.swaps, one._channel = Swaps(), Channel()  # type: ignore[assignment]
    one._serve({"do": "decide", "attempt": "1.1"}, b"")  # it has no verdict
    one._serve({"do": "program", "attempt": "1.1"}, b"?")
    assert Channel.sent == [{"attempt": "1.1", "do": "loaded", "error": "a program that nobody can read"}]


def test_it_rests_after_thinking_and_keeps_the_newest_epochs(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr("jaxcoll.steering.brain.time.monotonic", lambda: now)
    job = Job()
    job.run(1)
    (tuned,) = job.brain.sets.values()
    job.brain._rest_until = now + 1.0
    before = tuned.epochs
    job.run(20)
    assert tuned.epochs == before
    assert [e.id[2] for e in tuned.pending] == list(range(5, 21))
    now += 2.0
    job.run(1)
    assert tuned.epochs > before


def test_policies_by_name():
    assert policy.make("react-paper", B=4, seed=3).name == "react-paper"
    assert policy.make("jaxcoll", margin=0.1).free
    with pytest.raises(UsageError, match="known are jaxcoll, react-paper, shuffle"):
        policy.make("best")
    with pytest.raises(UsageError, match="no parameter 'speed'"):
        policy.make("jaxcoll", speed=1)
    with pytest.raises(UsageError, match="no parameter 'margin'"):
        policy.make("react-paper", margin=0.1)


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("jaxcoll", {"quick": 0}, "quick is 0; it must be a whole number of at least 1"),
        ("jaxcoll", {"seed": -1}, "seed is -1; it must be a whole number of at least 0"),
        ("jaxcoll", {"keep": "a"}, "keep is 'a'; it must be a number of at least 0"),
        ("jaxcoll", {"margin": float("nan")}, "margin is nan"),
        ("jaxcoll", {"swaps": 1}, "swaps is 1; it must be a whole number of at least 2"),
        ("react-paper", {"B": 6.5}, "B is 6.5; it must be a whole number of at least 1"),
        ("react-paper", {"K_t": True}, "K_t is True"),
        ("shuffle", {"every": 0}, "every is 0; it must be a whole number of at least 1"),
    ],
)
def test_a_parameter_that_cannot_be_used_is_told_at_once(name: str, params: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=re.escape(says)):
        policy.make(name, **params)


@pytest.mark.parametrize("take", [replay.replay, load])
@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("set", {"programs": None}, "this is no tuner set-up"),
        ("set", {"start_table": "abc"}, "this is no tuner set-up: Incorrect padding"),
        ("epoch", {"records": None}, "an epoch line of the run log is damaged"),
        ("epoch", {"key": "other"}, "about the set 'other', of which no \"set\" line came before"),
        ("decision", {"table": "abc"}, "this is no decision: Incorrect padding"),
        ("decision", {"committed": ...}, "KeyError: 'committed'"),
        ("decision", {"key": []}, "about the set"),
    ],
)
def test_a_damaged_line_is_named(
    take: Callable[[Path], object], kind: str, change: dict[str, Any], says: str, recorded: list[str], tmp_path: Path
):
    number = next(i for i, line in enumerate(recorded) if json.loads(line)["type"] == kind)
    fields = {**json.loads(recorded[number]), **change}
    lines = [*recorded[:number], json.dumps({k: v for k, v in fields.items() if v is not ...}), *recorded[number + 1 :]]
    (log := tmp_path / "damaged.jsonl").write_text("\n".join(lines))
    with pytest.raises(UsageError, match=rf"damaged.jsonl, line {number + 1} is damaged: .*{re.escape(says)}"):
        take(log)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a run with a decision."""
    log = tmp_path_factory.mktemp("damage") / "run.jsonl"
    job = Job(log)
    job.run(30)
    job.log.close()
    return log.read_text().splitlines()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("garbage", "line 1 is no JSON"),
        ("\x80\x81\n\xff", "line 1 is no JSON"),
        ('{"type":"set"}\n', "no run log"),
        ('{"type":"run","format":1}\n[]\n{}\n', "line 2"),
        ('{"type":"run","format":1}\n{"type":\n{}\n', "line 2 is no JSON"),
        ('{"type":"run","format":1}\n{"type":"epoch","key":"a"}\n', 'no "set" line'),
    ],
)
def test_a_file_that_is_no_run_log_is_refused(text: str, words: str, tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=words):
        replay.replay(file)


def test_an_earlier_run_s_log_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "jaxcoll")
    file = tmp_path / "run.jsonl"
    file.write_text("the first")
    (tmp_path / "run.jsonl.2").write_text("somebody else's")
    for kept in ("run.jsonl.1", "run.jsonl.3"):
        runlog.check(str(file))
        log = runlog.RunLog(str(file))
        log.write("epoch", {"of": kept})
        log.close()
        assert f"is {tmp_path / kept} now" in caplog.text
    assert (tmp_path / "run.jsonl.1").read_text() == "the first"
    assert (tmp_path / "run.jsonl.2").read_text() == "somebody else's"
    assert [line.get("of") for line in runlog.read(tmp_path / "run.jsonl.3")] == [None, "run.jsonl.1"]
    assert [line.get("of") for line in runlog.read(file)] == [None, "run.jsonl.3"]
    assert len(list(tmp_path.iterdir())) == 4


def test_two_brains_with_one_log_lose_nothing(tmp_path: Path):
    first, second = (runlog.RunLog(str(tmp_path / "run.jsonl")) for _ in range(2))
    for i, log in enumerate((first, second)):
        log.write("epoch", {"of": i})
        log.close()
    assert [line["of"] for line in list(runlog.read(tmp_path / "run.jsonl"))[1:]] == [1]
    assert [line["of"] for line in list(runlog.read(tmp_path / "run.jsonl.1"))[1:]] == [0]


def test_whether_a_log_can_be_written_is_asked_without_touching_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "run.jsonl"
    file.write_text("the first")
    runlog.check(str(file))
    runlog.check("")
    runlog.check("/dev/null")
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]
    assert file.read_text() == "the first"
    with pytest.raises(UsageError, match="no/run.jsonl can't be written: No such file"):
        runlog.check(str(tmp_path / "no" / "run.jsonl"))
    monkeypatch.setattr(runlog.os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="earlier run.*set JAXCOLL_RUN_LOG to another file"):
        runlog.check(str(file))


def test_a_full_disk_ends_the_run_log_and_nothing_else(caplog: pytest.LogCaptureFixture):
    log = runlog.RunLog("/dev/full")
    log.write("epoch", {})
    log.close()
    assert "the run log /dev/full ends here" in caplog.text


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"type":"run","format":1}\n{"type":"epo')
    assert [line["type"] for line in runlog.read(file)] == ["run"]


def test_two_that_both_have_much_to_say_dont_block_each_other():
    here, there = socket.socketpair()
    for end in (here, there):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    leader, other = Connection(here.detach()), Connection(there.detach())
    outbox = brain.Outbox(other)
    for _ in range(4):
        outbox.put(("status", {"text": "x" * 100_000}))
    # The leader writes as much before it reads; the brain's own thread goes on reading.
    reader = threading.Thread(target=lambda: [other.recv_bytes() for _ in range(4)])
    reader.start()
    for _ in range(4):
        leader.send_bytes(b"y" * 100_000)
    reader.join(10)
    assert not reader.is_alive()
    assert [len(leader.recv_bytes()) > 100_000 for _ in range(4)] == [True] * 4
    leader.close()


def test_a_message_is_sent_as_it_was_and_what_cant_be_sent_is_told_at_once():
    here, there = socket.socketpair()
    leader, outbox = Connection(here.detach()), brain.Outbox(Connection(there.detach()))
    decision = {"reason": "slow"}
    for _ in range(200):
        outbox.put(("status", {"decisions": [decision]}))
    decision["measured"] = "later"  # the brain goes on while the thread sends
    assert {leader.recv_bytes() for _ in range(200)} == {wire.pack(("status", {"decisions": [{"reason": "slow"}]}))}
    with pytest.raises(TypeError, match="no plain data"):
        outbox.put(("status", object()))
    leader.close()


_FORKED = """
import os, sys, time
from jaxcoll.runtime.leader import BrainProcess
brain = BrainProcess({"policy": "jaxcoll", "params": {}, "run_log": "", "log": "warning"})
print(brain.pid, flush=True)
if os.fork() == 0:
    time.sleep(60)  # a data loader: it holds all that its parent had open
    os._exit(0)
time.sleep(60)
"""


def test_a_killed_leader_s_brain_ends_though_a_child_of_it_lives():
    with subprocess.Popen(
        [sys.executable, "-c", _FORKED], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as leader:
        assert leader.stdout
        pid = int(leader.stdout.readline())
        os.kill(leader.pid, signal.SIGKILL)
        try:
            deadline = time.monotonic() + 20
            while _lives(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not _lives(pid)
        finally:
            os.killpg(leader.pid, signal.SIGKILL)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
