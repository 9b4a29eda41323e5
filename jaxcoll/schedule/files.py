"""Schedules in files, the form chosen by suffix: .json (text), .jxc (binary), .xml (MSCCL)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.codec import decode, encode
from jaxcoll.schedule.ir import Schedule
from jaxcoll.schedule.msccl_export import to_msccl
from jaxcoll.schedule.msccl_import import from_msccl
from jaxcoll.schedule.text import dumps, loads


def _decode_text(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ScheduleError(f"{source}, line {line}: not UTF-8 text") from None


def _load_binary(data: bytes, source: str) -> Schedule:
    try:
        return decode(data)
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None


_LOAD: dict[str, Callable[[bytes, str], Schedule]] = {
    ".json": lambda data, source: loads(_decode_text(data, source), source),
    ".jxc": _load_binary,
    ".xml": lambda data, source: from_msccl(_decode_text(data, source), source),
}
_SAVE: dict[str, Callable[[Schedule], bytes]] = {
    ".json": lambda schedule: dumps(schedule).encode(),
    ".jxc": encode,
    ".xml": lambda schedule: to_msccl(schedule).encode(),
}


def _suffix(path: Path) -> str:
    if path.suffix.lower() not in _LOAD:
        raise ScheduleError(f"{path}: unknown suffix; known are .json (text), .jxc (binary), .xml (MSCCL)")
    return path.suffix.lower()


def load_file(path: str | os.PathLike[str]) -> Schedule:
    """Reads a schedule; `ScheduleError` names the file and the line or element that is wrong. It is not verified."""
    path = Path(path)
    load = _LOAD[_suffix(path)]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ScheduleError(f"{path}: can't be read: {error.strerror or error}") from None
    return load(data, str(path))


def save_file(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes a schedule in the form that the suffix names; `ScheduleError` where it can't be written."""
    path = Path(path)
    data = _SAVE[_suffix(path)](schedule)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ScheduleError(f"{path}: can't be written: {error.strerror or error}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises `ScheduleError` now where `save_file` would later: before a long solve, say. Writes nothing."""
    path = Path(path)
    _suffix(path)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ScheduleError(f"{path}: can't be written; give a file in a folder that exists and may be written to")
