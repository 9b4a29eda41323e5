"""Where a running leader pins its status for `jaxcoll top`: one small file a process, in a folder of the user's own."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_RUNTIMES = Path("/run/user")  # a user's runtime folder, where a login makes one, is there under the user's number


def folder() -> Path:
    """The folder to pin in; it may not exist yet."""
    return _folders()[0]


def _folders() -> list[Path]:
    """Where jobs may have pinned, this process's own folder first: a job that cron or ssh starts knows no runtime
    folder, a login's shell has one."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    own = [Path(runtime) / "jaxcoll"] if runtime else []
    shared = Path(tempfile.gettempdir()) / f"jaxcoll-{os.getuid()}"
    return list(dict.fromkeys([*own, shared, _RUNTIMES / str(os.getuid()) / "jaxcoll"]))


def _own(path: Path) -> bool:
    """Whether the folder is ours alone: in /tmp somebody else may have made one of that name."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


class Board:
    """The file of one process. Without a folder of our own to write in, it does nothing."""

    def __init__(self, pid: int | None = None):
        self.path: Path | None = folder() / f"{pid or os.getpid()}.json"
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            if not _own(self.path.parent):
                self.path = None
        except OSError:
            self.path = None

    def pin(self, status: Mapping[str, Any]) -> None:
        """Replaces the status. A full disk costs `top`, nothing else."""
        if self.path is None:
            return
        fresh = self.path.with_suffix(".new")
        with contextlib.suppress(OSError):
            fresh.write_text(json.dumps(status), encoding="utf-8")
            fresh.replace(self.path)

    def remove(self) -> None:
        """Takes the status down."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def _started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot; None if it doesn't live."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])  # one that is dead may wait for its parent to look


def _pinned(place: Path) -> list[Path]:
    """The status files in a folder; none where it isn't ours alone."""
    try:
        return list(place.glob("*.json")) if _own(place) else []
    except OSError:
        return []


def running() -> dict[int, Path]:
    """The status files of living processes, that of the one started last first.

    Those that a kill has left behind are removed.
    """
    found: dict[int, tuple[int, Path]] = {}
    for path in (path for place in _folders() for path in _pinned(place)):
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.stem)
            started = _started(pid)
            if started is None:
                path.unlink(missing_ok=True)
            else:
                found.setdefault(pid, (started, path))
    return {pid: path for pid, (_, path) in sorted(found.items(), key=lambda item: -item[1][0])}


def read(path: Path) -> dict[str, Any] | None:
    """A status; None if it has gone, or if its process has, and a kill has left the file behind."""
    try:
        if _started(int(path.stem)) is None:
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
