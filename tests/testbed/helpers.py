"""What the tests of the testbed share."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from jaxcoll.testbed import iproute, state

ROOT = Path(__file__).parents[2]

Start = Callable[..., "subprocess.Popen[str]"]


def ordinary() -> list[str]:
    """What makes a command run without root's rights over the network, whoever runs the tests."""
    if os.geteuid():
        return []
    return ["setpriv", "--bounding-set=-sys_admin,-net_admin", "--inh-caps=-sys_admin,-net_admin"]


def left_over(run: str) -> list[str]:
    """The namespaces of a testbed."""
    return [name for name in iproute.namespaces() if name.startswith(f"{state.PREFIX}{run}-")]


def outcome(process: subprocess.Popen[str], text: str = "", seconds: float = 120) -> tuple[int, str]:
    """Exit status and everything that a process says when `text` is its input."""
    out, err = process.communicate(text, timeout=seconds)
    return process.returncode, out + err
