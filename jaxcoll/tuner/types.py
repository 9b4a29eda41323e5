"""What goes into the tuner and what comes out: plain data."""

from __future__ import annotations

import base64
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxcoll.errors import MALFORMED, UsageError
from jaxcoll.schedule import Schedule, Table


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A schedule of the set, by the number under which the executor knows it; `label` names it in messages."""

    id: int
    schedule: Schedule
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the schedule's own name."""
        return self.label or self.schedule.name

    @functools.cached_property
    def identity(self) -> Table:
        """Rank r at position r."""
        return Table.identity(self.schedule)


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduleSet:
    """The programs that may run one collective of one size class on one communicator, and which one it starts on.

    Args:
        key: names the set, e.g. "comm 0 all_reduce 4M": communicator, collective, size class.
        nbytes: bytes of a block, typical of the size class.
        hosts: host of each rank; empty: each rank is a host of its own.
    """

    key: str
    programs: tuple[Program, ...]
    nbytes: int
    start: int
    start_table: Table | None = None
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ids = [program.id for program in self.programs]
        if len(set(ids)) != len(ids) or self.start not in ids:
            raise UsageError(f"set {self.key!r}: programs {ids} must be distinct and hold the start, {self.start}")
        collectives = {program.schedule.collective for program in self.programs}
        if len(collectives) != 1:
            raise UsageError(f"set {self.key!r}: all programs must compute the same collective, not {collectives}")
        if self.nbytes < 1:
            raise UsageError(f"set {self.key!r}: nbytes is {self.nbytes}; give the size of a block in bytes")
        if self.hosts and len(self.hosts) != self.nranks:
            raise UsageError(f"set {self.key!r}: {len(self.hosts)} hosts named for {self.nranks} ranks")

    @property
    def nranks(self) -> int:
        """Ranks of the communicator."""
        return self.programs[0].schedule.nranks

    @property
    def host_of(self) -> tuple[int, ...]:
        """Host of each rank."""
        return self.hosts or tuple(range(self.nranks))

    @functools.cached_property
    def by_id(self) -> Mapping[int, Program]:
        """Programs by number."""
        return {program.id: program for program in self.programs}

    @property
    def home(self) -> Config:
        """What the set starts on."""
        table = self.start_table or self.by_id[self.start].identity
        return Config(self.start, table)


@dataclasses.dataclass(frozen=True)
class Config:
    """A program and a table: what is in force, or could be."""

    program: int
    table: Table

    @functools.cached_property
    def key(self) -> tuple[int, bytes, bytes]:
        """Equal for what runs alike, whatever the version."""
        return self.program, bytes(str(self.table.home), "ascii"), self.table.vertex.tobytes()


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the move to the table of `version` has come to: its time over the one before, and whether it was kept."""

    version: int
    ratio: float
    kept: bool

    def text(self) -> str:
        """For people."""
        return f"measured {self.ratio:.2f}x, {'kept' if self.kept else 'no gain'}"


@dataclasses.dataclass(frozen=True)
class Decision:
    """Stage and commit `program` under `table` (its version is new) for the set `key`.

    `action` is "swap", "program" (another schedule), "revert", "recover" (back to the start) or "probe" (a look whether
    the start is good again). `expected` is the time expected of it over the present one; `reason` says why, in words.
    """

    key: str
    action: str
    program: int
    table: Table
    reason: str
    expected: float

    @property
    def version(self) -> int:
        """The table's version."""
        return self.table.version

    def to_json(self) -> dict[str, Any]:
        """Plain data, the table in its binary form as base64."""
        return {
            "key": self.key,
            "action": self.action,
            "program": self.program,
            "version": self.version,
            "table": base64.b64encode(self.table.to_bytes()).decode("ascii"),
            "expected": self.expected,
            "reason": self.reason,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Decision:
        """The decision that `to_json` wrote."""
        try:
            table = Table.from_bytes(base64.b64decode(data["table"]))
            return Decision(
                data["key"], data["action"], int(data["program"]), table, data["reason"], float(data["expected"])
            )
        except KeyError as error:
            raise UsageError(f"this is no decision: {error} is missing") from None
        except MALFORMED as error:
            raise UsageError(f"this is no decision: {error}") from error
