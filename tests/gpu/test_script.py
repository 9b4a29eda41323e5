"""The script for a machine with a GPU, over the stand-in: every row of its table is there, and nothing breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import standin

RUN = Path(__file__).with_name("run.sh")
ROWS = (
    "| results | ", "| copy of ", "| an edge of as many bytes ", "ring, pairs", "dual_tree, groups", "| recording, ",
    "inside: NCCL's own collectives |", "inside: edges |",
    "| NCCL's AllReduce", "| a swap: communicators", "| kernels compiled by swaps | 0 |", "| one rank to itself",
    "| jax.lax.psum",
)  # fmt: skip


def run(out: Path, *arguments: str) -> str:
    command = ["bash", str(RUN), "--standin", str(standin().path), "--bytes", "65536", "--rounds", "3", *arguments]
    env = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "run.log").read_text() == done.stdout
    return done.stdout


@pytest.mark.timeout(290)
def test_every_row(tmp_path: Path):
    said = run(tmp_path)
    for row in ROWS:
        assert row in said, f"{row!r} is missing in\n{said}"
    assert "times mean nothing" in said


@pytest.mark.timeout(290)
def test_where_nccl_refuses_several_ranks(tmp_path: Path):
    said = run(tmp_path, "--alone")
    assert "| one rank to itself" in said
    assert "| results" not in said
