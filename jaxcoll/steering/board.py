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


def folder() -> Path:
    """The folder; it may not exist yet."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "jaxcoll" if runtime else Path(tempfile.gettempdir()) / f"jaxcoll-{os.getuid()}"


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


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # one that is dead may wait for its parent to look


def running() -> dict[int, Path]:
    """The status files of living processes, newest first; those that a kill has left behind are removed."""
    found: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        if not _own(folder()):
            return {}
        for path in sorted(folder().glob("*.json"), key=lambda p: -p.stat().st_mtime):
            with contextlib.suppress(ValueError):
                pid = int(path.stem)
                if _lives(pid):
                    found[pid] = path
                else:
                    path.unlink(missing_ok=True)
    return found


def read(path: Path) -> dict[str, Any] | None:
    """A status; None if it has gone, or if its process has, and a kill has left the file behind."""
    try:
        if not _lives(int(path.stem)):
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
