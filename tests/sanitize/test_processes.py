"""A run of several processes with the library under a sanitizer (make asan, make tsan); an ordinary one else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

REPORT = ("ERROR: AddressSanitizer", "runtime error:", "WARNING: ThreadSanitizer", "Sanitizer:DEADLYSIGNAL")


@pytest.mark.parametrize(
    "flags",
    [
        ("--layout=procs", "--ranks=3"),
        ("--layout=procs", "--ranks=3", "--transport=tcp"),
        ("--layout=inproc", "--ranks=4"),
    ],
    ids=["shm", "tcp", "inproc"],
)
def test_every_operation_is_right_and_clean(flags: tuple[str, ...]):
    command = [sys.executable, "-m", "jaxcoll", "bench", "--collective=all", "--sizes=1000,300K", "--iters=4"]
    done = subprocess.run(
        [*command, "--warmup=1", "--progress=false", *flags],
        env={**os.environ, "JAXCOLL_TIMEOUT": "120"},
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count(" OK\n") == 9
    assert not [line for line in said.splitlines() if any(word in line for word in REPORT)]


def test_the_sanitizer_is_there_where_its_lane_says_so():
    library, lane = os.environ.get("JAXCOLL_LIBRARY", ""), os.environ.get("JAXCOLL_TEST_SANITIZER", "")
    if lane:
        symbols = subprocess.run(["readelf", "--dyn-syms", library], capture_output=True, text=True, check=True).stdout
        assert f"__{lane}_init" in symbols
        assert lane in os.environ["LD_PRELOAD"]
