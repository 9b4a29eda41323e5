"""The whole command, with jax.lax as the implementation: it needs no native library, and has all of the parts."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from needs import need

from jaxcoll import cli
from jaxcoll.bench import groups
from jaxcoll.bench.control import Listener
from jaxcoll.errors import JaxcollError


def bench(*flags: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxcoll", "bench", *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, **(env or {})}
    )


def results(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["results"]


@pytest.mark.parametrize(("layout", "ranks"), [("inproc", 3), ("procs", 2)])
def test_every_operation(layout: str, ranks: int, tmp_path: Path):
    out = tmp_path / "out.json"
    quick = ("--iters=3", "--warmup=1", "--blocks=2", "--impl=lax", f"--json={out}")
    done = bench(*quick, "--collective=all", f"--ranks={ranks}", f"--layout={layout}", "--sizes=1K,100K")
    assert done.returncode == 0, done.stderr
    rows = results(out)
    operations = {row["collective"] for row in rows}
    assert operations == {"psum", "pmean", "pmax", "pmin", "all_gather", "psum_scatter", "all_to_all", "ppermute"}
    assert "lax: jax.lax.pbroadcast does not exist on cpu" in done.stdout
    for row in rows:
        assert row["nwrong"] == 0
        assert (row["impl"], row["ranks"], row["layout"], row["dtype"]) == ("lax", ranks, layout, "float32")
        assert 0 < row["time_us"]["min"] <= row["time_us"]["median"] <= row["time_us"]["p99"]
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert "# Collective test concluded: psum_scatter" in done.stdout


def test_a_chain_and_another_dtype(tmp_path: Path):
    out = tmp_path / "out.json"
    common = ("--iters=2", "--warmup=0", "--impl=lax", "--layout=inproc", f"--json={out}")
    done = bench(*common, "--collective=psum,pmean,pmax,ppermute", "--ranks=3", "--sizes=4K", "--chain=5")
    assert done.returncode == 0, done.stdout + done.stderr
    done = bench(*common, "--ranks=4", "--sizes=4K", "--dtype=bfloat16,int32,float64,bool,complex64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["dtype"] for row in results(out)] == ["bfloat16", "int32", "float64", "bool", "complex64"]
    assert [row["size_bytes"] for row in results(out)] == [4096] * 5


def test_the_memory_as_a_peer(tmp_path: Path):
    out = tmp_path / "out.json"
    common = ("--iters=2", "--warmup=0", "--impl=lax", "--peers=copy", "--layout=inproc", "--ranks=3", f"--json={out}")
    done = bench(*common, "--collective=psum,all_gather,psum_scatter,all_to_all", "--sizes=12K")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["impl"] for row in results(out)] == ["lax", "copy"] * 4
    assert [row["size_bytes"] for row in results(out)] == [12288] * 8
    done = bench(*common, "--sizes=4K", "--dtype=uint8,bool,complex64")
    assert done.returncode == 0, done.stdout + done.stderr
    done = bench(*common, "--sizes=4K", "--chain=2")
    assert "copy: copies stand beside one collective" in done.stdout
    assert [row["impl"] for row in results(out)] == ["lax"]


def test_mpi_in_turn_with_jax(tmp_path: Path):
    installed = shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None
    need(installed, "Open MPI with mpi4py", "MPI")
    out = tmp_path / "out.json"
    done = bench(
        "--iters=3", "--impl=lax", "--peers=mpi", "--collective=all", "--ranks=2", "--sizes=4K", f"--json={out}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["impl"] for row in results(out)] == ["lax", "mpi"] * 8 + ["mpi"]
    assert all(row["nwrong"] == 0 for row in results(out))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--collective=allreduce"], "--collective=allreduce is unknown. Known: psum"),
        (["--sizes=4X"], "--sizes='4X'"),
        (["--ranks=0"], "--ranks=0 must be whole numbers"),
        (["--ranks=two"], "--ranks=two must be whole numbers"),
        (["--peers=nccl"], "--peers=nccl is unknown. Known: lax, mpi, copy"),
        (["--peers=JAXCOLL_RECORD=perhaps"], "JAXCOLL_RECORD='perhaps' is not accepted"),
        (["--peers=JAXCOLL_RECORDS=off"], "JAXCOLL_RECORDS is no setting of jaxcoll. Did you mean JAXCOLL_RECORD?"),
        (["--impl=gloo"], "--impl=gloo is unknown"),
        (["--nosuchflag"], "nosuchflag"),
        (["--iters=0"], "iters"),
        (["psum"], "'psum' is no flag"),
    ],
)
def test_wrong_flags_end_with_2_before_anything_starts(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(groups, "Ranks", None)
    assert cli.main(["bench", *flags]) == 2
    assert message in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("collective", "ranks", "layout", "sizes", "dtype", "schedule", "transport", "peers", "iters", "json"):
        assert f"--{flag}" in text.replace("--[no]", "--")
    assert "jaxcoll bench --ranks 8 --peers lax" in text


def test_wrong_values_fail_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def ask(self: groups.Group, timeout: float, **message: Any) -> list[dict[str, Any]]:
        answers = {
            "prepare": {"nwrong": 2, "extra_bytes": None, "seconds": []},
            "time": {"seconds": [1e-3]},
            "drop": {},
        }
        return [answers[message["do"]]]

    monkeypatch.setattr(groups.Group, "ask", ask)
    monkeypatch.setattr(groups, "start_jax", lambda *arguments: object.__new__(groups.Group))
    assert cli.main(["bench", "--ranks=1", "--sizes=4K", "--blocks=1", "--iters=1"]) == 1
    assert "# Out of bounds values : 2 FAILED" in capsys.readouterr().out


def group_of(code: str, ranks: int, resources: Any) -> groups.Group:
    serve = "import os, sys, time; from jaxcoll.bench import control; rank = int(os.environ['JAXCOLL_LAUNCH_RANK'])\n"
    listener = resources.enter_context(Listener())
    processes = resources.enter_context(groups.Ranks([sys.executable, "-c", serve + code], ranks, env=listener.env))
    return groups.Group(processes, listener, ranks)


def test_an_error_in_one_process_is_named():
    code = "control.serve(rank, {'add': lambda a: {'sum': a + rank if rank < 2 else 1 // 0 if a else 'x' * 2**62}})"
    with contextlib.ExitStack() as resources:
        group = group_of(code, 3, resources)
        with pytest.raises(JaxcollError, match="Process 2: ZeroDivisionError"):
            group.ask(30.0, do="add", a=5)
        with pytest.raises(
            JaxcollError, match="Process 2: there is not enough memory for this size; name smaller --sizes"
        ):
            group.ask(30.0, do="add", a=0)


def test_answers_come_in_rank_order():
    code = "control.serve(rank, {'add': lambda a: time.sleep(0.2 * (rank == 0)) or {'sum': a + rank}})"
    with contextlib.ExitStack() as resources:
        group = group_of(code, 3, resources)
        assert group.ask(30.0, do="add", a=5) == [{"sum": 5}, {"sum": 6}, {"sum": 7}]
        group.close()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "control.serve(rank, {'go': lambda: print('last words', flush=True) or os._exit(3)})",
            "(?s)ended with 3.*last words",
        ),
        ("control.serve(rank, {'go': lambda: time.sleep(60)})", "did not answer 'go' within 1 s"),
    ],
)
def test_a_process_that_dies_or_hangs_ends_the_run(code: str, message: str):
    with contextlib.ExitStack() as resources:
        group = group_of(code, 2, resources)
        with pytest.raises(JaxcollError, match=message):
            group.ask(1.0, do="go")


def test_a_process_that_never_starts_ends_the_run():
    with contextlib.ExitStack() as resources, pytest.raises(JaxcollError, match="(?s)ended with 4.*no luck"):
        group_of("print('no luck'); sys.exit(4)", 1, resources)


def test_a_connection_without_the_secret_is_dropped():
    code = (
        "import json, socket\nport, _, token = os.environ[control.ENV].partition(':')\n"
        'for line in (b\'{"rank": 0, "token": "guess"}\\n\',):\n'
        "    s = socket.create_connection(('127.0.0.1', int(port))); s.sendall(line); assert s.recv(1) == b''\n"
        "control.serve(rank, {'go': lambda: {'well': True}})"
    )
    with contextlib.ExitStack() as resources:
        assert group_of(code, 1, resources).ask(30.0, do="go") == [{"well": True}]


def test_jaxcoll_itself_against_lax(tmp_path: Path):
    """The implementation that the command is for, in the operations that the others share with it."""
    out = tmp_path / "out.json"
    names = "psum,pmax,all_gather,psum_scatter,all_to_all,ppermute"
    done = bench("--peers=lax", f"--collective={names}", "--ranks=3", "--sizes=1000", "--iters=2", f"--json={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["impl"] for row in results(out)] == ["jaxcoll", "lax"] * 6
    assert all(row["nwrong"] == 0 and row["extra_bytes"] is not None for row in results(out))


def test_a_file_for_the_results_that_cannot_be_written(tmp_path: Path):
    # Before the run where that shows then, and by its name where only the writing fails.
    for path, text in ((tmp_path / "none" / "x.json", "No such file"), (Path("/dev/full"), "No space left")):
        done = bench("--impl=lax", "--layout=inproc", "--ranks=2", "--sizes=64", "--iters=1", f"--json={path}")
        assert done.returncode == 1
        assert f"jaxcoll bench: {path}: {text}" in done.stderr
        assert ("concluded" in done.stdout) == (path.name == "full")
