"""The control channel between the leading process and all others: small messages, off every collective's path.

Two carriers with one face: ZeroMQ, encrypted with keys of this job, where pyzmq is installed (`pip install
jaxcoll[tuner]`), else the key-value store of `jax.distributed`. Losing messages is allowed: the protocol above (see
`swap`) survives it. A message is a dict of plain data under "do", and bytes.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib
import importlib.util
import json
import logging
import os
import queue
import select
import struct
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from jaxcoll.errors import JaxcollError
from jaxcoll.runtime import links
from jaxcoll.runtime.job import Store

log = logging.getLogger("jaxcoll")

Message = dict[str, Any]

_LENGTH = struct.Struct("<I")
_KEYS = "loop"
_HIGH_WATER = 1000  # messages kept for a peer that doesn't read; more are dropped
_POLL_BUSY_S, _POLL_IDLE_S = 0.002, 0.05  # how often the leader looks into the key-value store
AWAY_S = 30.0  # a store that is away for longer ends the tuning
_UNREAD = 64  # messages of a worker that may lie unread in the key-value store; more are dropped


class LeaderEnd(Protocol):
    """The leader's end."""

    def send(self, process: int, message: Message, payload: bytes = b"") -> None: ...

    def receive(self, timeout: float, wake: Sequence[int] = ()) -> list[tuple[int, Message, bytes]]:
        """What has come, waiting up to `timeout` seconds for the first; [] if nothing came.

        It also returns when one of the file descriptors `wake` can be read.
        """
        ...

    def close(self) -> None: ...


class WorkerEnd(Protocol):
    """A worker's end. `push` may be called by another thread than the other two. Both send without ever waiting;
    False if the message had to be dropped."""

    def send(self, message: Message, payload: bytes = b"") -> bool: ...

    def push(self, message: Message, payload: bytes = b"") -> bool:
        """For records."""
        ...

    def receive(self, timeout: float) -> list[tuple[Message, bytes]]: ...

    def close(self) -> None: ...


def set_id_of(message: Message) -> tuple[int, int]:
    """The schedule set that a message is about: communicator and key."""
    comm, key = message["set"]
    return int(comm), int(key)


def pack(message: Message, payload: bytes) -> bytes:
    """One frame: length of the JSON, the JSON, the payload."""
    head = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(head)) + head + payload


def unpack(frame: bytes) -> tuple[Message, bytes]:
    """What `pack` made. ValueError for anything else."""
    if len(frame) < _LENGTH.size:
        raise ValueError("a frame without a length")
    (size,) = _LENGTH.unpack_from(frame)
    end = _LENGTH.size + size
    message = json.loads(frame[_LENGTH.size : end])
    if not isinstance(message, dict) or "do" not in message:
        raise ValueError("a frame without a message")
    return message, frame[end:]


def readable(descriptors: Sequence[int], timeout: float) -> bool:
    """Whether one of them can be read within `timeout` seconds. Unlike `select`, for descriptors of any number."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(max(0, timeout) * 1000))


# -------------------------------------------------------------------------------------------------- inside a process


class Local:
    """The leader's process talks to itself through two queues; also the whole channel of a job of one process."""

    def __init__(self, process: int = 0):
        self.process = process
        self.up: queue.Queue[tuple[Message, bytes]] = queue.Queue(_HIGH_WATER)
        self.down: queue.Queue[tuple[Message, bytes]] = queue.Queue(_HIGH_WATER)
        # Readable while something may lie in `up`: the leader waits for it beside its sockets.
        self.ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def send(self, message: Message, payload: bytes = b"") -> bool:
        return self.push(message, payload)

    def push(self, message: Message, payload: bytes = b"") -> bool:
        try:
            self.up.put_nowait((message, payload))
        except queue.Full:
            return False
        os.eventfd_write(self.ready, 1)
        return True

    def receive(self, timeout: float) -> list[tuple[Message, bytes]]:
        return _take(self.down, timeout)

    def close(self) -> None:
        pass


class LocalLeader:
    """The leader's end of a `Local`."""

    def __init__(self, local: Local):
        self._local = local

    def send(self, process: int, message: Message, payload: bytes = b"") -> None:
        with contextlib.suppress(queue.Full):
            self._local.down.put_nowait((message, payload))

    def receive(self, timeout: float, wake: Sequence[int] = ()) -> list[tuple[int, Message, bytes]]:
        if timeout > 0 and self._local.up.empty():
            readable([self._local.ready, *wake], timeout)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._local.ready)
        return [(self._local.process, *got) for got in _take(self._local.up, 0)]

    def close(self) -> None:
        pass


def _take(source: queue.Queue[tuple[Message, bytes]], timeout: float) -> list[tuple[Message, bytes]]:
    out: list[tuple[Message, bytes]] = []
    with contextlib.suppress(queue.Empty):
        out.append(source.get(timeout=timeout) if timeout > 0 else source.get_nowait())
        while True:
            out.append(source.get_nowait())
    return out


class JoinedLeader:
    """The leader's end toward its own process and, over `remote`, all others."""

    def __init__(self, local: Local, remote: LeaderEnd):
        self._local, self._remote, self._me = LocalLeader(local), remote, local.process
        self._ready = local.ready

    def send(self, process: int, message: Message, payload: bytes = b"") -> None:
        (self._local if process == self._me else self._remote).send(process, message, payload)

    def receive(self, timeout: float, wake: Sequence[int] = ()) -> list[tuple[int, Message, bytes]]:
        got = [*self._local.receive(0), *self._remote.receive(0)]
        if got or timeout <= 0:
            return got
        got = self._remote.receive(timeout, [self._ready, *wake])
        return [*self._local.receive(0), *got]

    def close(self) -> None:
        self._remote.close()


# ------------------------------------------------------------------------------------------------ the key-value store


class ChannelLost(JaxcollError):
    """The job's store has been away for `AWAY_S`: no word of the tuner's comes or goes any more."""


class _Tolerance:
    """Bears a store that is away, and says so once; ChannelLost when it has been for `AWAY_S`."""

    def __init__(self) -> None:
        self._away_since: float | None = None

    @contextlib.contextmanager
    def __call__(self) -> Generator[None]:
        try:
            yield
            self._away_since = None
        except Exception as error:
            now = time.monotonic()
            if self._away_since is None:
                log.warning("the job's store can't be reached for the tuner's messages, trying again: %s", error)
                self._away_since = now
            if now - self._away_since > AWAY_S:
                raise ChannelLost(f"the job's store has been away for {AWAY_S:.0f} s: {error}") from error


class KvLeader:
    """The leader's end over the key-value store. What is sent while the store is away is lost, as an answer may be."""

    def __init__(self, store: Store, processes: int):
        self._store = store
        self._next = [0] * processes
        self._quiet_since = time.monotonic()
        self._tolerant = _Tolerance()

    def send(self, process: int, message: Message, payload: bytes = b"") -> None:
        with self._tolerant():
            self._store.set_bytes(f"{_KEYS}/down/{process}/{self._next[process]}", pack(message, payload))
            self._next[process] += 1

    def receive(self, timeout: float, wake: Sequence[int] = ()) -> list[tuple[int, Message, bytes]]:
        deadline = time.monotonic() + timeout
        while True:
            out: list[tuple[int, Message, bytes]] = []
            with self._tolerant():
                for key, frame in sorted(self._store.list_bytes(f"{_KEYS}/up/")):
                    self._store.delete(key)
                    with contextlib.suppress(ValueError):
                        out.append((int(key.split("/")[-2]), *unpack(frame)))
            now = time.monotonic()
            if out:
                self._quiet_since = now
            if out or now >= deadline or readable(wake, 0):
                return out
            pause = _POLL_BUSY_S if now - self._quiet_since < 0.5 else _POLL_IDLE_S
            time.sleep(min(pause, deadline - now))

    def close(self) -> None:
        pass


class KvWorker:
    """A worker's end over the key-value store, which keeps what the leader doesn't read: so little is left there.

    While the store is away nothing goes or comes; `receive` raises ChannelLost when that has lasted.
    """

    def __init__(self, store: Store, me: int):
        self._store, self._me = store, me
        self._sent = self._read = 0
        self._unread: list[str] = []
        self._lock = threading.Lock()
        self._tolerant = _Tolerance()

    def send(self, message: Message, payload: bytes = b"") -> bool:
        return self.push(message, payload)

    def push(self, message: Message, payload: bytes = b"") -> bool:
        frame = pack(message, payload)
        with self._lock, contextlib.suppress(Exception):  # a store that is away: `receive` says so
            if not self._room():
                return False
            key = f"{_KEYS}/up/{self._me}/{self._sent:012d}"
            self._store.set_bytes(key, frame)
            self._sent += 1
            self._unread.append(key)
            return True
        return False

    def _room(self) -> bool:
        """The leader reads in order and removes what it has read, so one look now and then tells."""
        if len(self._unread) >= _UNREAD and self._store.get_bytes(self._unread[_UNREAD // 2], 0) is None:
            del self._unread[: _UNREAD // 2 + 1]
        return len(self._unread) < _UNREAD

    def receive(self, timeout: float) -> list[tuple[Message, bytes]]:
        key, frame, began = f"{_KEYS}/down/{self._me}/{self._read}", None, time.monotonic()
        with self._tolerant():
            frame = self._store.get_bytes(key, timeout)
            if frame is not None:
                self._store.delete(key)
        if frame is None:
            time.sleep(max(0.0, timeout - (time.monotonic() - began)))  # where it was away
            return []
        self._read += 1
        try:
            return [unpack(frame)]
        except ValueError:
            return []

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------------------ ZeroMQ


def has_zmq() -> bool:
    """Whether pyzmq with encryption is installed."""
    return importlib.util.find_spec("zmq") is not None and bool(importlib.import_module("zmq").has("curve"))


def _beats(zmq: Any) -> tuple[tuple[int, int], ...]:
    """Options of both ends: a connection that is cut is noticed, though nothing is sent over it."""
    return ((zmq.HEARTBEAT_IVL, 5000), (zmq.HEARTBEAT_TIMEOUT, 15000))


class ZmqLeader:
    """The leader's end over ZeroMQ (CURVE). Only who holds this job's key, which lies in the store, gets in."""

    def __init__(self, store: Store, address: str):
        zmq = self._zmq = importlib.import_module("zmq")
        auth = importlib.import_module("zmq.auth.thread")
        self._context = zmq.Context()
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        self._auth = auth.ThreadAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback("*", credentials_provider=_OneKey(client_public))
        self._socket = self._context.socket(zmq.ROUTER)
        # After a cut a worker comes again while its old connection still seems to live: the new one takes its place.
        options = ((zmq.CURVE_SERVER, 1), (zmq.ROUTER_HANDOVER, 1), (zmq.RCVHWM, _HIGH_WATER))
        for option, value in (*options, *_beats(zmq), (zmq.LINGER, 0), (zmq.SNDHWM, _HIGH_WATER)):
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, server_secret)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{address}")
        except BaseException:
            self.close()
            raise
        keys = {"server": server_public, "public": client_public, "secret": client_secret}
        found = {"endpoint": f"tcp://{address}:{port}", **{k: v.decode() for k, v in keys.items()}}
        store.set(f"{_KEYS}/endpoint", json.dumps(found))

    def send(self, process: int, message: Message, payload: bytes = b"") -> None:
        with contextlib.suppress(self._zmq.ZMQError):  # a full queue: the worker hasn't read for long
            self._socket.send_multipart([str(process).encode(), pack(message, payload)], self._zmq.NOBLOCK)

    def receive(self, timeout: float, wake: Sequence[int] = ()) -> list[tuple[int, Message, bytes]]:
        out: list[tuple[int, Message, bytes]] = []
        poller = self._zmq.Poller()
        for source in (self._socket, *wake):
            poller.register(source, self._zmq.POLLIN)
        if not poller.poll(max(0, int(timeout * 1000))):
            return out
        with contextlib.suppress(self._zmq.Again):
            while len(out) < _HIGH_WATER:
                who, frame = self._socket.recv_multipart(self._zmq.NOBLOCK)
                with contextlib.suppress(ValueError):
                    out.append((int(who.removeprefix(b"r")), *unpack(frame)))
        return out

    def close(self) -> None:
        self._socket.close(0)
        self._auth.stop()
        self._context.term()


class _OneKey:
    """The authenticator's question: is this the job's key?"""

    def __init__(self, public: bytes):
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._public)


class ZmqWorker:
    """A worker's end over ZeroMQ: one socket for answers, one for what another thread pushes."""

    def __init__(self, store: Store, me: int, timeout: float):
        zmq = self._zmq = importlib.import_module("zmq")
        found = json.loads(store.get(f"{_KEYS}/endpoint", timeout))
        self._context = zmq.Context()
        self._keys = (found["server"].encode(), found["public"].encode(), found["secret"].encode())
        self._socket = self._connect(found["endpoint"], str(me).encode())
        self._pushes = self._connect(found["endpoint"], b"r" + str(me).encode())

    def _connect(self, endpoint: str, identity: bytes) -> Any:
        zmq = self._zmq
        s = self._context.socket(zmq.DEALER)
        server, public, secret = self._keys
        options = ((zmq.CURVE_SERVERKEY, server), (zmq.CURVE_PUBLICKEY, public), (zmq.CURVE_SECRETKEY, secret))
        more = ((zmq.RECONNECT_IVL_MAX, 2000), (zmq.IDENTITY, identity), (zmq.LINGER, 0), (zmq.SNDHWM, _HIGH_WATER))
        for option, value in (*options, *_beats(zmq), *more):
            s.setsockopt(option, value)
        s.connect(endpoint)
        return s

    def send(self, message: Message, payload: bytes = b"") -> bool:
        return self._send(self._socket, message, payload)

    def push(self, message: Message, payload: bytes = b"") -> bool:
        return self._send(self._pushes, message, payload)

    def _send(self, s: Any, message: Message, payload: bytes) -> bool:
        try:
            s.send(pack(message, payload), self._zmq.NOBLOCK)
        except self._zmq.Again:
            return False
        return True

    def receive(self, timeout: float) -> list[tuple[Message, bytes]]:
        out: list[tuple[Message, bytes]] = []
        if not self._socket.poll(max(0, int(timeout * 1000))):
            return out
        with contextlib.suppress(self._zmq.Again):
            while True:
                frame = self._socket.recv(self._zmq.NOBLOCK)
                with contextlib.suppress(ValueError):
                    out.append(unpack(frame))
        return out

    def close(self) -> None:
        self._socket.close(0)
        self._pushes.close(0)
        self._context.term()


# ---------------------------------------------------------------------------------------------------------- choosing


def open_channel(
    store: Store | None,
    me: int,
    processes: int,
    interface: str,
    coordinator: str | None,
    timeout: float,
    setting: str = "JAXCOLL_SOCKET_IFNAME",
) -> tuple[LeaderEnd | None, WorkerEnd, str]:
    """(the leader's end in process 0, this process's worker end, the carrier's name).

    `interface`: the value of `setting`. All processes must come here; process 0 says in the store which carrier it is.
    """
    if processes == 1 or store is None:
        local = Local()
        return LocalLeader(local), local, "local"
    sockets: ZmqLeader | None = None
    if me == 0:
        sockets = _sockets(store, links.local_address(interface, coordinator, setting)) if has_zmq() else None
        store.set(f"{_KEYS}/wants-zmq", "1" if sockets is not None else "0")
    leads = store.get(f"{_KEYS}/wants-zmq", timeout) == "1"
    # One process without pyzmq is enough: then all use the store.
    store.set(f"{_KEYS}/zmq/{me}", "1" if leads and has_zmq() else "0")
    carrier = "zmq" if all(store.get(f"{_KEYS}/zmq/{p}", timeout) == "1" for p in range(processes)) else "store"
    if me != 0:
        worker = ZmqWorker(store, me, timeout) if carrier == "zmq" else KvWorker(store, me)
        return None, worker, carrier
    local = Local()
    if carrier == "zmq" and sockets is not None:
        return JoinedLeader(local, sockets), local, carrier
    if sockets is not None:
        sockets.close()
    return JoinedLeader(local, KvLeader(store, processes)), local, carrier


def _sockets(store: Store, address: str) -> ZmqLeader | None:
    """None where no socket can be opened there: the store will do."""
    try:
        return ZmqLeader(store, address)
    except Exception as error:  # pyzmq's own errors are no OSError
        log.warning("the tuner's control channel can't be opened on %s (%s): JAX's store carries it", address, error)
        return None
