"""A program may end while its last steps are under way: they still count for the others."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from jaxcoll import config, launch
from jaxcoll.runtime import job, leaving

PROGRAM = Path(__file__).with_name("ending.py")


@pytest.mark.parametrize(("mode", "transport"), [("kept", "shm"), ("dropped", "tcp")])
def test_steps_under_way_at_the_end_come_to_their_end(mode: str, transport: str):
    env = {"JAXCOLL_TRANSPORT": transport}
    result = launch.run([sys.executable, str(PROGRAM), mode], 2, env=env, timeout=120)
    assert result.exit_code == 0, "\n".join(result.outputs)
    assert "result" in result.outputs[0]
    assert not any("jaxcoll:" in output for output in result.outputs), "\n".join(result.outputs)


class Gone:
    """The store of a job whose process 0 is dead."""

    def set_bytes(self, key: str, value: bytes) -> None:
        raise RuntimeError(f"UNAVAILABLE: {key}")

    get_bytes = set_bytes


class Left:
    """What is asked of a world: process 1 of three, one of which is lost."""

    job = job.Job(3, 1, ((0,), (1,), (2,)), Gone(), None)  # type: ignore[arg-type]
    settings = config.Config(timeout=1.0)

    def others(self) -> dict[int, int]:
        return {0: leaving.LOST, 2: leaving.THERE}


@pytest.mark.parametrize("me", [0, 1])
def test_where_the_store_is_gone_a_process_leaves_without_the_others(me: int, monkeypatch: pytest.MonkeyPatch):
    left: list[str] = []
    monkeypatch.setattr(leaving.compat, "abandon_distributed", lambda: left.append("apart"))
    world = Left()
    world.job = dataclasses.replace(Left.job, me=me)
    leaving.agree(world)
    assert left == ["apart"]
