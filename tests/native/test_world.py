"""The world of a process: what it tells, what it refuses, what it doesn't wait for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from typing import Any

import pytest

from jaxcoll.errors import UsageError
from jaxcoll.runtime.sets import Sets
from jaxcoll.runtime.world import World


def run(code: str, **env: str) -> str:
    """What a fresh process writes to stderr and stdout."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_informative_logs_are_shown_where_nobody_says_where_they_go() -> None:
    code = "import logging, jaxcoll; jaxcoll.init(); logging.getLogger('jaxcoll').info('so be it')"
    assert "jaxcoll: so be it" in run(code, JAXCOLL_LOG="info")
    assert "so be it" not in run(code, JAXCOLL_LOG="warning")
    own = "import logging; logging.basicConfig(format='mine: %(message)s'); " + code
    said = run(own, JAXCOLL_LOG="info")
    assert "mine: so be it" in said
    assert "jaxcoll: so" not in said


def test_status_answers_where_the_tuner_could_not_start() -> None:
    code = (
        "import jaxcoll\n"
        "from jaxcoll.errors import UsageError\n"
        "try:\n    jaxcoll.init()\nexcept UsageError as error:\n    print(error)\n"
        "print(jaxcoll.status()['tuner']['state'])"
    )
    said = run(code, JAXCOLL_TUNER="on", JAXCOLL_RECORD="off")
    assert "the tuner needs records" in said
    assert said.splitlines()[-1] == "stopped"


def test_another_version_is_told_though_it_tells_other_things_of_itself() -> None:
    one = World.__new__(World)
    one.job = types.SimpleNamespace(me=0)  # type: ignore[assignment]
    from jaxcoll.version import __version__

    one._check_versions([__version__, __version__])
    with pytest.raises(UsageError, match=r"process 1 runs jaxcoll 0\.0\.1.*install one version everywhere"):
        one._check_versions([__version__, "0.0.1"])


def test_a_set_that_is_being_made_keeps_nobody_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one may wait for other processes, whose worker may wait for this one's."""
    job = types.SimpleNamespace(me=0, devices=[[0, 1]])
    sets = Sets(types.SimpleNamespace(job=job))  # type: ignore[arg-type]
    inside, go = threading.Event(), threading.Event()

    def make(*_: Any) -> str:
        inside.set()
        assert go.wait(30)
        return "made"

    monkeypatch.setattr(sets, "_make", make)
    want = types.SimpleNamespace(key=lambda: 7, schedule=None)
    thread = threading.Thread(target=sets.prepare, args=(want, ((0, 1),)))
    thread.start()
    assert inside.wait(30)
    looked = threading.Thread(target=sets.all)
    looked.start()
    looked.join(5)
    stuck = looked.is_alive()
    go.set()
    thread.join(30)
    assert not stuck
    assert sets.all() == ["made"]
