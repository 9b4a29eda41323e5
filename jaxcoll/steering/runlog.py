"""The run log: JSON lines with the sets, epochs and decisions of a run, in the order in which the tuner took them."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from jaxcoll.errors import MALFORMED, UsageError
from jaxcoll.telemetry import Epoch, as_records, empty_records
from jaxcoll.version import __version__

log = logging.getLogger("jaxcoll")

FORMAT = 1
T = TypeVar("T")


def check(path: str) -> None:
    """UsageError unless a run log can be begun at `path` ("" is none). What is there stays as it is."""
    if not path:
        return
    try:
        Path(path).open("a", encoding="utf-8").close()
    except OSError as error:
        raise UsageError(f"the run log {path} can't be written: {error.strerror}") from error
    earlier = _earlier(path)
    if earlier is not None and not os.access(earlier.parent, os.W_OK | os.X_OK):
        raise UsageError(f"the run log {path} is that of an earlier run, and its folder lets it not be renamed: "
                         "move it away, or set JAXCOLL_RUN_LOG to another file")  # fmt: skip


def _earlier(path: str) -> Path | None:
    """The file that would be lost if another one were begun there."""
    file = Path(path).resolve()
    return file if file.is_file() and file.stat().st_size else None


def _claimed(file: Path) -> Path:
    """An empty file beside `file`, with .1 or the first number that is free at its end."""
    number = 1
    while True:
        try:
            free = file.with_name(f"{file.name}.{number}")
            free.open("x").close()
            return free
        except FileExistsError:
            number += 1


def _keep_earlier(path: str) -> None:
    """Renames what an earlier run has left at `path`."""
    earlier = _earlier(path)
    if earlier is None:
        return
    kept = _claimed(earlier)
    try:
        earlier.replace(kept)
    except OSError:
        kept.unlink(missing_ok=True)
        raise
    log.info("the run log %s was that of an earlier run, which is %s now", path, kept)


class RunLog:
    """Writes a run; without a path it writes nothing. An earlier run's log is kept, renamed."""

    def __init__(self, path: str = ""):
        self._lock = threading.Lock()
        self._out: TextIO | None = None
        if path:
            try:
                _keep_earlier(path)
                self._out = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (lives as long as the run; see close)
            except OSError as error:
                raise UsageError(f"the run log {path} can't be written: {error.strerror}") from error
            self.write("run", {"format": FORMAT, "jaxcoll": __version__, "time": time.time()})

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        """One line."""
        with self._lock:
            if self._out is None:
                return
            try:
                self._out.write(json.dumps({"type": kind, **fields}, separators=(",", ":")) + "\n")
                self._out.flush()
            except OSError as error:  # a full disk costs the rest of the log, not the tuning
                log.warning("the run log %s ends here: %s", self._out.name, error.strerror)
                out, self._out = self._out, None
                with contextlib.suppress(OSError):
                    out.close()

    def write_set(self, fields: Mapping[str, Any]) -> None:
        """A set, before its first epoch."""
        self.write("set", fields)

    def write_epoch(self, key: str, epoch: Epoch, seconds: float) -> None:
        """An epoch of set `key`; its records packed, since a run has many."""
        if self._out is None:
            return
        comm, site, launch, index = epoch.id
        packed = base64.b64encode(zlib.compress(epoch.records.tobytes(), 1)).decode("ascii")
        fields = {"key": key, "id": [comm, site, launch, index], "program": epoch.program, "version": epoch.version}
        self.write("epoch", {**fields, "start_ns": epoch.start_ns, "seconds": seconds, "records": packed})

    def close(self) -> None:
        """Ends the file."""
        with self._lock:
            if self._out is not None:
                self._out.close()
                self._out = None


def about(sets: Mapping[str, T], line: Mapping[str, Any]) -> T:
    """That of `sets` which a line is about. UsageError if it isn't there."""
    key = str(line.get("key"))
    if key not in sets:
        raise UsageError(f'it is about the set {key!r}, of which no "set" line came before')
    return sets[key]


def epoch_of(line: Mapping[str, Any]) -> Epoch:
    """The epoch of an "epoch" line. UsageError if it is none."""
    try:
        data = zlib.decompress(base64.b64decode(line["records"]))
        comm, site, launch, index = (int(v) for v in line["id"])
        records = as_records(data) if data else empty_records()
        return Epoch((comm, site, launch, index), int(line["program"]), int(line["version"]), records)
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise UsageError(f"an epoch line of the run log is damaged: {error}") from None


@contextlib.contextmanager
def reading(path: str | Path, number: int) -> Generator[None, None, None]:
    """Around what makes sense of a line: UsageError names the line that there is none of."""
    try:
        yield
    except MALFORMED as error:
        what = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"{path}, line {number} is damaged: {what}") from error


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """All lines of a run log. UsageError says which line is wrong; a last line that a kill has cut is left out."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UsageError(f"the run log {path} can't be read: {error.strerror}") from error
    if not lines:
        raise UsageError(f"{path} is empty (JAXCOLL_RUN_LOG writes a run log)")
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError as error:
            if number == len(lines) > 1:
                return
            raise UsageError(f"{path}, line {number} is no JSON: {error}") from None
        if not isinstance(entry, dict) or "type" not in entry:
            raise UsageError(f"{path}, line {number} is no line of a run log")
        if number == 1 and (entry["type"] != "run" or entry.get("format") != FORMAT):
            raise UsageError(f"{path} is no run log of this version (JAXCOLL_RUN_LOG writes one)")
        yield entry
