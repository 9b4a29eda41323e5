"""`jaxcoll top`: where it finds a job, and what it shows of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from needs import need

from jaxcoll import top
from jaxcoll.errors import UsageError
from jaxcoll.steering import board
from loop.simulated import Job


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders without the jobs of this machine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(board, "_RUNTIMES", tmp_path / "user")
    monkeypatch.setattr(board.tempfile, "tempdir", str(tmp_path / "temporary"))


def status() -> dict[str, Any]:
    job = Job()
    job.run(30)
    return {"policy": "jaxcoll", "state": "on", **job.brain.status()}


def test_it_shows_times_matrix_findings_and_reasons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    need(importlib.util.find_spec("rich") is not None, "rich", "RICH")
    monkeypatch.setenv("COLUMNS", "200")
    pinned = status()
    pin = board.Board()
    pin.pin(pinned)
    assert top.main(["--once"]) == 0
    said = capsys.readouterr().out
    assert f"{pinned['swaps']} swaps" in said
    assert "MB/s from row to column" in said
    assert "all_reduce up to 8M over 8 ranks" in said
    assert "congested" in said
    assert f"measured {pinned['decisions'][0]['measured']:.2f}x" in " ".join(said.replace("│", " ").split())
    pin.remove()
    with pytest.raises(UsageError, match="no tuned job"):
        top.main(["--once"])


def test_names_are_whole_on_a_narrow_terminal():
    need(importlib.util.find_spec("rich") is not None, "rich", "RICH")
    from rich.console import Console

    names = {"key": "all_reduce up to 64M over 64 ranks (0123abcd.89ef4567)", "program": "recursive_doubling #2"}
    numbers = {"version": 12, "epochs": 123456, "median_ms": 123.45, "p95_ms": 234.5, "swaps": 3, "reverts": 1}
    console = Console(width=80)
    with console.capture() as shown:
        console.print(top.sets_table([names | numbers]))
    rows = [line.split("│") for line in shown.get().splitlines() if line.startswith("│")]
    for column, name in enumerate(names.values(), 1):
        assert "".join(row[column] for row in rows).replace(" ", "") == name.replace(" ", "")


def test_it_ends_with_the_job_that_is_killed(capsys: pytest.CaptureFixture[str]):
    need(importlib.util.find_spec("rich") is not None, "rich", "RICH")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as job:
        idle = {"policy": "jaxcoll", "state": "on", "swaps": 0, "reverts": 0, "sets": [], "decisions": []}
        board.Board(job.pid).pin(idle)
        watched = threading.Thread(target=top.main, args=[["--pid", str(job.pid)]], daemon=True)
        watched.start()
        watched.join(2.0)
        assert watched.is_alive(), "the job still runs"
        job.kill()
    watched.join(10.0)
    assert not watched.is_alive()
    assert capsys.readouterr().out.endswith("the job has ended, or no longer tunes\n")


def test_the_job_started_last_is_taken_whichever_told_of_itself_last():
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as job:
        time.sleep(0.02)  # the kernel counts starts in hundredths of a second
        with subprocess.Popen(command, stdin=subprocess.PIPE) as later:
            for pid in (later.pid, job.pid, os.getpid()):
                board.Board(pid).pin({"pid": pid})
            for times in (range(3), range(3)[::-1]):
                for pid, at in zip((later.pid, job.pid, os.getpid()), times):
                    os.utime(board.folder() / f"{pid}.json", (at, at))
                assert list(board.running()) == [later.pid, job.pid, os.getpid()]
            later.kill()
        job.kill()


@pytest.mark.parametrize("where", ["temporary", "user"])
def test_a_job_that_has_another_runtime_folder_is_found(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "user" / str(os.getuid())).mkdir(parents=True)
    with monkeypatch.context() as other:
        if where == "temporary":
            other.delenv("XDG_RUNTIME_DIR")
        else:
            other.setenv("XDG_RUNTIME_DIR", str(tmp_path / "user" / str(os.getuid())))
        board.Board().pin({"a": 1})
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    found = top.find(None)
    assert found.is_relative_to(tmp_path / where)
    assert board.read(found) == {"a": 1}
    found.parent.chmod(0o777)
    assert board.running() == {}, "somebody else may have written it"


def test_what_a_kill_left_behind_is_removed(tmp_path: Path):
    dead = 2**22 - 3
    board.Board(dead).pin({"a": 1})
    assert (tmp_path / "jaxcoll" / f"{dead}.json").exists()
    assert board.running() == {}
    assert not (tmp_path / "jaxcoll" / f"{dead}.json").exists()


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path):
    (tmp_path / "jaxcoll").mkdir()
    (tmp_path / "jaxcoll").chmod(0o777)
    pin = board.Board()
    pin.pin({"a": 1})
    assert list((tmp_path / "jaxcoll").iterdir()) == []
    assert board.running() == {}


def test_a_process_that_is_not_there_is_refused():
    board.Board().pin({"a": 1})
    with pytest.raises(UsageError, match=f"there are: {os.getpid()}"):
        top.find(1)
