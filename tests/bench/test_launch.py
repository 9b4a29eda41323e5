from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxcoll import launch
from jaxcoll.errors import UsageError


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


RANK = "import os, sys, time; r = int(os.environ['JAXCOLL_LAUNCH_RANK']); "


def test_every_rank_runs_and_its_output_is_kept_apart():
    result = launch.run(python(RANK + "print('I am', r); print('oops', file=sys.stderr)"), 3, timeout=60)
    assert result.codes == [0, 0, 0]
    assert result.exit_code == 0
    assert [sorted(output.splitlines()) for output in result.outputs] == [[f"I am {r}", "oops"] for r in range(3)]


def test_a_failed_rank_ends_the_others():
    start = time.monotonic()
    with launch.Ranks(python(RANK + "sys.exit(7) if r == 1 else time.sleep(600)"), 3) as ranks:
        result = ranks.wait(60, grace=0.1)
    assert result.codes == [-signal.SIGKILL, 7, -signal.SIGKILL]
    assert time.monotonic() - start < 30


def test_the_others_may_run_on():
    with launch.Ranks(python(RANK + "time.sleep(0.3 * (r == 1)); sys.exit(3 if r == 0 else 0)"), 2) as ranks:
        result = ranks.wait(60, on_failure="wait")
    assert result.codes == [3, 0]
    assert result.exit_code == 3


def test_a_rank_can_be_killed_and_its_signal_shows():
    with launch.Ranks(python(RANK + "time.sleep(600 if r == 0 else 0)"), 2) as ranks:
        assert ranks.poll()[0] is None
        ranks.kill(0)
        result = ranks.wait(60)
    assert result.codes == [-signal.SIGKILL, 0]
    assert result.exit_code == 128 + signal.SIGKILL


def test_a_timeout_names_the_late_ranks_and_shows_their_last_words():
    code = RANK + "print('waiting', flush=True); time.sleep(600 if r == 1 else 0)"
    with launch.Ranks(python(code), 2) as ranks:
        while "waiting" not in ranks.output(1):
            time.sleep(0.02)
        with pytest.raises(TimeoutError) as caught:
            ranks.wait(0.3)
    assert "still ran: [1]" in str(caught.value)
    assert "[1] waiting" in str(caught.value)


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_die_with_the_launcher(signum: int):
    code = (
        "import sys, time\nfrom jaxcoll.launch import Ranks\n"
        "ranks = Ranks([sys.executable, '-c', 'import time; time.sleep(600)'], 2)\n"
        "print(ranks.pid(0), ranks.pid(1), flush=True)\ntime.sleep(600)"
    )
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    time.sleep(0.5)  # the ranks' first lines, which tie them to the parent, have run
    assert len(pids) == 2
    assert not any(map(_gone, pids))
    parent.send_signal(signum)
    parent.wait(30)
    deadline = time.monotonic() + 30
    while not all(map(_gone, pids)):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)
    parent.stdout.close()


def test_leaving_the_block_leaves_no_process_and_no_file():
    with launch.Ranks(python("import time; time.sleep(600)"), 2) as ranks:
        pids = [ranks.pid(rank) for rank in range(2)]
        logs = ranks._logs
        assert logs.exists()
    assert all(map(_gone, pids))
    assert not logs.exists()


# A rank that leaves a child behind; the child says its number.
LEAVES = (
    RANK + "import subprocess; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']{}); "
)
SAYS = "print(child.pid, flush=True); "


def _await_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while not all(map(_gone, pids)):
        assert time.monotonic() < deadline, "a rank's child outlived the ranks"
        time.sleep(0.02)


@pytest.mark.parametrize("output", ["prefix", "first", "capture"])
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"], ids=["ended", "killed"])
def test_children_of_ranks_end_with_them(output: launch.Output, end: str, tmp_path: Path):
    start = time.monotonic()
    code = LEAVES.format("") + f"open(r'{tmp_path}/' + str(r), 'w').write(str(child.pid)); " + end
    with launch.Ranks(python(code), 2, output=output) as ranks:
        result = ranks.wait(60)
    assert result.codes == [-signal.SIGKILL if end else 0] * 2
    assert time.monotonic() - start < 30
    _await_gone([int((tmp_path / str(r)).read_text()) for r in range(2)])


def test_children_may_finish_what_they_write(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "_GRACE", 20.0)
    code = "import subprocess; subprocess.Popen(['sh', '-c', 'sleep 0.2; echo late'])"
    for output in ("capture", "prefix"):
        assert launch.run(python(code), 1, output=output, timeout=60).outputs == ["late\n"]


def test_leaving_the_block_ends_children_of_ranks_that_ended():
    code = LEAVES.format("") + SAYS + "time.sleep(600 * r)"
    with launch.Ranks(python(code), 2) as ranks:
        while None in ranks.poll()[:1] or not all(ranks.output(rank) for rank in range(2)):
            time.sleep(0.02)
        children = [int(ranks.output(rank)) for rank in range(2)]
        assert not any(map(_gone, children))
    _await_gone(children)


def test_a_process_that_left_the_group_holds_nobody_up():
    start = time.monotonic()
    with launch.Ranks(python(LEAVES.format(", start_new_session=True") + SAYS), 1, output="prefix") as ranks:
        (child,) = map(int, ranks.wait(60).outputs)
    try:
        assert time.monotonic() - start < 30
        assert not _gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_nothing_is_lost_where_the_output_is_read_slowly(monkeypatch: pytest.MonkeyPatch):
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(0.01)
            return super().write(text)

    monkeypatch.setattr(launch, "_GRACE", 0.1)
    monkeypatch.setattr(sys, "stdout", shown := Slow())
    result = launch.run(python("for i in range(100): print(i)"), 1, output="prefix", timeout=60)
    assert result.outputs[0].split() == [str(i) for i in range(100)]
    assert len(shown.getvalue().splitlines()) == 100


def test_ranks_are_refused_where_the_kernel_throws_exit_codes_away():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(UsageError, match="SIGCHLD is ignored"):
            launch.Ranks(python(""), 1)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_failed_rank_shows_where_the_command_inherits_an_ignored_sigchld(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit(7)")
    command = [sys.executable, "-m", "jaxcoll", "launch", "-n", "1", str(program)]
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = subprocess.run([*python(ignoring), *command], capture_output=True, timeout=60, check=False)
    assert done.returncode == 7


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_told_to_end_leaves_no_file_and_no_child(signum: signal.Signals, tmp_path: Path):
    program, scratch = tmp_path / "program.py", tmp_path / "scratch"
    scratch.mkdir()
    program.write_text(LEAVES.format("") + SAYS + "time.sleep(600)")
    command = [sys.executable, "-m", "jaxcoll", "launch", "-n", "1", str(program)]
    before = signal.signal(signum, signal.SIG_DFL)  # under nohup it is ignored, and the command would leave it so
    try:
        running = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}, stdout=subprocess.PIPE)
    finally:
        signal.signal(signum, before)
    with running:
        try:
            assert running.stdout
            child = int(running.stdout.readline().split()[1])
            assert list(scratch.iterdir())
            running.send_signal(signum)
            assert running.wait(60) == 128 + signum
        finally:
            running.kill()
    assert not list(scratch.iterdir())
    _await_gone([child])


def test_logs_stay_where_they_were_asked_for(tmp_path: Path):
    launch.run(python(RANK + "print('rank', r)"), 2, logs=tmp_path / "logs", timeout=60)
    assert (tmp_path / "logs" / "rank1.log").read_text() == "rank 1\n"


def test_a_program_that_does_not_exist_is_told():
    result = launch.run(["/no/such/program"], 1, timeout=60)
    assert result.exit_code == 1
    assert "can't run /no/such/program" in result.outputs[0]


@pytest.mark.parametrize(("nprocs", "devices"), [(0, 1), (1, 0)])
def test_nonsense_is_refused(nprocs: int, devices: int):
    with pytest.raises(UsageError):
        launch.Ranks(python(""), nprocs, devices=devices)


def test_the_command_prefixes_lines_and_returns_the_status(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nprint('hello', sys.argv[1:])\nsys.exit(5 * int(os.environ['JAXCOLL_LAUNCH_RANK']))\n"
    )
    command = [sys.executable, "-m", "jaxcoll", "launch", "-n", "2", str(program), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert sorted(done.stdout.splitlines()) == ["[0] hello ['--steps', '3']", "[1] hello ['--steps', '3']"]
    assert done.returncode == 5
    assert "exit codes by rank: [0, 5]" in done.stderr


def test_ranks_go_on_where_nobody_reads_their_lines(tmp_path: Path):
    program, done = tmp_path / "program.py", tmp_path / "done"
    program.write_text(f"for i in range(20_000): print(i)\nopen({str(done)!r}, 'w').close()\n")
    command = [sys.executable, "-m", "jaxcoll", "launch", "-n", "1", str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout
        assert running.stderr
        assert running.stdout.readline() == "[0] 0\n"
        running.stdout.close()
        assert "Traceback" not in running.stderr.read()
        running.wait(60)
    assert done.exists()


def test_of_lines_that_are_shown_the_last_ones_are_kept(capsys: pytest.CaptureFixture[str]):
    result = launch.run(python("for i in range(3000): print(i)"), 1, output="prefix", timeout=60)
    assert result.outputs[0].split() == [str(i) for i in range(2000, 3000)]
    assert len(capsys.readouterr().out.splitlines()) == 3000


def test_a_progress_bar_and_an_endless_line_are_shown_while_they_grow(capsys: pytest.CaptureFixture[str]):
    code = "import time; print('10%', '20%', 'x' * 100_000, sep='\\r', end='', flush=True); time.sleep(600)"
    shown, deadline = "", time.monotonic() + 30
    with launch.Ranks(python(code), 1, output="prefix"):
        while shown.count("x") < 50_000:
            assert time.monotonic() < deadline, shown
            time.sleep(0.02)
            shown += capsys.readouterr().out
    assert shown.startswith("[0] 10%\n[0] 20%\n[0] xxx")


def test_ends_of_lines_are_kept_as_they_were_written():
    code = "import os; [os.write(1, part) for part in (b'a\\r', b'\\nb\\n\\nc\\rd', b'e')]"
    with launch.Ranks(python(code), 1, output="prefix") as ranks:
        ranks.wait(60)
        assert list(ranks._last[0]) == [b"a\r\n", b"b\n", b"\n", b"c\r", b"de"]


def test_a_whole_log_is_read_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with launch.Ranks(python("print('start'); print('x' * 200_000); print('end')"), 1, logs=tmp_path) as ranks:
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "output", lambda _: pytest.fail("all of it was read"))
            result = ranks.wait(60)
            assert ranks.tail(0).endswith("x\n[0] end")
            assert len(ranks.tail(0)) < 100_000
        assert result.outputs[0].startswith("start\n")


def test_the_package_has_its_modules():
    code = "import jaxcoll; assert not jaxcoll.launch.initialize(); print(jaxcoll.errors.UsageError, jaxcoll.config)"
    done = subprocess.run(python(code), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_only_rank_0_talks_and_a_failed_one_is_shown(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nr = int(os.environ['JAXCOLL_LAUNCH_RANK'])\nprint('hello', r)\nsys.exit(r)\n")
    command = [sys.executable, "-m", "jaxcoll", "launch", "-n", "2", "--output", "first", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "hello 0\n"
    assert "[1] hello 1" in done.stderr


def test_processes_join_and_compute_together():
    code = (
        "from jaxcoll import launch\nassert launch.initialize(devices=4)\nimport jax, jax.numpy as jnp\n"
        "from jax.experimental import multihost_utils as m\n"
        "ranks = m.process_allgather(jnp.int32(jax.process_index())).tolist()\n"
        "print(f'{jax.process_count()} {jax.device_count()} {ranks}')"  # one write: XLA's threads write there as well
    )
    result = launch.run(python(code), 2, devices=2, timeout=120)
    assert result.codes == [0, 0], result.outputs
    assert all("2 4 [0, 1]" in output for output in result.outputs), result.outputs


def test_the_same_program_runs_by_itself():
    code = (
        "from jaxcoll import launch\nassert not launch.initialize(devices=3)\nimport jax\n"
        "assert jax.device_count() == 3 and jax.process_count() == 1"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", launch.RANK, launch.NPROCS)}
    done = subprocess.run(python(code), env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_device_env_keeps_what_is_set():
    env = launch.device_env(8, {"XLA_FLAGS": "--a=1 --xla_force_host_platform_device_count=2", "PJRT_NPROC": "5"})
    assert env["XLA_FLAGS"] == "--a=1 --xla_force_host_platform_device_count=8"
    assert env["PJRT_NPROC"] == "5"
    assert int(launch.device_env(8, {})["PJRT_NPROC"]) >= 16
