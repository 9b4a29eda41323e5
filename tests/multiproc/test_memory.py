"""A large sum needs little memory beside its argument and its result."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from jaxcoll import launch


def test_a_large_sum_takes_at_most_16_mib_more():
    program = Path(__file__).with_name("memory.py")
    done = launch.run([sys.executable, str(program), "64"], 8, output="capture", timeout=200)
    assert done.exit_code == 0, "\n".join(done.outputs)
    for output in done.outputs:
        match = re.search(r"beyond argument and result (-?[\d.]+) MiB", output)
        assert match, output
        assert float(match[1]) <= 16
