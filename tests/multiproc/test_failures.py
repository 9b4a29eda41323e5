"""What users meet: a rank that dies, hangs, is late, or calls something else, in a real job of four processes."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from jaxcoll.launch import Ranks

N, VICTIM = 4, 3
WORKER = Path(__file__).with_name("worker.py")


def run(mode: str, **settings: str) -> list[str]:
    """The outputs of all ranks, once every rank but perhaps the victim has ended."""
    env = {f"JAXCOLL_{name.upper()}": value for name, value in settings.items()}
    with Ranks([sys.executable, str(WORKER), mode], N, env=env) as ranks:
        deadline = time.monotonic() + 120
        awaited = [rank for rank in range(N) if rank != VICTIM or mode not in ("stop", "kill")]
        while (codes := ranks.poll()) and any(codes[rank] is None for rank in awaited):
            assert time.monotonic() < deadline, "\n".join(ranks.tail(r) for r in range(N))
            time.sleep(0.05)
        assert all(codes[rank] == 0 for rank in awaited), "\n".join(ranks.tail(r) for r in range(N))
        return [ranks.output(r) for r in range(N)]


def raised(output: str) -> tuple[float, str]:
    """Seconds and text of the error that a rank reports."""
    match = re.search(r"raised after ([\d.]+) s: (.*)", output)
    assert match, output
    return float(match[1]), match[2]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_rank(transport: str):
    for output in [o for r, o in enumerate(run("kill", transport=transport)) if r != VICTIM]:
        seconds, text = raised(output)
        assert seconds < 3  # the finding is the end of the connection: at once, on a busy machine a little later
        assert "rank 3 is lost" in text
        assert "all_reduce sum f32[20000]" in text
        assert "step" in text
        assert "edge" in text
        assert "still works" in output


def test_a_rank_that_is_alive_and_stuck():
    outputs = run("stop", timeout="2", warn_after="1")
    for output in [o for r, o in enumerate(outputs) if r != VICTIM]:
        seconds, text = raised(output)
        assert 1.9 < seconds < 6
        assert "JAXCOLL_TIMEOUT" in text
        assert "rank 3" in text
        assert "edge" in text
        assert "still works" in output
    assert any(re.search(r"waits for 1 s.*rank 3", output) for output in outputs)


def test_a_late_rank_is_no_error_but_named():
    outputs = run("late", warn_after="1")
    for output in outputs:
        assert "no error" in output
        assert "still works" in output
    assert any(re.search(r"waits for 1 s.*rank 3", output) for output in outputs)


@pytest.mark.parametrize(("mode", "odd"), [("mismatch", "f32[20001]"), ("nothing", "f32[0]")])
def test_ranks_that_disagree(mode: str, odd: str):
    for output in run(mode):
        seconds, text = raised(output)
        assert seconds < 10
        assert "the ranks disagree" in text
        assert "f32[20000]" in text
        assert odd in text
        assert "still works" in output


def test_nothing_is_left_in_shared_memory():
    before = set(Path("/dev/shm").iterdir())
    run("kill", transport="shm")
    assert set(Path("/dev/shm").iterdir()) <= before
