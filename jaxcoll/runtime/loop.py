"""The closed loop of this process: its worker, in process 0 the leader, and how both are started and stopped."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from jaxcoll import config
from jaxcoll.errors import UsageError
from jaxcoll.runtime import control
from jaxcoll.runtime.job import MemoryStore
from jaxcoll.runtime.leader import Leader
from jaxcoll.runtime.sets import Sets
from jaxcoll.runtime.worker import Worker, local_counts
from jaxcoll.runtime.world import World
from jaxcoll.steering import policy, runlog

log = logging.getLogger("jaxcoll")

_BY_SETTING: dict[str, tuple[str, dict[str, Any]]] = {
    "on": ("jaxcoll", {}),
    "swaps": ("jaxcoll", {"free": False}),
    "react-paper": ("react-paper", {}),
}


class Loop:
    """Tuning in this process. Made in every process of the job; those may come at different times."""

    def __init__(self, world: World, sets: Sets, name: str, params: dict[str, Any]):
        settings, job = world.settings, world.job
        self.policy = policy.make(name, **params)
        self.started = time.time()
        if not settings.record:
            raise UsageError("the tuner needs records: unset JAXCOLL_RECORD")
        if job.me == 0:
            runlog.check(settings.run_log)  # a path that can't be written is refused here, not in the brain
        store = job.store or MemoryStore()
        interface = settings.control_ifname or settings.socket_ifname
        setting = "JAXCOLL_CONTROL_IFNAME" if settings.control_ifname else "JAXCOLL_SOCKET_IFNAME"
        leads, end, self.carrier = control.open_channel(
            store, job.me, job.processes, interface, job.coordinator, settings.timeout, setting
        )
        self.leader: Leader | None = None
        if leads is not None:
            hosts = world.hosts_of([devices[0] for devices in job.devices])
            given = {"policy": name, "params": params, "run_log": settings.run_log, "log": settings.log}
            self.leader = Leader(job, store, leads, hosts, given)
            self.leader.start()
        self.worker = Worker(world, sets, end, store)

    def stop(self) -> None:
        """Ends the threads. The tables in force stay."""
        if self.leader is not None:
            self.leader.stop()
        self.worker.stop()

    def status(self) -> dict[str, Any]:
        """Plain data: policy, swaps, and in process 0 all sets."""
        swaps = self.worker.swaps
        out: dict[str, Any] = {
            "policy": self.policy.name,
            "state": "on",
            "leads": self.leader is not None,
            "control": self.carrier,
            "swaps": swaps.commits,
            "reverts": 0,
            "cancelled": swaps.cancels,
            "records": local_counts(self.worker),
        }
        if self.leader is not None:
            out |= self.leader.report
            out["state"] = "on" if self.leader.running else f"stopped: {self.leader.error or 'ended'}"
        elif self.worker.over:
            out["state"] = "stopped: the leader has stopped; process 0's status and log say why"
        return out


_lock = threading.Lock()
_loop: Loop | None = None


def start(world: World, sets: Sets, name: str, **params: Any) -> Loop:
    """Starts tuning; every process of the job must. UsageError if it runs already."""
    global _loop
    with _lock:
        if _loop is not None:
            raise UsageError(f"the tuner runs already (policy {_loop.policy.name!r}); a job chooses its policy once")
        _loop = Loop(world, sets, name, params)
        world.before_stop(stop)
        return _loop


def start_configured(world: World, sets: Sets) -> None:
    """Starts what JAXCOLL_TUNER asks for."""
    setting = config.current().tuner
    if setting != "off" and _loop is None:
        name, params = _BY_SETTING[setting]
        start(world, sets, name, **params)


def current() -> Loop | None:
    """The loop of this process, if it runs."""
    return _loop


def stop() -> None:
    """Stops tuning in this process."""
    global _loop
    with _lock:
        loop, _loop = _loop, None
    if loop is not None:
        try:
            loop.stop()
        except Exception:
            log.exception("jaxcoll's tuning didn't end in order; the program's own end is not affected")
