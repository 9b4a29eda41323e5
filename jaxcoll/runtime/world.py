"""The world of this process: its native engine, joined to the other processes of the job. Made once, on first use."""

from __future__ import annotations

import atexit
import dataclasses
import json
import logging
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxcoll import config
from jaxcoll.errors import CollectiveError, UsageError
from jaxcoll.runtime import job as jobs
from jaxcoll.runtime import leaving, links, probe
from jaxcoll.runtime.native import Native, load
from jaxcoll.schedule import Kind, Schedule, build, encode
from jaxcoll.version import __version__

log = logging.getLogger("jaxcoll")

_NS = 1_000_000_000
_EARLY_LEAST = 256 << 20
_EARLY_OPERATIONS = 1024  # XLA has 32 launches of a program under way: this is 32 independent collectives in each
_EARLY_MESSAGE = (16 << 10) + 512  # bytes: the largest that is sent unasked, and what is kept with it
_HAND_OVER_S = 30.0  # at the end: long enough for a late peer, short enough where one is stuck for good


@dataclasses.dataclass(frozen=True)
class Peer:
    """What a process tells the others of itself."""

    version: str
    host: str
    pid: int
    address: str
    port: int
    devices: list[int]
    alike: dict[str, str]
    """The settings that all processes must have alike, by variable."""


def early_bytes(local: int, ranks: int) -> int:
    """Bytes that a process with `local` of a job's `ranks` keeps of operations that it hasn't begun, before it refuses.

    Enough for `_EARLY_OPERATIONS` operations to which every remote rank has sent one message for every rank here.
    """
    return max(_EARLY_LEAST, _EARLY_OPERATIONS * local * (ranks - local) * _EARLY_MESSAGE)


def must_be_alike(settings: config.Config) -> dict[str, str]:
    """The settings, by variable, that mean nothing where processes have them differently."""
    names = ("transport", "schedule", "tuner", "record", "tcp_connections", "gpu_layout", "gpu_inside")
    return {row.env: row.show(getattr(settings, row.name)) for row in config.settings() if row.name in names}


class World:
    """The engine and its links; `speed` is what was measured between the processes."""

    PROBE_SET = -1  # set key of the measurement's own permutation

    def __init__(self, native: Native, job: jobs.Job, settings: config.Config):
        self.native, self.job, self.settings = native, job, settings
        self.pid = os.getpid()
        self.peers: list[Peer] = []
        self.speed = probe.Speed(0.0, 0.0, 0.0, 1, 1, False)
        self._stops: list[Callable[[], None]] = []
        self.handle: Any = self._create()
        self._started = False

    def _create(self) -> Any:
        s = self.settings
        cores = len(os.sched_getaffinity(0))
        local = len(self.job.devices[self.job.me])
        options = self.native.ffi.new(
            "jc_options*",
            {
                "timeout_ns": int(s.timeout * _NS),
                "warn_ns": int(s.warn_after * _NS),
                "mismatch_ns": _NS,
                "spin_ns": s.spin_us * 1000,
                "helpers": s.threads if s.threads else (min(cores, local) - 1 if local > 1 else 0),
                "record": int(s.record),
                "quiet": int(s.log == "error"),
                "keep_memory": int(keeps_memory(s.keep_memory, local, os.environ)),
                "threads": 1,
                "early_bytes": early_bytes(local, sum(len(d) for d in self.job.devices)),
            },
        )
        handle = self.native.lib.jc_world_create(options, self.job.processes, self.job.me)
        if handle == self.native.ffi.NULL:
            self.native.check(-1)
        for p, devices in enumerate(self.job.devices):
            ids = self.native.int64s(devices)
            self.native.check(self.native.lib.jc_world_add_devices(handle, p, ids, len(devices)))
        return handle

    def start(self) -> None:
        """Joins the other processes and starts the engine. Raises CollectiveError if one doesn't come in time."""
        if self.job.processes > 1:
            if self.settings.transport == "inproc":
                raise UsageError(
                    f"JAXCOLL_TRANSPORT=inproc, but this job has {self.job.processes} processes; use auto, shm or tcp"
                )
            self._join()
        self.native.check(self.native.lib.jc_world_start(self.handle))
        self.native.lib.jc_world_use(self.handle)
        self._started = True
        self._measure()

    def carries_tcp(self, p: int) -> bool:
        """Whether transfers to process p go over tcp."""
        same_host = self.peers[p].host == self.peers[self.job.me].host
        if self.settings.transport == "shm" and not same_host:
            raise UsageError(
                f"JAXCOLL_TRANSPORT=shm, but processes {self.job.me} and {p} are on different hosts; use auto or tcp"
            )
        return self.settings.transport == "tcp" or not same_host

    def _join(self) -> None:
        job, store = self.job, self.job.store
        assert store is not None
        timeout = self.settings.timeout
        if job.me == 0:
            store.set("secret", secrets.token_hex(32))
        secret = bytes.fromhex(store.get("secret", timeout))
        address = links.local_address(self.settings.socket_ifname, job.coordinator)
        listener = links.Listener(address, secret, job.me)
        try:
            mine = Peer(
                __version__, jobs.host_id(self.settings.host_id), os.getpid(), address, listener.port,
                list(job.devices[job.me]), must_be_alike(self.settings),
            )  # fmt: skip
            jobs.publish(store, "peer", job.me, dataclasses.asdict(mine))
            rows = jobs.collect(store, "peer", job.processes, timeout)
            self._check_versions([str(row.get("version")) for row in rows])
            self.peers = [Peer(**row) for row in rows]
            self._check_peers(mine)
            self._join_shm(store, timeout)
            self._join_tcp(listener, secret, timeout)
            store.barrier("joined", timeout)
        finally:
            listener.close()

    def _measure(self) -> None:
        """The medians of what all processes measure, so that all choose the same schedules."""
        mine = {"alpha": 20e-6, "beta": 0.0, "copy": probe.copy_beta(), "cores": len(os.sched_getaffinity(0))}
        rows = [mine]
        hosts = [str(p.host) for p in self.peers for _ in p.devices] or ["here"] * len(self.job.devices[0])
        if self.job.processes > 1:
            assert self.job.store is not None
            n = self.job.processes
            schedule = build("permute", Kind.PERMUTE, n, perm=[(p, (p + 1) % n) for p in range(n)])
            self.define_set(self.PROBE_SET, [d[0] for d in self.job.devices], [self.load_program(schedule)], 0)
            mine["alpha"], mine["beta"] = probe.measure(self)
            jobs.publish(self.job.store, "speed", self.job.me, mine)
            rows = jobs.collect(self.job.store, "speed", n, self.settings.timeout)
        self.speed = probe.Speed(
            alpha=statistics.median(r["alpha"] for r in rows),
            beta=statistics.median(r["beta"] for r in rows),
            copy_beta=statistics.median(r["copy"] for r in rows),
            local_ranks=max(hosts.count(h) for h in set(hosts)),
            cores=min(int(r["cores"]) for r in rows),
            remote=len(set(hosts)) > 1 or self.settings.transport == "tcp",
        )

    def hosts_of(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The number of the host of every device, from 0 in the order of the processes.

        JAXCOLL_TRANSPORT=tcp makes every process a host of its own.
        """
        process = {d: p for p, ids in enumerate(self.job.devices) for d in ids}
        if self.settings.transport == "tcp" or not self.peers:
            return tuple(process[d] for d in devices)
        number = {name: i for i, name in enumerate(dict.fromkeys(peer.host for peer in self.peers))}
        return tuple(number[self.peers[process[d]].host] for d in devices)

    def load_program(self, schedule: Schedule) -> int:
        """Hands a schedule to the native library, which checks it. Returns its handle."""
        blob = encode(schedule)
        return self.native.check(self.native.lib.jc_program_load(self.handle, self.native.buffer(blob), len(blob)))

    def define_set(self, set_key: int, devices: Sequence[int], programs: Sequence[int], chosen: int) -> None:
        """Makes the schedule set of the communicator over `devices` known; a set that is there stays as it is."""
        ids, known = self.native.int64s(devices), self.native.int64s(programs)
        self.native.check(
            self.native.lib.jc_set_define(self.handle, set_key, ids, len(devices), known, len(programs), chosen)
        )

    def _check_versions(self, versions: Sequence[str]) -> None:
        """Before anything else of the others is read: another version may tell other things of itself."""
        for p, version in enumerate(versions):
            if version != __version__:
                raise UsageError(
                    f"process {p} runs jaxcoll {version}, process {self.job.me} runs {__version__}; "
                    "install one version everywhere"
                )

    def _check_peers(self, mine: Peer) -> None:
        for p, peer in enumerate(self.peers):
            for variable, value in mine.alike.items():
                if peer.alike[variable] != value:
                    raise UsageError(
                        f"{variable} is {peer.alike[variable]!r} in process {p} and {value!r} in {self.job.me}; "
                        "set it alike"
                    )
            near, far = (links.is_loopback(address) for address in (mine.address, peer.address))
            if near != far and peer.host != mine.host:
                who, address = (p, peer.address) if far else (self.job.me, mine.address)
                raise UsageError(
                    f"process {who} would be reached at {address}, which leads only to its own host (the coordinator's "
                    "name means that there; see /etc/hosts): name the network's interface in JAXCOLL_SOCKET_IFNAME"
                )

    def _join_shm(self, store: jobs.Store, timeout: float) -> None:
        lib, check = self.native.lib, self.native.check
        places = [p for p, peer in enumerate(self.peers) if peer.host == self.peers[self.job.me].host]
        if len(places) < 2 or self.settings.transport == "tcp":
            # The others of this host may wait for this process's row, so it is there in any case.
            jobs.publish(store, "shm", self.job.me, {"fd": -1})
            return
        size = lib.jc_shm_segment_bytes(len(places))
        fd = os.memfd_create("jaxcoll", os.MFD_CLOEXEC)  # no name: nothing is left behind, however this process ends
        try:
            os.ftruncate(fd, size)
            check(lib.jc_world_shm_create(self.handle, fd, len(places), places.index(self.job.me)))
            jobs.publish(store, "shm", self.job.me, {"fd": fd})
            for place, p in enumerate(places):
                if p == self.job.me:
                    continue
                pid, their_fd = self.peers[p].pid, json.loads(store.get(f"shm/{p}", timeout))["fd"]
                try:
                    theirs = os.open(f"/proc/{pid}/fd/{their_fd}", os.O_RDWR | os.O_CLOEXEC)
                except OSError as error:
                    raise CollectiveError(
                        f"process {p} (pid {pid}) is on this host but its shared memory can't be opened "
                        f"({error.strerror}): the two run as different users or in different containers. Set "
                        "JAXCOLL_TRANSPORT=tcp, or JAXCOLL_HOST_ID to a different word in each container."
                    ) from error
                try:
                    check(lib.jc_world_shm_peer(self.handle, p, theirs, place, pid, 1))
                finally:
                    os.close(theirs)
            self._shm_done(store, places, timeout)
        finally:
            os.close(fd)

    def _shm_done(self, store: jobs.Store, places: list[int], timeout: float) -> None:
        """Keeps the descriptor open until everybody of this host has opened it."""
        store.set(f"shm-open/{self.job.me}", "1")
        for p in places:
            store.get(f"shm-open/{p}", timeout)

    def _join_tcp(self, listener: links.Listener, secret: bytes, timeout: float) -> None:
        """One connection per pair as a life line; several where tcp carries the data.

        The higher number connects to the lower.
        """
        me, deadline = self.job.me, time.monotonic() + timeout
        several = self.settings.tcp_connections
        count = [several if p != me and self.carries_tcp(p) else 1 for p in range(self.job.processes)]
        made: dict[int, list[socket.socket]] = {}
        for p in range(me):
            peer = self.peers[p]
            made[p] = [
                links.connect(peer.address, peer.port, secret, me, p, c, self.peers[me].address, deadline)
                for c in range(count[p])
            ]
        expected = {(p, c) for p in range(me + 1, self.job.processes) for c in range(count[p])}
        listener.wait(expected, deadline)
        for p in range(me + 1, self.job.processes):
            made[p] = [listener.accepted[p, c] for c in range(count[p])]
        for p, sockets in made.items():
            fds = self.native.ffi.new("int[]", [s.detach() for s in sockets])
            self.native.check(
                self.native.lib.jc_world_tcp_peer(self.handle, p, fds, len(sockets), int(self.carries_tcp(p)))
            )

    def link_name(self, p: int) -> str:
        """How this process reaches process p: inproc, shm (reads in place), shm (ring), tcp."""
        return self.native.text(self.native.lib.jc_world_link_name(self.handle, p))

    def failed(self) -> bool:
        """Whether a collective has failed in this process, or another process is lost."""
        lib = self.native.lib
        return self._started and (lib.jc_world_failures(self.handle) > 0 or leaving.LOST in self.others().values())

    def others(self) -> dict[int, int]:
        """Every other process and how it is: `leaving.THERE`, LEFT or LOST."""
        lib, me = self.native.lib, self.job.me
        return {p: lib.jc_world_peer(self.handle, p) for p in range(self.job.processes) if p != me}

    def before_stop(self, call: Callable[[], None]) -> None:
        """`call` runs before this process leaves, while the library still works."""
        self._stops.append(call)

    def open_operations(self) -> int:
        """Executions that have begun in this process and not ended."""
        return self.native.lib.jc_world_open_operations(self.handle)

    def stop(self) -> None:
        """Leaves: peers get what they were sent and are told, open operations fail."""
        for call in self._stops:
            call()
        if self._started:
            self.native.lib.jc_world_use(self.native.ffi.NULL)
            self._hand_over()
            self.native.lib.jc_world_stop(self.handle)

    def _hand_over(self) -> None:
        """Waits until the peers have taken what finished operations sent them: an early end would be a loss to them."""
        deadline = time.monotonic() + min(self.settings.timeout, _HAND_OVER_S)
        while (p := self.native.lib.jc_world_sending(self.handle)) >= 0:
            if time.monotonic() > deadline:
                log.warning(
                    "this process leaves before process %d has taken all that it was sent, and %d will report a lost "
                    "rank: end the program with something in which all ranks meet, such as a last psum", p, p
                )  # fmt: skip
                return
            time.sleep(0.002)

    def discard(self) -> None:
        """Frees what a start that failed has made: threads, connections, shared memory."""
        self.native.lib.jc_world_stop(self.handle)
        self.native.lib.jc_world_free(self.handle)
        self.handle = self.native.ffi.NULL


def keeps_memory(setting: str, local_devices: int, environ: Mapping[str, str]) -> bool:
    """What JAXCOLL_KEEP_MEMORY comes to in a process with that many devices and that environment."""
    own = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
    users = any(name in environ for name in own) or "glibc.malloc." in environ.get("GLIBC_TUNABLES", "")
    return setting == "on" or (setting == "auto" and local_devices == 1 and not users)


def _start_logging(level: str) -> None:
    """Sets what is logged; a program that has set it, or says where logs go, has the last word."""
    if log.level == logging.NOTSET:
        log.setLevel(level)
    if not log.hasHandlers() and log.level < logging.WARNING:  # Python's last resort shows warnings and worse only
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("jaxcoll: %(message)s"))
        log.addHandler(handler)


_lock = threading.Lock()
_world: World | None = None


def refuse_forked() -> None:
    """Raises UsageError in a child that was forked from a process with a world: it has none of the threads."""
    if _world is not None and _world.pid != os.getpid():
        raise UsageError(
            f"this process was forked from process {_world.pid} after jaxcoll had started there, and has none of its "
            'threads or JAX\'s: make processes by multiprocessing\'s "spawn" or "forkserver", or by subprocess'
        )


def get() -> World:
    """The world of this process, made on the first call. Raises UsageError in a forked child of one that has it."""
    global _world
    refuse_forked()
    with _lock:
        if _world is None:
            _start_logging(config.current().log.upper())
            world = World(load(), jobs.current(), config.current())
            try:
                world.start()
            except BaseException:
                world.discard()
                raise
            _world = world
            atexit.register(_leave)
        return _world


def running() -> World | None:
    """The world if there is one."""
    return _world


def _leave() -> None:
    if _world is None or os.getpid() != _world.pid:  # a forked child has our sockets, and is no member of the job
        return
    try:
        try:
            # After an exception there may be nobody to meet: whoever waits for this process is told at once.
            if not hasattr(sys, "last_value"):
                leaving.finish(_world)
            if _world.failed():
                leaving.agree(_world)
        finally:
            _world.stop()
    except Exception:
        log.exception("jaxcoll didn't end in order")
