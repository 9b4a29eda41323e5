"""Independent collectives and launches in flight never hang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_many_independent_collectives_in_flight(devices: int):
    script = Path(__file__).with_name("inflight.py")
    done = subprocess.run([sys.executable, str(script), str(devices), "5"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok" in done.stdout
