"""Schedule sets: made when a collective is lowered, one per (communicator, collective, size class, override)."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

from jaxcoll import config
from jaxcoll.errors import ScheduleError, UsageError
from jaxcoll.runtime import choice, gpu, probe
from jaxcoll.runtime.native import NativeError
from jaxcoll.runtime.world import World
from jaxcoll.schedule import Kind, Schedule, bit_equal, builders, load_file

Groups = tuple[tuple[int, ...], ...]
Perm = choice.Perm


@dataclasses.dataclass(frozen=True)
class Want:
    """What a call asks for: everything that distinguishes its schedule set but the communicator."""

    kind: Kind
    size_class: int
    reduce: str
    root: int | None
    perm: Perm | None
    schedule: str | None  # override by name or file
    deterministic: bool

    def key(self) -> int:
        """The `set_key` attribute: the same in every process, never negative (negative keys are the library's own)."""
        digest = hashlib.blake2b(repr(dataclasses.astuple(self)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


@dataclasses.dataclass
class SetInfo:
    """A set of one communicator as Python knows it: what the tuner and `explain` read."""

    want: Want
    key: int
    devices: tuple[int, ...]
    schedules: list[Schedule]
    programs: list[int]
    chosen: int
    estimates: list[choice.Estimate]


class Sets:
    """All sets of this process."""

    def __init__(self, world: World):
        self.world = world
        self._making = threading.Lock()  # held while a set is made, which may wait for other processes
        self._lock = threading.Lock()
        self._known: dict[tuple[tuple[int, ...], int], SetInfo] = {}

    def all(self) -> list[SetInfo]:
        """The sets made so far."""
        with self._lock:
            return list(self._known.values())

    def prepare(self, want: Want, groups: Groups) -> int:
        """Makes the set known for every group that has a device of this process. Returns its key."""
        mine = set(self.world.job.devices[self.world.job.me])
        key = want.key()
        with self._making:
            for group in groups:
                if mine.isdisjoint(group) or (group, key) in self._known or len(group) < 2:
                    continue
                with naming_the_setting(want):
                    made = self._make(want, key, group)
                with self._lock:
                    self._known[group, key] = made
        return key

    def _make(self, want: Want, key: int, group: tuple[int, ...]) -> SetInfo:
        nbytes = choice.class_bytes(want.size_class)
        rows: list[choice.Estimate] = []
        hosts = self.world.hosts_of(group)
        if want.schedule is not None:
            schedules, chosen = [override(want, len(group), hosts)], 0
        else:
            speed = probe.nominal(self.world.speed) if want.deterministic else self.world.speed
            rows = choice.estimates(want.kind, len(group), nbytes, speed, want.root, want.perm, hosts)
            usable = [r for r in rows if r.seconds is not None]
            schedules = [
                choice.make(r.name, want.kind, len(group), want.root, want.perm, choice.is_large(nbytes), hosts)
                for r in usable
            ]
            chosen = usable.index(choice.best(rows))
            if want.deterministic:
                schedules, chosen = [schedules[chosen]], 0
        try:
            programs = [self.world.load_program(s) for s in schedules]
            self.world.define_set(key, group, programs, chosen)
            if gpu.present():
                gpu.connect(self.world, group, key)
        except NativeError as error:
            raise ScheduleError(str(error)) from error
        return SetInfo(want, key, group, schedules, programs, chosen, rows)


def forced(kind: Kind) -> str | None:
    """What JAXCOLL_SCHEDULE asks for a collective of this kind: the name of a builder, or a file; None for nothing.

    A builder that is named for every kind counts where it can. Raises UsageError where one is named for this kind that
    can't do it.
    """
    setting = config.current().schedule
    name = setting.get(kind.label) or setting.get(config.EVERY_KIND)
    if name is None or name not in builders() or name in builders(kind):
        return name
    if kind.label in setting:
        known = ", ".join(sorted(builders(kind)))
        raise UsageError(f"JAXCOLL_SCHEDULE: {name} can't do {kind.label}; for it there are {known}")
    return None


@contextlib.contextmanager
def naming_the_setting(want: Want) -> Generator[None, None, None]:
    """Errors say so where JAXCOLL_SCHEDULE has named the schedule: the call that fails doesn't show it."""
    try:
        yield
    except ScheduleError as error:
        setting = config.current().schedule
        if want.schedule is not None and want.schedule == setting.get(want.kind.label, setting.get(config.EVERY_KIND)):
            error.args = (f"{error} (JAXCOLL_SCHEDULE asks for it)", *error.args[1:])
        raise


def _only_here(want: Want) -> str:
    # The cure, where a file was named for every kind.
    setting = config.current().schedule
    if setting.get(config.EVERY_KIND) != want.schedule or want.kind.label in setting:
        return ""
    return "; to use it for its own kind alone, write JAXCOLL_SCHEDULE=kind=file"


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".json", ".jxc", ".xml")


def root_in(name: str) -> int | None:
    """The root that a schedule file is for; None where it has none, or a builder is named."""
    return load_file(name).collective.root if _is_file(name) else None


def override(want: Want, nranks: int, hosts: tuple[int, ...] = ()) -> Schedule:
    """The schedule that `schedule=` or JAXCOLL_SCHEDULE names: a builder, or a file (.json, .jxc, .xml)."""
    assert want.schedule is not None
    name = want.schedule
    if name in builders():
        large = choice.is_large(choice.class_bytes(want.size_class))
        return choice.make(name, want.kind, nranks, want.root, want.perm, large, hosts)
    if _is_file(name):
        schedule = load_file(name)
        if schedule.kind is not want.kind or schedule.nranks != nranks:
            raise ScheduleError(
                f"{name} holds a schedule for {schedule.kind.label} over {schedule.nranks} ranks; this call is "
                f"{want.kind.label} over {nranks}{_only_here(want)}"
            )
        if schedule.collective.root != want.root:
            raise ScheduleError(
                f"{name} holds a schedule with root {schedule.collective.root}; this call's is {want.root}. A schedule "
                f"file is for one root: make it with root={want.root}"
            )
        if not bit_equal(schedule):
            ordered = bit_equal(dataclasses.replace(schedule, canonical=True))
            cure = 'write "canonical": true into it' if ordered else "give each chunk's sum to one rank, and copy it"
            raise ScheduleError(
                f"{name} lets ranks add in different orders, so that their results differ in the last bits: {cure}"
            )
        if want.perm is not None and (moves := {(c.src, c.dst) for c in schedule.chunks}) != set(want.perm):
            held = sorted(moves, key=str)
            raise ScheduleError(f"{name} holds a schedule for the pairs {held}; this call's are {sorted(want.perm)}")
        return schedule
    known = ", ".join(sorted(builders(want.kind)))
    raise ScheduleError(
        f"unknown schedule {name!r}: for {want.kind.label} there are {known}; or name a .json, .jxc or .xml file"
    )


def wanted(kind: Kind, nbytes: int, reduce: str, root: int | None, perm: Sequence[tuple[int, int]] | None,
           schedule: str | None, deterministic: bool) -> Want:  # fmt: skip
    """Combines a call with the settings."""
    if schedule is not None and not isinstance(schedule, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"schedule= takes a schedule's name or the path of a file, not {schedule!r}")
    pairs = tuple(perm) if perm is not None else None
    return Want(kind, choice.size_class(nbytes), reduce, root, pairs, schedule or forced(kind), deterministic)
