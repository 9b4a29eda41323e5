"""How a process ends once a collective has failed.

`jax.distributed` waits at exit for every process of the job, the dead ones too, and then ends the program with an abort
(jax 0.10 to 0.12: after `heartbeat_timeout_seconds`, 100 s). So after a failure the living agree first: if all come to
their end, they end as JAX has it; if one is lost or doesn't come, they leave without JAX's farewell, process 0, whose
service the others' clients watch, last of all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

from jaxcoll import compat, config
from jaxcoll.runtime import job as jobs

_LONGEST_S = 60.0  # JAX ends a job whose processes don't come together in about the same time
_AFTER_S = 2.0  # from a process's goodbye to its end
_POLL_S = 0.05
THERE, LEFT, LOST = range(3)  # what `jc_world_peer` says of a process


class World(Protocol):
    """What is asked of `runtime.world.World`."""

    job: jobs.Job
    settings: config.Config

    def others(self) -> dict[int, int]: ...


def agree(world: World) -> None:
    """Called at exit, after a failure, before the world stops. Leaves `jax.distributed` if not all come to the end."""
    store, me = world.job.store, world.job.me
    if store is None:
        return
    limit = min(world.settings.timeout, _LONGEST_S)
    together = False
    with contextlib.suppress(Exception):  # the store is gone with process 0
        store.set_bytes(f"leaving/{me}", b"1")
        together = _lead(world, store, limit) if me == 0 else _follow(world, store, limit)
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
