"""Start N processes of one program on this machine, joined by `jax.distributed` over loopback.

    jaxcoll launch -n 8 train.py --steps 100            every line of output gets its rank in front

The program calls `jaxcoll.launch.initialize()` in place of `jax.distributed.initialize()`; started by itself, without
the launcher, the same call does nothing and the program runs as one process.

Used by the benchmark, the demo and the tests. It owns its processes: they die with it, even when it is killed. What
they have started themselves ends soon after them, if it has stayed in their process group and the launcher was not
killed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from jaxcoll.errors import UsageError

RANK, NPROCS, COORDINATOR = "JAXCOLL_LAUNCH_RANK", "JAXCOLL_LAUNCH_NPROCS", "JAXCOLL_LAUNCH_COORDINATOR"

_DEVICES_FLAG = "--xla_force_host_platform_device_count"

Output = Literal["prefix", "first", "capture"]
_Pipe = IO[bytes]

_POLL = 0.02
_GRACE = 1.0
"""Seconds that what the ranks have started may run on after all of them have ended."""
_TAIL_LINES, _KEPT_LINES = 15, 1000
_TAIL_BYTES, _LONGEST_LINE = 64 << 10, 8 << 10

# Runs before the program: ask the kernel to kill this process when its parent dies (the parent may have died already),
# then become the program. It runs in the child's own interpreter, since code between fork and exec is unsafe in a
# parent with threads. 1 is PR_SET_PDEATHSIG; the request survives exec.
_SHIM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]): sys.exit(1)
try: os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error: sys.exit(f"can't run {sys.argv[2]}: {error.strerror}")
"""


def bound(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` as a child of this process and dies with it, even when it is killed."""
    return [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), *command]


@dataclasses.dataclass(frozen=True)
class Result:
    """How the ranks ended: exit codes by rank, -signal for a killed one, as in subprocess."""

    codes: list[int]
    _ranks: Ranks = dataclasses.field(repr=False)

    @functools.cached_property
    def outputs(self) -> list[str]:
        """All output by rank, read when it is first asked for; that must be before temporary files go with `Ranks`."""
        return [self._ranks.output(rank) for rank in range(len(self.codes))]

    @property
    def exit_code(self) -> int:
        """0 if every rank ended with 0; else the first bad rank's code, 128 + signal for a killed one (shell style)."""
        bad = next((code for code in self.codes if code), 0)
        return 128 - bad if bad < 0 else bad


def initialize(*, devices: int | None = None, **options: Any) -> bool:
    """Join the other processes of this launch; call it before anything that starts a JAX backend.

    devices: how many CPU devices this process should have if the launcher did not start it (its environment may say
        otherwise), so that one program runs both ways.
    options: passed on to `jax.distributed.initialize` (time-outs).
    Returns whether it joined. It does not in a process that the launcher did not start, nor in a launch of one process:
    `jax.distributed` would only put XLA's collectives between processes in place of its quicker ones inside a process.
    """
    import jax

    if RANK not in os.environ and devices is not None and _DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ.setdefault("PJRT_NPROC", _threads_for(devices))
        jax.config.update("jax_num_cpu_devices", devices)
    if int(os.environ.get(NPROCS, 1)) == 1:
        return False
    address = os.environ[COORDINATOR]
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=int(os.environ[NPROCS]),
        process_id=int(os.environ[RANK]),
        coordinator_bind_address=address,
        cluster_detection_method="deactivate",
        **options,
    )
    return True


def _threads_for(devices: int) -> str:
    # With fewer than two threads a device, many launches in flight hang XLA's own collectives on a small machine
    # (jax up to 0.11.1).
    return str(max(4, os.cpu_count() or 1, 2 * devices))


def device_env(devices: int, env: Mapping[str, str]) -> dict[str, str]:
    """`env` with what a process of `devices` CPU devices needs, keeping what is set already."""
    out = dict(env)
    out.setdefault("JAX_PLATFORMS", "cpu")
    out.setdefault("PJRT_NPROC", _threads_for(devices))
    others = [word for word in out.get("XLA_FLAGS", "").split() if not word.startswith(_DEVICES_FLAG)]
    out["XLA_FLAGS"] = " ".join([*others, f"{_DEVICES_FLAG}={devices}"])
    return out


def _reserve_port() -> socket.socket:
    """A bound loopback socket: while it stays open, nobody else is given its port; the coordinator, which binds with
    SO_REUSEPORT as well, can still listen on it."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """The exit code, None while it runs. It isn't reaped by this, so that its number stays its group's."""
    if process.returncode is not None:
        return process.returncode
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _signal_group(group: int, signum: int) -> bool:
    """Whether there was anybody in the process group to send the signal to (0: none is sent)."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _hung_up(pipe: _Pipe) -> bool:
    """Whether nobody holds the other end any more."""
    poller = select.poll()
    try:
        poller.register(pipe, 0)
    except ValueError:  # it is read to its end and closed
        return True
    return bool(poller.poll(0))


def _lines(pipe: _Pipe) -> Iterator[bytes]:
    """Lines as they come, no byte lost: a progress bar ends its own with a carriage return, and long ones are cut."""
    held = b""
    while data := os.read(pipe.fileno(), _LONGEST_LINE):
        lines = (held + data).splitlines(keepends=True)
        unfinished = not lines[-1].endswith(b"\n") and len(lines[-1]) < _LONGEST_LINE  # "\r" may yet become "\r\n"
        held = lines.pop() if unfinished else b""
        yield from lines
    if held:
        yield held


def _end_of(file: Path, most: int) -> bytes:
    """The last `most` bytes of a file, or all that there are."""
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - most))
        return opened.read()


class Ranks:
    """N running processes of one command; a context manager that leaves none behind, nor any of their children that
    have stayed in the rank's process group.

    command: the program and its arguments; the same for every rank.
    devices: CPU devices a process.
    env: variables to add to (or replace in) this process's environment.
    output: "prefix" copies every line to stdout as "[rank] line"; "first" gives rank 0 this process's stdout and
        stderr and keeps the others' output; "capture" keeps all of it. What is kept can be read with `output`.
    logs: the folder to keep `rank<i>.log` in; None: a temporary one, which goes with this object; "prefix" then keeps
        each rank's last 1000 lines, and no file.
    Start it from a thread that outlives the ranks: the kernel ties their lives to that thread.
    """

    _scratch: Path | None = None  # where a temporary folder goes; None: where the system has them

    def __init__(
        self,
        command: Sequence[str],
        nprocs: int,
        *,
        devices: int = 1,
        env: Mapping[str, str] | None = None,
        output: Output = "capture",
        logs: Path | None = None,
        cwd: Path | None = None,
    ):
        if nprocs < 1 or devices < 1:
            raise UsageError(f"A launch needs at least one process and one device each, not {nprocs} and {devices}.")
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            raise UsageError(
                "SIGCHLD is ignored, so exit codes would be lost; set it to signal.SIG_DFL before a launch."
            )
        self.nprocs = nprocs
        self._mode = output
        self._last: dict[int, collections.deque[bytes]] = {}
        if output == "prefix" and logs is None:
            self._last = {rank: collections.deque(maxlen=_KEPT_LINES) for rank in range(nprocs)}
        self._resources = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._groups: list[int] = []  # of the ranks, while their numbers can't be anybody else's
        self._pumps: list[tuple[threading.Thread, _Pipe]] = []
        try:
            if logs is None:
                kept = tempfile.TemporaryDirectory(prefix="jaxcoll-ranks-", dir=self._scratch)
                logs = Path(self._resources.enter_context(kept))
            logs.mkdir(parents=True, exist_ok=True)
            self._logs = logs
            port = self._resources.enter_context(_reserve_port()).getsockname()[1]
            shared = device_env(devices, {**os.environ, **(env or {})})
            shared |= {NPROCS: str(nprocs), COORDINATOR: f"127.0.0.1:{port}", "PYTHONUNBUFFERED": "1"}
            for rank in range(nprocs):
                self._start(rank, command, {**shared, RANK: str(rank)}, cwd)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, command: Sequence[str], env: dict[str, str], cwd: Path | None) -> None:
        inherit, piped = self._mode == "first" and rank == 0, self._mode == "prefix"
        with self._log(rank).open("wb") as log:
            process = subprocess.Popen(
                bound(command),
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=None if inherit else subprocess.PIPE if piped else log,
                stderr=None if inherit else subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)
        self._groups.append(process.pid)
        if piped:
            assert process.stdout is not None
            pump = threading.Thread(target=self._pump, args=(rank, process.stdout), daemon=True)
            pump.start()
            self._pumps.append((pump, process.stdout))

    def _pump(self, rank: int, pipe: _Pipe) -> None:
        shown = True
        with pipe, self._log(rank).open("ab") as log:
            for line in _lines(pipe):
                if self._last:
                    self._last[rank].append(line)
                else:
                    log.write(line)
                    log.flush()
                try:
                    if shown and line != b"\r":
                        sys.stdout.write(f"[{rank}] {line.decode(errors='replace').rstrip()}\n")
                        sys.stdout.flush()
                except (OSError, ValueError):  # nobody reads any more, such as `head`; the rank is to go on
                    shown = False

    def _log(self, rank: int) -> Path:
        return self._logs / f"rank{rank}.log"

    def pid(self, rank: int) -> int:
        """The process id of a rank."""
        return self._processes[rank].pid

    def output(self, rank: int) -> str:
        """What the rank has written so far (empty where it writes to this process's own stdout); see `logs`."""
        if self._last:
            return b"".join(self._last[rank]).decode(errors="replace")
        return self._log(rank).read_text(errors="replace")

    def poll(self) -> list[int | None]:
        """Exit codes by rank; None for a rank that still runs."""
        return [_code(process) for process in self._processes]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to one rank and its children; a rank that has ended is left alone."""
        if self.poll()[rank] is None:
            _signal_group(self._processes[rank].pid, signum)

    def wait(self, timeout: float | None = None, *, on_failure: Literal["kill", "wait"] = "kill", grace: float = 5.0):
        """Wait for the end of all ranks. Returns a `Result`. What they leave running is killed after a second.

        on_failure: "kill" ends the others `grace` seconds after the first rank that failed; "wait" lets them run.
        Raises `TimeoutError` after `timeout` seconds, with the last lines of every rank that still ran; all are killed.
        """
        start, failed_at = time.monotonic(), None
        while None in (codes := self.poll()):
            now = time.monotonic()
            if failed_at is None and any(codes):
                failed_at = now
            if on_failure == "kill" and failed_at is not None and now - failed_at > grace:
                self.kill_all()
            elif timeout is not None and now - start > timeout:
                late = [rank for rank, code in enumerate(codes) if code is None]
                report = "\n".join(self.tail(rank) for rank in late)
                self.kill_all()
                raise TimeoutError(f"After {timeout:g} s these ranks still ran: {late}. Their last output:\n{report}")
            time.sleep(_POLL)
        self._end_groups(_GRACE)
        return Result([code for code in codes if code is not None], self)

    def tail(self, rank: int) -> str:
        """The last lines of a rank's output, each with the rank in front."""
        end = b"".join(self._last[rank]) if self._last else _end_of(self._log(rank), _TAIL_BYTES)
        lines = end.decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join(f"[{rank}] {line}" for line in lines)

    def kill_all(self) -> None:
        """Kill every rank that still runs, and what any of them has started, and wait until the ranks are gone."""
        for group in self._groups:
            _signal_group(group, signal.SIGKILL)
        self._end_groups(0.0)

    def _end_groups(self, grace: float) -> None:
        # Reaps the ranks, all of which have ended or been killed. Their groups are looked at at once, so that no number
        # is another's by then; it can't be while a group has members.
        for process in self._processes:
            process.wait()
        deadline = time.monotonic() + grace
        while (left := [group for group in self._groups if _signal_group(group, 0)]) and time.monotonic() < deadline:
            self._groups = left
            time.sleep(_POLL)
        for group in left:
            _signal_group(group, signal.SIGKILL)
        self._groups = []
        deadline = time.monotonic() + _GRACE
        for pump, pipe in self._pumps:
            pump.join(max(0.0, deadline - time.monotonic()))
            if _hung_up(pipe):  # else a process of another group keeps it open, and isn't waited for
                pump.join()

    def close(self) -> None:
        """Kill what still runs and remove the temporary files."""
        self.kill_all()
        self._resources.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run(command: Sequence[str], nprocs: int, *, timeout: float | None = None, **options: Any) -> Result:
    """`Ranks(...)`, `wait`, and its `Result`; options as for `Ranks`."""
    with Ranks(command, nprocs, **options) as ranks:
        result = ranks.wait(timeout)
        _ = result.outputs  # while the files are there
        return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxcoll launch",
        description="Run a Python program as N processes on this machine, joined by jax.distributed over loopback.",
        epilog="The program calls jaxcoll.launch.initialize() in place of jax.distributed.initialize().",
    )
    parser.add_argument("-n", "--nprocs", type=int, default=2, help="number of processes (2)")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices a process (1)")
    parser.add_argument("--timeout", type=float, help="kill all ranks and fail after this many seconds")
    parser.add_argument("--logs", type=Path, help="keep every rank's output in this folder, as rank<i>.log")
    parser.add_argument(
        "--output", choices=("prefix", "first"), default="prefix", help="show all ranks, or rank 0 alone"
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module's name")
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command `jaxcoll launch`. Returns the exit status."""
    args = _parser().parse_args(argv)
    command = [sys.executable, *(["-m"] if args.module else []), args.program, *args.arguments]
    try:
        with Ranks(command, args.nprocs, devices=args.devices, output=args.output, logs=args.logs) as ranks:
            result = ranks.wait(args.timeout)
            if result.exit_code and args.output == "first":
                bad = [rank for rank in range(1, args.nprocs) if result.codes[rank]]
                print("\n".join(ranks.tail(rank) for rank in bad), file=sys.stderr)
    except (TimeoutError, UsageError) as error:
        print(f"jaxcoll launch: {error}", file=sys.stderr)
        return 124 if isinstance(error, TimeoutError) else 2
    if result.exit_code:
        print(f"jaxcoll launch: exit codes by rank: {result.codes}", file=sys.stderr)
    return result.exit_code


if __name__ == "__main__":
    sys.exit(main())
