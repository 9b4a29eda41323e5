"""How the benchmark drives its ranks: one TCP connection a process on loopback, one JSON object a line.

A rank that waits for its next command sleeps in the kernel, so a group of ranks that is not being timed costs the
others nothing; MPI's own ranks would poll.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from jaxcoll.errors import JaxcollError

ENV = "JAXCOLL_LAUNCH_CONTROL"
_ACCEPT_SECONDS = 180.0
_HELLO_SECONDS, _HELLO_BYTES = 10.0, 4096

Message = dict[str, Any]


class Channel:
    """One end of a connection that carries JSON objects."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._file = connection.makefile("rwb")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one object."""
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def receive(self, timeout: float | None = None, limit: int = -1) -> Message:
        """The next object. Raises `EOFError` when the other end has gone or sends more than `limit` bytes,
        `TimeoutError` after `timeout` seconds."""
        self._socket.settimeout(timeout)
        line = self._file.readline(limit)
        if not line.endswith(b"\n"):
            raise EOFError("the other end closed the connection")
        return json.loads(line)

    def fileno(self) -> int:
        """The socket's descriptor, for `selectors`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


class Listener:
    """The driver's side: hands out the address with a secret (by environment) and accepts the ranks that know it."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._token = secrets.token_hex(16)

    @property
    def env(self) -> dict[str, str]:
        """What a rank's process needs in its environment."""
        return {ENV: f"{self._socket.getsockname()[1]}:{self._token}"}

    def accept(self, count: int, alive: Callable[[], None]) -> list[Channel]:
        """The channels of `count` ranks, in rank order. `alive` is called about once a second and may raise."""
        channels: dict[int, Channel] = {}
        deadline = time.monotonic() + _ACCEPT_SECONDS
        while len(channels) < count:
            self._socket.settimeout(1.0)
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                alive()
                connection = None
            if time.monotonic() > deadline:
                missing = sorted(set(range(count)) - set(channels))
                raise JaxcollError(f"Ranks {missing} did not start within {_ACCEPT_SECONDS:g} s.") from None
            if connection is None:
                continue
            channel = Channel(connection)
            rank = self._known(channel)
            if rank is None:
                channel.close()  # a stranger
            else:
                channels[rank] = channel
        return [channels[rank] for rank in range(count)]

    def _known(self, channel: Channel) -> int | None:
        """The rank at the other end, if it knows the secret."""
        try:
            hello = channel.receive(_HELLO_SECONDS, _HELLO_BYTES)
            return int(hello["rank"]) if hmac.compare_digest(str(hello["token"]), self._token) else None
        except (EOFError, OSError, ValueError, TypeError, KeyError):
            return None

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


def time_calls(call: Callable[[], object], settle: int, iters: int) -> list[float]:
    """Seconds of each of `iters` calls that follow `settle` calls."""
    seconds: list[float] = []
    for _ in range(settle + iters):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds[settle:]


def serve(rank: int, commands: Mapping[str, Callable[..., Message]]) -> None:
    """A rank's side: connects to the driver whose address is in the environment, and obeys it."""
    port, _, token = os.environ[ENV].partition(":")
    channel = Channel(socket.create_connection(("127.0.0.1", int(port))))
    channel.send({"rank": rank, "token": token})
    obey(channel, commands)


def obey(channel: Channel, commands: Mapping[str, Callable[..., Message]]) -> None:
    """Runs the driver's commands ({"do": name, ...arguments}) and answers each until it says quit or goes.

    An exception becomes the answer {"error": text}; the rank stays, so that the driver hears of every rank's error.
    """
    while True:
        try:
            message = channel.receive()
        except EOFError:
            return
        name = message.pop("do")
        if name == "quit":
            return
        try:
            answer = commands[name](**message)
        except MemoryError:
            answer = {"error": "there is not enough memory for this size; name smaller --sizes, or fewer --ranks"}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.send(answer)
