"""What a testbed leaves behind if it is killed, and how that is found and removed.

A testbed that is made directly (as root) has a file here, locked for as long as its process lives: the kernel lets the
lock go however the process ends. A file that can be locked belongs to the dead; its namespaces and its folder of logs
are removed. In a user namespace none of this would be needed, since the kernel removes it with its last process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from jaxcoll.errors import UsageError
from jaxcoll.testbed import iproute

FOLDER = Path("/run/jaxcoll-testbed")
PREFIX = "jxc-"
_RUN = re.compile(r"[a-z0-9]{1,16}")


def namespace(run: str, node: str) -> str:
    """The namespace of a node: `jxc-<run>-<node>`."""
    return f"{PREFIX}{run}-{node}"


@contextlib.contextmanager
def _exclusive() -> Generator[None, None, None]:
    # Without it a clean-up could take a file for a dead one's between its creation and its locking, or find one gone
    # that it has just seen.
    FOLDER.mkdir(mode=0o755, parents=True, exist_ok=True)
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Claim:
    """A run id that is ours until `release`, or the end of this process; `folder`: for what its programs write."""

    def __init__(self, run: str, nodes: Sequence[str]):
        if not _RUN.fullmatch(run):
            raise UsageError(f"{run!r} can't be a testbed's name: write 1 to 16 small letters and digits.")
        self.run = run
        self._path = FOLDER / f"{run}.json"
        self.folder = _scratch(self._path)
        with _exclusive():
            _clean()
            try:
                fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                owner, _ = _read(self._path)
                raise UsageError(
                    f"A testbed {run!r} is running already (process {owner}): end it, or use another name."
                ) from None
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._file = os.fdopen(fd, "w")
            json.dump({"pid": os.getpid(), "namespaces": [namespace(run, node) for node in nodes]}, self._file)
            self._file.flush()
            self.folder.mkdir(mode=0o700, exist_ok=True)

    def release(self) -> None:
        """Give the run id back; its namespaces must be gone."""
        with _exclusive():
            _forget(self._path)
        self._file.close()


def _scratch(path: Path) -> Path:
    # The folder that belongs to a claim's file.
    return path.with_suffix(".logs")


def _forget(path: Path) -> None:
    # The file goes last: as long as it is there, somebody will remove the folder.
    shutil.rmtree(_scratch(path), ignore_errors=True)
    path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[int, list[str]]:
    # The owner's process id and its namespaces. An empty file is that of a process killed before it made anything.
    text = path.read_text()
    record: dict[str, Any] = json.loads(text) if text else {"pid": 0, "namespaces": []}
    return int(record["pid"]), list(record["namespaces"])


def clean(kill: Sequence[str] = ()) -> list[str]:
    """Remove what dead testbeds have left: namespaces, links and the processes inside. Returns the namespaces removed.

    kill: names of testbeds to remove also if their process still lives; it is killed. UsageError for one that isn't
        there, before anything is removed.
    """
    with _exclusive():
        known = sorted(path.stem for path in FOLDER.glob("*.json"))
        if unknown := sorted(set(kill) - set(known)):
            there = f"there are: {', '.join(known)}" if known else "there is none"
            raise UsageError(f"No testbed {', '.join(map(repr, unknown))} is there to be ended; {there}.")
        return _clean(kill)


def _clean(kill: Sequence[str] = ()) -> list[str]:
    removed: list[str] = []
    living: list[str] = []
    for path in sorted(FOLDER.glob("*.json")):
        pid, names = _read(path)
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if path.stem not in kill:
                    living.append(path.stem)
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                fcntl.flock(file, fcntl.LOCK_EX)
            removed += remove(names)
            _forget(path)
    # Named like ours, with nothing to tell whose they are: somebody has removed the file.
    mine = tuple(f"{PREFIX}{run}-" for run in living)
    removed += remove(
        [name for name in iproute.namespaces() if name.startswith(PREFIX) and not (mine and name.startswith(mine))]
    )
    return removed


def remove(names: Sequence[str]) -> list[str]:
    """Kill what runs in these namespaces and delete those that exist. Returns their names."""
    there = set(iproute.namespaces())
    names = [name for name in names if name in there]
    if not names:
        return []
    _kill_inside(names)
    iproute.run("ip", lines=[f"netns del {name}" for name in names], force=True)
    return names


def _kill_inside(names: Sequence[str]) -> None:
    deadline = time.monotonic() + 5.0
    while True:
        found = processes_in(names)
        if not found or time.monotonic() > deadline:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_in(names: Sequence[str]) -> list[int]:
    """The processes whose network namespace is one of these."""
    inodes: set[tuple[int, int]] = set()
    for name in names:
        with contextlib.suppress(OSError):
            status = (iproute.NETNS / name).stat()
            inodes.add((status.st_dev, status.st_ino))
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                status = os.stat(f"/proc/{entry}/ns/net")
                if (status.st_dev, status.st_ino) in inodes:
                    found.append(int(entry))
    return found
