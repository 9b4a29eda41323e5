"""A swap as one process sees it: stage, promise, obey the verdict.

The leader stages a table everywhere, asks which execution of each call site every process has begun, and proposes a
point behind all of them. A process that promises begins nothing at or past the point until the verdict is known. The
verdict is one key of the job's store that can be written once ("commit" or "cancel"), and it is written before anybody
acts on it. So the ranks agree whatever happens to the leader: a process that has waited too long writes "cancel"
itself, and obeys what stands there, be it that or the leader's word.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
import zlib
from collections.abc import Sequence

from jaxcoll.runtime.job import Store
from jaxcoll.runtime.native import NativeError
from jaxcoll.runtime.sets import SetInfo, Sets
from jaxcoll.runtime.world import World
from jaxcoll.schedule import Schedule, decode, encode
from jaxcoll.steering.tuned import SetId
from jaxcoll.telemetry import near

log = logging.getLogger("jaxcoll")

Place = tuple[int, int, int]
"""(call site, launch, index): an execution."""

COMMIT, CANCEL = "commit", "cancel"
WAIT_S = 1.0  # an execution that waits so long for a verdict makes its process ask for one
LEFT_S = 5.0  # a proposal that nobody waits for is cleared up after this
_MAX_SITES = 4096


def program_id(schedule: Schedule) -> int:
    """The number under which records name a program: the same in every process."""
    return zlib.crc32(encode(schedule))


def verdict_key(attempt: str) -> str:
    """Where in the store the verdict on an attempt stands."""
    return f"loop/verdict/{attempt}"


@dataclasses.dataclass
class Promise:
    """A proposal that this process has agreed to and that isn't decided yet."""

    set_id: SetId
    version: int
    since: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a promise ended here.

    `held_s`: seconds in the lock that a beginning execution takes, the longest that one can have been held up.
    `waiting`: executions that waited for the verdict, up to `waited_s` seconds.
    """

    committed: bool
    held_s: float
    waiting: int
    waited_s: float

    @property
    def stall_s(self) -> float:
        """An upper bound on what this swap cost on the collective's path of this process, seconds."""
        return self.waited_s if self.waiting else self.held_s


class LocalSwaps:
    """Staged tables and promises of this process. One thread at a time commands it."""

    def __init__(self, world: World, sets: Sets, store: Store):
        self._world, self._sets, self._store = world, sets, store
        self._handles: dict[int, int] = {}
        self._promises: dict[str, Promise] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._asked: set[str] = set()  # attempts whose verdict the store couldn't tell yet
        self._lock = threading.RLock()
        self.commits = self.cancels = 0

    def group_id(self, devices: Sequence[int]) -> int:
        """The id of the communicator over `devices`, as records have it."""
        native = self._world.native
        return int(native.lib.jc_group_id(native.int64s(devices), len(devices)))

    def known(self) -> dict[SetId, SetInfo]:
        """All sets made so far in this process."""
        return {(self.group_id(info.devices), info.key): info for info in self._sets.all()}

    def load(self, blob: bytes) -> int:
        """Makes a program known, once. Returns the library's handle; NativeError if the program is bad."""
        number = zlib.crc32(blob)
        if number not in self._handles:
            self._handles[number] = self._world.load_program(decode(blob))
        return self._handles[number]

    def has(self, program: int) -> bool:
        """Whether the program is known here."""
        if program not in self._handles:
            for info in self._sets.all():
                for schedule, handle in zip(info.schedules, info.programs):
                    self._handles.setdefault(program_id(schedule), handle)
        return program in self._handles

    def started(self, set_id: SetId) -> list[Place]:
        """The last execution begun of every call site of a set, in every executable."""
        native = self._world.native
        sites = native.ffi.new("uint64_t[]", _MAX_SITES)
        launches = native.ffi.new("int64_t[]", _MAX_SITES)
        indices = native.ffi.new("uint32_t[]", _MAX_SITES)
        n = native.lib.jc_set_started(self._world.handle, *set_id, sites, launches, indices, _MAX_SITES)
        return [(int(sites[i]), int(launches[i]), int(indices[i])) for i in range(min(n, _MAX_SITES))]

    def version(self, set_id: SetId) -> int:
        """The newest table version in force; -1 for a set that isn't known."""
        return int(self._world.native.lib.jc_set_version(self._world.handle, *set_id))

    def stage(self, set_id: SetId, version: int, program: int, table: bytes) -> None:
        """Checks a table and makes its plans; nothing is in force yet. NativeError says what is wrong."""
        native = self._world.native
        data = native.buffer(table)
        handle = self._handles[program]
        native.check(native.lib.jc_set_stage(self._world.handle, *set_id, version, handle, data, len(table)))

    def promise(self, attempt: str, set_id: SetId, version: int, points: Sequence[Place]) -> None:
        """Agrees to a proposal. NativeError if an execution at or past a point has begun."""
        native, n = self._world.native, len(points)
        sites = native.ffi.new("uint64_t[]", [p[0] for p in points] or 1)
        launches = native.ffi.new("int64_t[]", [p[1] for p in points] or 1)
        indices = native.ffi.new("uint32_t[]", [p[2] for p in points] or 1)
        with self._lock:
            native.check(native.lib.jc_set_propose(self._world.handle, *set_id, version, sites, launches, indices, n))
            self._promises[attempt] = Promise(set_id, version, time.monotonic())

    def decide(self, attempt: str, commit: bool) -> Outcome | None:
        """Obeys a verdict that stands in the store. None for an attempt without a promise here."""
        with self._lock:
            promise = self._promises.pop(attempt, None)
            if promise is None:
                return self._outcomes.get(attempt)
            native = self._world.native
            waiting = int(native.lib.jc_set_waiting(self._world.handle, *promise.set_id))
            native.check(native.lib.jc_set_decide(self._world.handle, *promise.set_id, promise.version, int(commit)))
            held = int(native.lib.jc_set_held(self._world.handle, *promise.set_id)) / 1e9
            waited = time.monotonic() - promise.since if waiting else 0.0
            outcome = Outcome(commit, held, waiting, waited)
            self.commits += commit
            self.cancels += not commit
            self._outcomes[attempt] = outcome
            while len(self._outcomes) > 64:
                del self._outcomes[next(iter(self._outcomes))]
            return outcome

    def tick(self) -> None:
        """Clears up promises without a verdict: asks the store, writing "cancel" if nothing stands there yet."""
        now = time.monotonic()
        with self._lock:
            late = [a for a, p in self._promises.items() if now - p.since > LEFT_S or self._waits(p, now)]
        for attempt in late:
            try:
                verdict = settle(self._store, attempt, CANCEL)
            except Exception as error:
                if attempt not in self._asked:
                    log.warning("no word on table swap %s from the job's store, asking again: %s", attempt, error)
                self._asked.add(attempt)
                continue
            self._asked.discard(attempt)
            log.warning("no verdict came on table swap %s; the store says %s", attempt, verdict)
            self.decide(attempt, verdict == COMMIT)

    def _waits(self, promise: Promise, now: float) -> bool:
        if now - promise.since < WAIT_S:
            return False
        return int(self._world.native.lib.jc_set_waiting(self._world.handle, *promise.set_id)) > 0


def settle(store: Store, attempt: str, wish: str) -> str:
    """Writes `wish` as the verdict unless one stands. Returns the verdict that stands."""
    key = verdict_key(attempt)
    return wish if store.set_once(key, wish) else store.get(key, WAIT_S)


def points_behind(places: Sequence[Sequence[Place]], margin: int) -> list[Place]:
    """For every call site and executable the first execution of a launch: the furthest that any process has begun, and
    `margin` more.
    """
    furthest: dict[int, list[int]] = {}
    for site, launch, _ in itertools.chain.from_iterable(places):
        known = furthest.setdefault(site, [])
        same = next((i for i, other in enumerate(known) if near(launch, other)), None)
        if same is None:
            known.append(launch)
        else:
            known[same] = max(known[same], launch)
    return [(site, launch + margin, 0) for site, known in furthest.items() for launch in known]


__all__ = [
    "CANCEL",
    "COMMIT",
    "LocalSwaps",
    "NativeError",
    "Outcome",
    "Place",
    "SetId",
    "points_behind",
    "program_id",
    "settle",
    "verdict_key",
]
