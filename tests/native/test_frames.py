"""What a connection brings is checked: damage takes the link down with its reason, what nobody asked for is dropped."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import struct
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxcoll.runtime.native import NativeError
from jaxcoll.schedule import Kind, build

from .harness import Array, Cluster, Op

pytestmark = pytest.mark.timeout(60)

MAGIC = 0x314C434A
COUNT, TOTAL = 51_200, 102_400  # elements of the operand; bytes of one of its two chunks
OFFER, EAGER, READY, DATA, ACK, ABORT, GOODBYE, POSTED, WAITING = range(1, 10)
_FORM = struct.Struct("<IIBBHHHQQqI4xI4xQQQ")
assert _FORM.size == 80


@dataclasses.dataclass
class Header:
    """transport/link.h, field by field."""

    magic: int = MAGIC
    payload: int = 0
    type: int = READY
    follows: int = 0
    src: int = 1
    dst: int = 0
    lane: int = 0
    comm: int = 0
    site: int = 0
    launch: int = 0
    index: int = 0
    transfer: int = 0
    signature: int = 0
    offset: int = 0
    total: int = 0

    def pack(self, body: bytes = b"", /, **changes: int) -> bytes:
        changes = {"payload": len(body), **changes}
        return _FORM.pack(*dataclasses.astuple(dataclasses.replace(self, **changes))) + body

    @staticmethod
    def receive(connection: socket.socket) -> Header:
        """The next one; what follows it is left there."""
        return Header(*_FORM.unpack(exactly(connection, _FORM.size)))


def exactly(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes."""
    connection.settimeout(10)
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the connection has ended"
        data += part
    return data


class Peer:
    """Process 1 of two, played by the test: the other ends of process 0's connections, and an operation of rank 0."""

    def __init__(self, cluster: Cluster, op: Op):
        self.cluster, self.op = cluster, op
        self.sockets = [socket.socket(fileno=s.detach()) for s in cluster.sockets[1, 0]]
        self.known = self._receive()

    def _receive(self) -> Header:
        """The first message of rank 0: a READY that names the operation."""
        header = Header.receive(self.sockets[0])
        assert (header.magic, header.type, header.src, header.dst) == (MAGIC, READY, 0, 1)
        return dataclasses.replace(header, src=1, dst=0)

    def send(self, data: bytes, connection: int = 0) -> None:
        self.sockets[connection].settimeout(10)
        self.sockets[connection].sendall(data)

    def still_open(self) -> None:
        """Nothing sent so far has ended the operation or touched its result; an abort, read after it, does end it."""
        assert not self.op.wait(0.05)
        assert (self.op.outputs[0].view(np.uint8) == 0xA5).all()
        self.send(self.known.pack(b"enough", type=ABORT))
        assert self.op.error(5) == "enough"
        assert (self.op.outputs[0].base == 0xA5).all()


@contextlib.contextmanager
def peer() -> Iterator[Peer]:
    with Cluster("tcp", 2, timeout=20, mismatch=10, only=0) as cluster:
        key = cluster.define([build("ring", Kind.ALL_REDUCE, 2)])
        op = cluster.start(0, Kind.ALL_REDUCE, np.ones(COUNT, np.float32), key, launch=1)
        yield Peer(cluster, op)


@pytest.mark.parametrize("connection", [0, 1])
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GET / HTTP/1.1\r\n" + b"x" * 100, "it sent bytes that are no jaxcoll message"),
        (Header().pack(payload=(1 << 20) + 1), "it sent a message that is too long"),
        (Header(type=DATA).pack(payload=2**32 - 1), "it sent a message that is too long"),
    ],
    ids=["no message", "long", "endless"],
)
def test_damage_takes_the_link_down(data: bytes, why: str, connection: int):
    with peer() as p:
        p.send(data, connection)
        error = p.op.error(2)
        assert f"rank 1 is lost ({why})" in error, error
        assert "edge 1->0" in error


@pytest.mark.parametrize("data", [Header().pack()[:50], Header(type=EAGER).pack(b"abc", payload=10)])
def test_an_end_in_the_middle(data: bytes):
    with peer() as p:
        p.send(data)
        for s in p.sockets:
            s.shutdown(socket.SHUT_WR)
        assert "in the middle of a message" in p.op.error(2)


def test_an_end_in_the_middle_of_a_transfer():
    with peer() as p:
        p.send(p.known.pack(b"x" * 1000, type=DATA, payload=TOTAL, total=TOTAL))
        time.sleep(0.05)
        for s in p.sockets:
            s.shutdown(socket.SHUT_RDWR)
        assert "in the middle of a message" in p.op.error(2)


@pytest.mark.parametrize("kind", [0, 10, 11, 77, 255])
def test_unknown_messages_are_dropped(kind: int):
    with peer() as p:
        p.send(p.known.pack(b"what", type=kind) * 3)
        p.send(p.known.pack(b"what", type=kind, launch=9) * 3)
        p.still_open()


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer": 1000}, {"transfer": 2**32 - 1}, {"lane": 9}, {"lane": 65535}, {"src": 0}, {"src": 9}, {"dst": 1},
        {"offset": TOTAL - 1}, {"offset": 2**64 - 4}, {"total": 7}, {"total": 2**63}, {"launch": 2}, {"index": 5},
        {"comm": 1}, {"site": 99},
    ],
    ids=str,
)  # fmt: skip
def test_data_that_nobody_asked_for(changes: dict[str, int]):
    with peer() as p:
        for connection in (0, 1):
            p.send(p.known.pack(b"\0" * 512, **{"type": DATA, "total": TOTAL, **changes}), connection)
        p.still_open()


def test_data_twice():
    # The same part again on another connection: refused, or the transfer would seem complete while bytes still land.
    with peer() as p:
        part = p.known.pack(b"\0" * 60_000, type=DATA, total=TOTAL)
        for connection in (0, 1):
            p.send(part, connection)
        p.still_open()


@pytest.mark.parametrize("kind", [OFFER, EAGER, READY, ACK, POSTED, WAITING])
def test_forged_messages(kind: int):
    with peer() as p:
        address = struct.pack("<QQ", 8, TOTAL)
        for payload in (b"", b"x", address, address * 3, b"\xff" * 64):
            for changes in ({}, {"transfer": 2**32 - 1}, {"lane": 65535}, {"src": 7}, {"src": 0}, {"launch": 50}):
                p.send(p.known.pack(payload, type=kind, **changes))
        p.still_open()


@pytest.mark.parametrize("pieces", [1, 60])
def test_what_is_under_way_when_an_operation_fails_ends_with_its_own_bytes(pieces: int):
    # The peer may need nothing else, and be done with the value before it reads why the operation has failed elsewhere.
    with Cluster("tcp", 3, timeout=20, mismatch=0.3, only=0, connections=1) as cluster:
        connection = socket.socket(fileno=cluster.sockets[1, 0][0].detach())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        key = cluster.define([build("direct", Kind.BROADCAST, 3, root=0)])
        value: Array = np.arange(60_000, dtype=np.int32)  # one lane, one fragment
        op = cluster.start(0, Kind.BROADCAST, value, key, launch=1, leaves=[value.size // pieces] * pieces)
        known = Header.receive(connection)
        assert known.type == WAITING
        connection.sendall(dataclasses.replace(known, src=1, dst=0, transfer=0).pack(type=READY))
        time.sleep(0.2)
        cluster.kill(2)
        assert "rank 2 is lost" in op.error(5)
        for leaf in op.inputs:
            leaf[:] = -1
        while (header := Header.receive(connection)).type == WAITING:
            pass
        assert (header.type, header.payload) == (DATA, value.nbytes)
        assert np.array_equal(np.frombuffer(exactly(connection, header.payload), np.int32), op.kept[0])
        while (header := Header.receive(connection)).type == WAITING:
            pass
        assert header.type == ABORT


def test_messages_go_before_the_transfers_that_wait():
    # All lanes of a large transfer are asked for; what rank 0 says afterwards comes behind what is under way already.
    with Cluster("tcp", 2, timeout=20, mismatch=0.3, only=0, connections=1) as cluster:
        connection = socket.socket(fileno=cluster.sockets[1, 0][0].detach())
        key = cluster.define([build("direct", Kind.BROADCAST, 2, root=0)])
        large = cluster.start(0, Kind.BROADCAST, np.ones(1 << 20, np.float32), key, launch=1)
        known = dataclasses.replace(Header.receive(connection), src=1, dst=0, transfer=0)
        for lane in range(8):
            connection.sendall(known.pack(type=READY, lane=lane))
        time.sleep(0.3)
        assert cluster.start(0, Kind.BROADCAST, np.ones(9, np.float32), key, launch=2).error(5) == ""
        came: list[int] = []
        while came.count(DATA) < 16:
            header = Header.receive(connection)
            exactly(connection, header.payload)
            came.append(header.type)
        assert large.error(5) == ""
        assert EAGER in came[:6], came  # some fragments have gone before, as many as the socket takes


@pytest.mark.parametrize("seed", range(6))
def test_random_frames(seed: int):
    rng = random.Random(seed)
    with peer() as p:
        fields = ("type", "src", "dst", "lane", "transfer", "offset", "total", "launch", "index", "signature")
        sizes = {"type": 1, "src": 2, "dst": 2, "lane": 2, "transfer": 4, "index": 4}
        for _ in range(300):
            changes = {"type": rng.randrange(1, 10), "total": TOTAL}
            for name in rng.sample(fields, rng.randrange(0, 4)):
                top = 2 ** (8 * sizes.get(name, 7))
                changes[name] = rng.choice((0, 1, 2, rng.randrange(top), top - 1))
            payload = rng.randbytes(rng.choice((0, 1, 16, 100, 4000)))
            with contextlib.suppress(OSError):  # an abort or a goodbye may have ended it
                p.send(p.known.pack(payload, **changes), rng.randrange(2))
        with contextlib.suppress(OSError):
            p.send(p.known.pack(b"enough", type=ABORT))
        with contextlib.suppress(NativeError):
            p.op.wait(5)
        assert (p.op.outputs[0].base[-64:] == 0xA5).all()
