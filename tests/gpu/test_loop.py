"""The GPU's records close the tuning loop: drain, worker, leader, brain, and a swap of the GPU's tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("loop_program.py")


@pytest.mark.timeout(290)
def test_a_slow_link_between_gpus_is_named_and_swapped_away(tmp_path: Path):
    # The paper's policy: the default one has no model of single links inside a host, and all ranks are on one here.
    log = tmp_path / "run.jsonl"
    env = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "16",
        "JAXCOLL_TUNER": "react-paper", "JAXCOLL_RUN_LOG": str(log),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "60", str(log)], env={**os.environ, **env}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    src, dst = report["slow"]
    decision = report["decision"]
    assert decision, f"no decision; {report['findings']}"
    assert decision["committed"]
    assert f"edge {src}->{dst} " in decision["reason"]
    assert report["versions"] == [decision["version"]]
    assert report["compiled"] == 0
    assert report["made"] == 2 * report["fresh"]  # both ends of pairs that had never spoken, none for others
    assert not report["breaches"]
