"""The script for a machine with a GPU, over the stand-in: every row of its table is there, and nothing breaks."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import one_gpu
from .harness import standin

RUN = Path(__file__).with_name("run.sh")
ROWS = (
    "| results | ", "| copy of ", "| an edge of as many bytes ", "ring, pairs", "dual_tree, groups", "| recording, ",
    "inside: NCCL's own collectives |", "inside: edges |",
    "| NCCL's AllReduce",
    "| a swap of 4 ranks: communicators for new pairs, and on the way back | 6, 0 | made under load",
    "| the first execution after it", "| kernels compiled by swaps | 0 |", "| one rank to itself",
    "| jax.lax.psum", "| jaxcoll.psum on one device, handlers registered | right | cpu |",
)  # fmt: skip


def start(out: Path, *arguments: str, python: str = sys.executable, limit: int = 270) -> tuple[int, str, str]:
    """The script's exit status, output and errors. Without nvidia-smi: a GPU that is here has no part in it."""
    path = out / "path"
    path.mkdir()
    for tool in ("bash", "dirname", "mkdir", "tail", "tee", "timeout", "sh"):
        (path / tool).symlink_to(str(shutil.which(tool)))
    env = {**os.environ, "PYTHON": python, "OUT": str(out), "JAX_PLATFORMS": "cpu", "LIMIT_S": str(limit)}
    done = subprocess.run(
        ["bash", str(RUN), *arguments], env={**env, "PATH": str(path)}, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def run(out: Path, *arguments: str) -> str:
    rc, said, errors = start(out, "--standin", str(standin().path), "--bytes=65536", "--rounds=3", *arguments)
    assert rc == 0, said + errors
    assert (out / "run.log").read_text() == said
    return said


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
    assert "| jax.lax.psum" in said


@pytest.mark.timeout(290)
def test_words_where_there_is_no_gpu(tmp_path: Path):
    rc, said, errors = start(tmp_path, "--standin", "/nowhere/libnothing.so")
    assert rc == 1
    assert not said
    first, second = errors.splitlines()
    assert first == "There is no GPU that can be used here."
    assert second.startswith("/nowhere/libnothing.so can't be loaded: ")


def test_words_where_the_interpreter_lacks_something(tmp_path: Path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    rc, said, errors = start(tmp_path, python=str(bare))
    assert (rc, said) == (1, "")
    missing, cure = errors.splitlines()
    assert missing == "ModuleNotFoundError: No module named 'cffi'"
    assert "make native .venv/.test" in cure


@pytest.mark.timeout(290)
def test_a_run_that_is_cut_off_keeps_its_rows(tmp_path: Path):
    rc, said, errors = start(tmp_path, "--standin", str(standin().path), "--rounds=100000000", "--alone", limit=12)
    assert rc == 124
    assert "|---|---|---|" in said
    assert errors.splitlines()[-1] == "cut off after 12 s (LIMIT_S); the rows above are whole"


def test_a_part_that_fails_is_a_row_and_the_others_go_on(capsys: pytest.CaptureFixture[str]):
    def wrong(*_: object) -> Iterator[one_gpu.Row]:
        yield "first", "1 ms", ""
        raise TimeoutError("a stream | hangs\nfor 60 s")

    def right(*_: object) -> Iterator[one_gpu.Row]:
        yield "second", "2 ms", "all of it"

    cuda: Any = None
    assert one_gpu.fill([wrong, right], cuda, argparse.Namespace(ranks=2)) == 1
    rows = capsys.readouterr().out.splitlines()
    assert rows == [
        "| first | 1 ms |  |",
        "| wrong | FAILED | TimeoutError: a stream / hangs for 60 s |",
        "| second | 2 ms | all of it |",
    ]
