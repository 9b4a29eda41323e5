"""How a process ends: what it has started is finished; once a collective has failed, the living agree how they go.

`jax.distributed` waits at exit for every process of the job, the dead ones too, and then ends the program with an abort
(jax 0.10 to 0.12: after `heartbeat_timeout_seconds`, 100 s). So after a failure the living agree first: if all come to
their end, they end as JAX has it; if one is lost or doesn't come, they leave without JAX's farewell, process 0, whose
service the others' clients watch, last of all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from jaxcoll import compat, config
from jaxcoll.runtime import job as jobs

log = logging.getLogger("jaxcoll")

_IDLE_LOOKS, _LOOK_S = 15, 0.01  # it is over after so many looks at neither an operation nor any work
_COMPUTES_S = 10.0  # a program computes for so long between two operations; what works on is something else
_LONGEST_S = 60.0  # JAX ends a job whose processes don't come together in about the same time
_AFTER_S = 2.0  # from a process's goodbye to its end
_POLL_S = 0.05
THERE, LEFT, LOST = range(3)  # what `jc_world_peer` says of a process


class World(Protocol):
    """What is asked of `runtime.world.World`."""

    job: jobs.Job
    settings: config.Config

    def others(self) -> dict[int, int]: ...

    def failed(self) -> bool: ...

    def open_operations(self) -> int: ...


def finish(world: World) -> None:
    """Waits until what the program has started is done: the others count on this process's part in it.

    An operation ends at its deadline at the latest. Of a program whose results nobody holds any more nothing tells that
    it still runs, but the operations that it has open, and between two of them that this process computes.
    """
    if world.job.processes == 1 or world.failed():
        return
    compat.wait_for_arrays()
    worked, idle, give_up = _others_worked(), 0, time.monotonic() + _COMPUTES_S
    while idle < _IDLE_LOOKS and time.monotonic() < give_up and not world.failed():
        time.sleep(_LOOK_S)
        before, worked = worked, _others_worked()
        if world.open_operations() > 0:
            idle, give_up = 0, time.monotonic() + _COMPUTES_S
        elif worked - before > _LOOK_S / 4 or _other_runs():
            idle = 0
        else:
            idle += 1


def _others_worked() -> float:
    """Seconds of processor time of all threads but this one: looking at many costs some, too."""
    return time.process_time() - time.thread_time()


def _other_runs() -> bool:
    """Whether another thread of this process runs, or would if it had a core."""
    me = str(threading.get_native_id())
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if thread != me and Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "R":
                return True
    return False


def agree(world: World) -> None:
    """Called at exit, after a failure, before the world stops. Leaves `jax.distributed` if not all come to the end."""
    store, me = world.job.store, world.job.me
    if store is None:
        return
    limit = min(world.settings.timeout, _LONGEST_S)
    try:
        store.set_bytes(f"leaving/{me}", b"1")
        together = _lead(world, store, limit) if me == 0 else _follow(world, store, limit)
    except Exception as error:  # it is gone with process 0
        log.info("the job's store can't be reached at the end, so this process leaves by itself: %s", error)
        together = False
    if not together:
        compat.abandon_distributed()


def _lead(world: World, store: jobs.Store, limit: float) -> bool:
    """Process 0's part. Whether all end together."""
    together = _all_come(world, store, limit)
    store.set_bytes("leaving/verdict", b"together" if together else b"apart")
    if not together:
        _until(lambda: THERE not in world.others().values(), limit)
        time.sleep(_AFTER_S)
    return together


def _follow(world: World, store: jobs.Store, limit: float) -> bool:
    """The others' part."""
    verdict: list[bytes] = []
    _until(lambda: _heard(world, store, verdict), limit + _AFTER_S)
    others = world.others()
    in_order = others[0] == LEFT and LOST not in others.values()  # process 0 has seen no failure
    return in_order if not verdict else verdict[0] == b"together"


def _all_come(world: World, store: jobs.Store, limit: float) -> bool:
    """Waits until every process that is there comes to its end. Whether all of the job did."""
    come: set[int] = set()

    def settled() -> bool:
        others = world.others()
        for p in others.keys() - come:
            if store.get_bytes(f"leaving/{p}", 0.001) is not None:
                come.add(p)
        return all(p in come or state != THERE for p, state in others.items())

    _until(settled, limit)
    return all(p in come or state == LEFT for p, state in world.others().items())


def _heard(world: World, store: jobs.Store, verdict: list[bytes]) -> bool:
    """Whether process 0 has given its verdict, which goes into `verdict`, or is gone."""
    if world.others()[0] != THERE:
        return True
    found = store.get_bytes("leaving/verdict", 0.001)
    if found is not None:
        verdict.append(found)
    return found is not None


def _until(done: Callable[[], bool], limit: float) -> None:
    deadline = time.monotonic() + limit
    with contextlib.suppress(Exception):  # the store is gone with process 0
        while not done() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
