"""Strangers at the listener: none gets in, none keeps the peers out."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time

import pytest

from jaxcoll.errors import CollectiveError
from jaxcoll.runtime.links import MAGIC, Listener, connect

from .harness import Cluster

pytestmark = pytest.mark.timeout(60)

SECRET = b"s" * 32


@pytest.fixture
def listener():
    made = Listener("127.0.0.1", SECRET, 0)
    yield made
    made.close()


def joins(listener: Listener, secret: bytes = SECRET) -> None:
    """Process 1 connects, and is there."""
    deadline = time.monotonic() + 5
    connect("127.0.0.1", listener.port, secret, 1, 0, 0, "127.0.0.1", deadline).close()
    listener.wait({(1, 0)}, deadline)


def test_strangers_do_not_keep_peers_out(listener: Listener):
    hello = struct.pack("<8sII16s", MAGIC, 1, 0, b"n" * 16)
    strangers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(20)]
    for s, data in zip(
        strangers, (b"", b"GET / HTTP/1.1\r\n\r\n" * 3, hello, hello[:20], hello + b"m" * 32), strict=False
    ):
        s.sendall(data)
    with pytest.raises(CollectiveError, match="it doesn't know the secret"):
        joins(listener, b"x" * 32)
    joins(listener)
    assert list(listener.accepted) == [(1, 0)]
    for s in strangers:
        s.close()


@pytest.mark.parametrize(("timeout", "interval"), [(1.0, 5), (300.0, 72)])
def test_connections_ask_after_hosts_of_which_nothing_is_heard(timeout: float, interval: int):
    """Lost after 30 s, or after as long as a collective would wait."""
    with Cluster("tcp", 2, loopback=True, timeout=timeout) as cluster:
        for s in [*cluster.sockets[0, 1], *cluster.sockets[1, 0]]:
            assert s.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            assert [s.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [10, interval, 4]
            # It would end a connection to a process that is stopped, although its host answers.
            assert s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_out_of_file_descriptors_for_a_moment(listener: Listener):
    client, held = socket.socket(), list[int]()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 256), limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(client.fileno()))
        client.connect(("127.0.0.1", listener.port))
        time.sleep(0.2)
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        client.close()
    joins(listener)
