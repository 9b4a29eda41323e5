"""Swaps in running programs, over real processes: nothing compiled, nothing wrong, nobody left waiting."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxcoll import replay
from jaxcoll.launch import Ranks
from jaxcoll.steering import runlog

PROGRAM = Path(__file__).with_name("program.py")
ROOT = PROGRAM.parents[2]


def run(
    mode: str, swaps: int, nprocs: int, devices: int = 1, log: Path | None = None, cut: float = 5.0
) -> tuple[list[Any], list[str]]:
    """(what each rank reports, what each has said)."""
    env = {"PYTHONPATH": str(ROOT), "JAXCOLL_RUN_LOG": str(log or ""), "JAXCOLL_TEST_CUT": f"{cut:g}"}
    command = [sys.executable, str(PROGRAM), mode, str(swaps)]
    with Ranks(command, nprocs, devices=devices, env=env, cwd=ROOT) as ranks:
        result = ranks.wait(200)
        outputs = result.outputs
    assert result.exit_code == 0, "\n".join(outputs)
    # The tuner's own process may still say something after the rank's last word.
    reports = [[line for line in out.splitlines() if line.startswith("{")][-1] for out in outputs]
    return [json.loads(report) for report in reports], outputs


def agreed(reports: list[Any]) -> None:
    """All ranks had the same parameters after each step, and nothing was compiled after the first."""
    assert len({r["digest"] for r in reports}) == 1
    assert len({r["steps"] for r in reports}) == 1
    assert [r["compiled"] for r in reports] == [0] * len(reports)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """Eight processes under 100 swaps, and their run log."""
    log = tmp_path_factory.mktemp("loop") / "run.jsonl"
    return run("jit", 100, 8, log=log)[0], log


def test_a_hundred_swaps_under_jit_and_scan_compile_nothing_and_change_no_result(eight: tuple[list[Any], Path]):
    reports, _ = eight
    agreed(reports)
    assert all(r["commits"] >= 100 and r["state"] == "on" for r in reports)
    assert len({tuple(r["versions"]) for r in reports}) == 1


def test_a_swap_stalls_the_collectives_path_for_less_than_a_millisecond(eight: tuple[list[Any], Path]):
    done = [line for line in runlog.read(eight[1]) if line["type"] == "decision" and line["committed"]]
    assert len(done) >= 100
    assert [path.name for path in eight[1].parent.iterdir()] == ["run.jsonl"], "begun once, by the leader"
    assert statistics.median(d["stall_s"] for d in done) < 1e-3
    assert len({d["program"] for d in done}) > 2, "the shuffle should have moved between schedules"


def test_replay_takes_the_same_decisions(eight: tuple[list[Any], Path], capsys: pytest.CaptureFixture[str]):
    assert replay.main([str(eight[1])]) == 0
    assert "decisions are the same" in capsys.readouterr().out


def test_replay_notices_a_changed_decision(eight: tuple[list[Any], Path], tmp_path: Path):
    lines = [json.loads(line) for line in eight[1].read_text().splitlines()]
    changed = next(line for line in lines if line["type"] == "decision")
    changed["reason"] += "!"
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps(line) for line in lines))
    assert replay.main([str(other)]) == 1


def test_swaps_under_pmap_in_one_process():
    reports, _ = run("pmap", 100, 1, devices=8)
    agreed(reports)
    assert reports[0]["commits"] >= 100
    assert reports[0]["control"] == "local"


def test_a_training_under_a_hundred_swaps_has_the_same_loss_curve():
    options = ["--epochs=45", "--batch=128", "--repeats=2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM.with_name("training.py")), *options]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"swaps in force: (\d+)", done.stdout)[1]) >= 100
    lax, ours = map(float, re.search(r"accuracy on the test set +(\S+) +(\S+)", done.stdout).groups())
    assert ours > 0.9
    assert ours == pytest.approx(lax, abs=0.01)
    assert float(re.search(r"between the two loss curves: (\S+)", done.stdout)[1]) < 1e-3


def test_a_leader_that_dies_between_promise_and_verdict_holds_nobody_up():
    reports, said = run("killed", 0, 4)
    agreed(reports)
    assert [r["cancels"] for r in reports] == [1] * 4
    assert len({tuple(r["versions"]) for r in reports}) == 1
    assert reports[0]["state"].startswith("stopped")
    assert "the tuner has stopped" in said[0]
    assert all(r["longest"] < 10 for r in reports)


def test_a_process_that_hears_no_verdict_finds_it_in_the_store():
    reports, _ = run("deaf", 3, 4)
    agreed(reports)
    assert reports[0]["control"] == "store"
    assert reports[3]["commits"] >= 1


def test_the_tuners_process_may_be_killed():
    reports, said = run("brainless", 4, 3)
    agreed(reports)
    assert reports[0]["state"].startswith("stopped: its process was ended by signal 9")
    assert all(r["state"].startswith("stopped: the leader has stopped") for r in reports[1:])
    assert "the tuner has stopped" in said[0]
    assert not any(r["drains"] for r in reports), "records that nobody reads should not be sent on"
    assert all(r["longest"] < 10 for r in reports)


def test_a_cut_control_network_costs_tuning_and_nothing_else(pytestconfig: pytest.Config):
    # `--full`: as long as the worst that a link's failure is expected to last.
    reports, said = run("cut", 12, 3, cut=30.0 if pytestconfig.getoption("--full") else 5.0)
    agreed(reports)
    assert "the tuner hears nothing from processes [1, 2]" in said[0]
    assert "again and goes on" in said[0]
    assert all(r["commits"] >= 11 for r in reports), "the tuning should have gone on after the cut"
    assert all(r["longest"] < 10 for r in reports)
