"""What large collectives take of the memory: little beside argument and result, and no fresh pages in every call."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from jaxcoll import launch
from jaxcoll.runtime import world


def test_a_large_sum_takes_at_most_16_mib_more():
    program = Path(__file__).with_name("memory.py")
    done = launch.run([sys.executable, str(program), "64"], 8, output="capture", timeout=200)
    assert done.exit_code == 0, "\n".join(done.outputs)
    for output in done.outputs:
        match = re.search(r"beyond argument and result (-?[\d.]+) MiB", output)
        assert match, output
        assert float(match[1]) <= 16


def faults(**env: str) -> int:
    program = Path(__file__).with_name("faults.py")
    done = launch.run([sys.executable, str(program)], 2, env=env, output="capture", timeout=200)
    assert done.exit_code == 0, "\n".join(done.outputs)
    return min(int(output.split("faults ")[1]) for output in done.outputs)


def test_freed_memory_is_kept_for_the_next_result():
    # Twenty results of 48 MiB: 480 large pages where every call takes fresh ones, and the small ones at their ends.
    fresh = faults(JAXCOLL_KEEP_MEMORY="off")
    assert fresh > 400
    assert faults() < fresh / 2
    # Who has set up malloc himself is left alone: this is glibc's own default, said aloud.
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > fresh / 2


@pytest.mark.parametrize(
    ("setting", "devices", "environ", "kept"),
    [
        ("auto", 1, {}, True),
        ("auto", 2, {}, False),
        ("on", 2, {"MALLOC_TRIM_THRESHOLD_": "1"}, True),
        ("off", 1, {}, False),
        ("auto", 1, {"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True),
        ("auto", 1, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, False),
        ("auto", 1, {"MALLOC_TRIM_THRESHOLD_": "1"}, False),
    ],
)
def test_when_memory_is_kept(setting: str, devices: int, environ: dict[str, str], kept: bool):
    assert world.keeps_memory(setting, devices, environ) == kept
