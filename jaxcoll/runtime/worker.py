"""Every process's part in tuning: forwards records, stages tables, makes and keeps promises. Decides nothing."""

from __future__ import annotations

import base64
import dataclasses
import logging
import threading
import time
from typing import Any

import numpy as np

from jaxcoll.errors import JaxcollError
from jaxcoll.runtime import choice
from jaxcoll.runtime.control import ChannelLost, Message, WorkerEnd, set_id_of
from jaxcoll.runtime.drain import Drain
from jaxcoll.runtime.job import Store
from jaxcoll.runtime.sets import SetInfo, Sets
from jaxcoll.runtime.swap import COMMIT, LocalSwaps, SetId
from jaxcoll.runtime.world import World
from jaxcoll.schedule import Kind, Schedule, build, encode
from jaxcoll.telemetry import Records

log = logging.getLogger("jaxcoll")

_TICK_S = 0.25  # messages wake it; each waking takes the interpreter's lock from the training for a moment
_NAP_S = 0.2  # how often new sets are looked for, and call sites that are still unknown
_SITES_S = 2.0  # how often known call sites are looked up again: one may have got a second set
_HERE_S = 5.0  # how often it says that it lives: a process may have no records for long
_MANY = 64  # ranks above which no variants are added: their programs would be large
_LANES = 4  # of a direct schedule in which some ranks reduce nothing


def describe(info: SetInfo, hosts: tuple[int, ...]) -> Message:
    """A set as the leader learns of it, with all schedules that it may move to. hosts: that of every rank."""
    want = info.want
    return {
        "devices": list(info.devices),
        "kind": want.kind.label,
        "size_class": want.size_class,
        "nbytes": choice.class_bytes(want.size_class),
        "deterministic": want.deterministic,
        "chosen": info.chosen,
        "programs": [base64.b64encode(encode(s)).decode() for s in (*info.schedules, *_variants(info, hosts))],
    }


def _variants(info: SetInfo, hosts: tuple[int, ...]) -> list[Schedule]:
    """Schedules beside those of the set: the usual candidates, and direct ones that let some ranks reduce nothing.

    The first positions have no share; a table puts the congested hosts there. Large ones are pipelined: such a host
    only receives results, and with lanes it does so while the others still reduce.
    """
    want, n = info.want, len(info.devices)
    if want.kind is Kind.PERMUTE or n > _MANY:
        return []
    names = [name for name in choice.CANDIDATES[want.kind] if choice.why_not(name, n, hosts) is None]
    large = choice.is_large(choice.class_bytes(want.size_class))
    out = [choice.make(name, want.kind, n, want.root, want.perm, large, hosts) for name in names]
    if want.kind is Kind.ALL_REDUCE and n >= 4:
        for idle in (1, 2):
            shares, lanes = [0] * idle + [1] * (n - idle), _LANES if large else 1
            made = build("direct", want.kind, n, shares=shares, pipeline=lanes)
            out.append(dataclasses.replace(made, name=f"direct but {idle}"))
    return out


def by_site(records: Records) -> list[tuple[tuple[int, int], Records]]:
    """The records of each (communicator, call site)."""
    if not len(records):
        return []
    comm, site = records["comm"], records["site"]
    if (comm == comm[0]).all() and (site == site[0]).all():  # as a rule, and then sorting would be the larger part
        return [((int(comm[0]), int(site[0])), records)]
    kinds, inverse = np.unique(np.stack([comm, site]), axis=1, return_inverse=True)
    inverse = inverse.reshape(-1)
    return [((int(c), int(s)), records[inverse == i]) for i, (c, s) in enumerate(kinds.T.tolist())]


class Worker:
    """The thread that answers the leader, and the drain's sink."""

    def __init__(self, world: World, sets: Sets, channel: WorkerEnd, store: Store):
        self.swaps = LocalSwaps(world, sets, store)
        self._me = world.job.me
        self._channel = channel
        self._sets = sets
        self._announced: set[SetId] = set()
        self._looked = 0.0
        self._said_at: float | None = None
        self._over = False
        self._homes: dict[tuple[int, int], SetId | None] = {}
        self._homes_at = 0.0
        self.forwarded = self.lost = self.unknown = 0
        self._stopping = threading.Event()
        self._drain = Drain(world, self._forward)
        self._thread = threading.Thread(target=self._run, name="jaxcoll-worker", daemon=True)
        self._thread.start()

    @property
    def drain(self) -> Drain:
        """The drain, for its counts."""
        return self._drain

    @property
    def over(self) -> bool:
        """Whether the leader has said that it has stopped, or can't be reached any more."""
        return self._over

    def stop(self) -> None:
        """Ends both threads. A promise that is still open is this process's own affair: the verdict is in the store."""
        self._stopping.set()
        drained = self._drain.stop()
        self._thread.join(2.0)
        if drained and not self._thread.is_alive():
            self._channel.close()  # else one of them still uses it

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._round()
            except ChannelLost as error:
                self._over = True
                self._drain.stop()
                log.error("the tuner has stopped here: %s; collectives go on with the tables in force", error)
                return
            except Exception:
                # One bad message, or a store that is away for a while, must not end the tuning for good.
                log.exception("jaxcoll's tuning thread met an error; collectives are not affected")
                self._stopping.wait(1.0)

    def _round(self) -> None:
        if not self._over:
            self._greet()
            self._announce()
        try:
            for message, payload in self._channel.receive(_TICK_S):
                self._serve(message, payload)
        finally:
            self.swaps.tick()

    def _serve(self, message: Message, payload: bytes) -> None:
        """Answers one message; a bad one takes none of those behind it along."""
        try:
            answer = self._answer(message, payload)
        except Exception:
            log.exception("jaxcoll's tuning thread can't obey %r; collectives are not affected", message.get("do"))
            return
        if answer is not None:
            self._channel.send({"attempt": message.get("attempt"), **answer})

    def _greet(self) -> None:
        now = time.monotonic()
        if self._said_at is None or now - self._said_at > _HERE_S:
            self._channel.send({"do": "hello" if self._said_at is None else "here"})
            self._said_at = now

    def _announce(self) -> None:
        now = time.monotonic()
        if now - self._looked < _NAP_S:
            return
        self._looked = now
        if len(self._sets.all()) == len(self._announced):
            return
        for set_id, info in self.swaps.known().items():
            if set_id in self._announced:
                continue
            if self._channel.send({"do": "set", "set": list(set_id), **describe(info, self._hosts_of(info))}):
                self._announced.add(set_id)

    def _hosts_of(self, info: SetInfo) -> tuple[int, ...]:
        return self._sets.world.hosts_of(info.devices)

    # ------------------------------------------------------------------------------------------------ the leader's word

    def _answer(self, message: Message, payload: bytes) -> Message | None:
        match message["do"]:
            case "stage":
                return self._stage(message, payload)
            case "program":
                return self._load(payload)
            case "propose":
                return self._promise(message)
            case "decide":
                return self._decide(message)
            case "stride":
                self._drain.sample(int(message["stride"]))
            case "over":  # nobody reads records any more
                self._over = True
                self._drain.stop()
            case _:
                pass
        return None

    def _load(self, blob: bytes) -> Message:
        try:
            self.swaps.load(blob)
        except JaxcollError as error:
            return {"do": "loaded", "error": str(error)}
        return {"do": "loaded", "error": None}

    def _stage(self, message: Message, table: bytes) -> Message:
        set_id = set_id_of(message)
        error = None
        if not self.swaps.has(message["program"]):
            return {"do": "staged", "error": "unknown program", "unknown": True, "places": []}
        try:
            self.swaps.stage(set_id, message["version"], message["program"], table)
        except JaxcollError as refused:
            error = str(refused)
        return {"do": "staged", "error": error, "unknown": False, "places": self.swaps.started(set_id)}

    def _promise(self, message: Message) -> Message:
        try:
            points = [(int(s), int(launch), int(i)) for s, launch, i in message["points"]]
            self.swaps.promise(message["attempt"], set_id_of(message), message["version"], points)
        except JaxcollError as refused:
            return {"do": "promised", "error": str(refused)}
        return {"do": "promised", "error": None}

    def _decide(self, message: Message) -> Message:
        outcome = self.swaps.decide(message["attempt"], message["verdict"] == COMMIT)
        if outcome is None:
            return {"do": "decided", "stall_s": 0.0, "waiting": 0}
        return {"do": "decided", "stall_s": outcome.stall_s, "waiting": outcome.waiting}

    # --------------------------------------------------------------------------------------------------------- records

    def _forward(self, records: Records, dropped: int) -> None:
        """Called by the drain's thread: sends a batch on, set by set."""
        if dropped:
            self.lost += dropped
        for (comm, site), part in by_site(records):
            home = self._home(comm, site)
            if home is None:
                self.unknown += len(part)
            elif self._channel.push({"do": "records", "set": list(home), "dropped": dropped}, part.tobytes()):
                self.forwarded += len(part)
                dropped = 0
            else:
                self.lost += len(part)

    def _home(self, comm: int, site: int) -> SetId | None:
        """The set that a call site runs; None if it isn't one of those that are tuned, or if it runs several."""
        now = time.monotonic()
        age = now - self._homes_at
        if age > _SITES_S or ((comm, site) not in self._homes and age > _NAP_S):
            self._homes_at = now
            self._look_up_sites()
        return self._homes.get((comm, site))

    def _look_up_sites(self) -> None:
        found: dict[tuple[int, int], SetId | None] = {}
        for set_id in self.swaps.known():
            for site, _, _ in self.swaps.started(set_id):
                # A program compiled for two sizes gives one call site to two sets: their records look alike.
                here = set_id[0], site
                found[here] = set_id if found.get(here, set_id) == set_id else None
        self._homes = found


def local_counts(worker: Worker) -> dict[str, Any]:
    """Plain numbers for `jaxcoll.status()`."""
    drain = worker.drain
    return {
        "taken": drain.records,
        "batches": drain.batches,
        "forwarded": worker.forwarded,
        "unknown": worker.unknown,
        "lost": worker.lost,
        "dropped": drain.dropped,
    }
