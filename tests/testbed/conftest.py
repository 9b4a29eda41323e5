from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator

import pytest
from needs import need

from jaxcoll.testbed import access
from testbed.helpers import ROOT, Start


@pytest.fixture
def testbed_allowed() -> None:
    """The test process itself can make namespaces (root). An ordinary user's way has tests of its own."""
    try:
        access.require()
    except access.Unavailable as error:
        need(False, f"testbed in this process: {error}", "TESTBED")


@pytest.fixture
def start() -> Generator[Start, None, None]:
    """Starts a Python command line that finds jaxcoll; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, prefix: list[str] | None = None, **options) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [*(prefix or []), sys.executable, *arguments], text=True, env=env, cwd="/", **{**pipes, **options}
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
