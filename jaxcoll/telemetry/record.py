"""The telemetry record: one per edge, execution and end, written by the native library and by the simulator alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import UsageError

RECEIVER = 0
SENDER = 1
UNSPLIT = 2
"""Bit of `side`: the record is raw, its `transfer_ns` holds the wait for the other end too (see `split_waits`)."""
TOGETHER = 4
"""Bit of `side`, beside UNSPLIT: the edge ran with others of its step in one call; the span is that of the call."""

_FIELDS: tuple[tuple[str, str], ...] = (
    ("comm", "<u8"),
    ("launch", "<i8"),
    ("site", "<u8"),
    ("start_ns", "<u8"),
    ("transfer_ns", "<u8"),
    ("wait_ns", "<u8"),
    ("bytes", "<u8"),
    ("index", "<u4"),
    ("version", "<u4"),
    ("program", "<u4"),
    ("graph", "<u2"),
    ("step", "<u2"),
    ("src", "<u2"),
    ("dst", "<u2"),
    ("side", "u1"),
)

RECORD_SIZE = 80

FIELD_NAMES: tuple[str, ...] = tuple(name for name, _ in _FIELDS)


def _offsets() -> list[int]:
    sizes = [np.dtype(form).itemsize for _, form in _FIELDS]
    return [sum(sizes[:i]) for i in range(len(sizes))]


RECORD_DTYPE: np.dtype[np.void] = np.dtype(
    {
        "names": list(FIELD_NAMES),
        "formats": [form for _, form in _FIELDS],
        "offsets": _offsets(),
        "itemsize": RECORD_SIZE,
    }
)
"""Little-endian layout of one record, 80 bytes; field names as in `Record`."""

Records = npt.NDArray[np.void]
"""A 1-D array of `RECORD_DTYPE`."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One end's account of one edge in one execution of a collective.

    `start_ns` is this end's wall clock when it was ready for the edge. `wait_ns` is how long it then waited for the
    other end (or for the other end's data), `transfer_ns` the edge's own time in seconds x 1e9 with that waiting taken
    out; 0 where nobody can tell (what comes in one piece over TCP). At the receiver `start_ns + wait_ns + transfer_ns`
    is when the last byte was there. `src` and `dst` are ranks,
    `bytes` what the edge carried, `(launch, index)` which execution of call site `site` this was. `side` is RECEIVER or
    SENDER; with UNSPLIT, and TOGETHER, as long as the two times are not told apart.
    """

    comm: int
    launch: int
    site: int
    start_ns: int
    transfer_ns: int
    wait_ns: int
    bytes: int
    index: int
    version: int
    program: int
    graph: int
    step: int
    src: int
    dst: int
    side: int

    @property
    def throughput(self) -> float:
        """Bytes per second of the transfer itself; NaN where it wasn't timed."""
        return self.bytes / self.transfer_ns * 1e9 if self.transfer_ns else float("nan")


def empty_records(count: int = 0) -> Records:
    """`count` records, all fields zero."""
    return np.zeros(count, RECORD_DTYPE)


def concatenate(parts: Iterable[Records]) -> Records:
    """The records of all parts, in order, as one array of `RECORD_DTYPE`; none for no parts.

    numpy's own `concatenate` drops the padding at the end of a record: its result has 77 bytes a record, not 80.
    """
    arrays = list(parts)
    out = empty_records(sum(len(part) for part in arrays))
    at = 0
    for part in arrays:
        out[at : at + len(part)] = part
        at += len(part)
    return out


def as_records(data: bytes | bytearray | memoryview | Records) -> Records:
    """A record array over `data` (no copy); UsageError where the length or the dtype is not that of records."""
    if isinstance(data, np.ndarray):
        if data.dtype != RECORD_DTYPE:
            raise UsageError(f"an array of {data.dtype} is no record array; make it with telemetry.empty_records()")
        return data
    if len(data) % RECORD_SIZE:
        raise UsageError(
            f"{len(data)} bytes are no whole number of {RECORD_SIZE}-byte records; was the native library built from "
            "another version of jaxcoll? Rebuild it with `pip install .`"
        )
    return np.frombuffer(data, RECORD_DTYPE)


def to_record(row: Any) -> Record:
    """The dataclass form of one element of a record array."""
    return Record(**{name: int(row[name]) for name in FIELD_NAMES})


def from_records(records: list[Record] | tuple[Record, ...]) -> Records:
    """A record array with the fields of `records`, in their order."""
    out = empty_records(len(records))
    for name in FIELD_NAMES:
        out[name] = [getattr(record, name) for record in records]
    return out
