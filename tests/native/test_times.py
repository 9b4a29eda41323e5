"""What an edge's record says of its time: what the way took, whoever reads late, or nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxcoll.schedule import Kind, build
from jaxcoll.telemetry import Record

from .harness import Cluster
from .test_frames import DATA, READY, Header, Peer, exactly

pytestmark = pytest.mark.timeout(60)

PIECE, PIECES = 16_384, 8
TOTAL = PIECE * PIECES
STEP = 0.02  # seconds from one piece to the next: far more than the machine needs to hand one on


class Sender:
    """Process 0 of two, played by the test: broadcasts to rank 1, whose process reads when it is told to."""

    def __init__(self, cluster: Cluster):
        self.cluster, self.world = cluster, cluster.worlds[1]
        key = cluster.define([build("binomial", Kind.BROADCAST, 2, root=0)])
        self.op = cluster.start(1, Kind.BROADCAST, np.zeros(TOTAL // 4, np.float32), key, launch=1, reduce="none")
        self.sockets = cluster.sockets[0, 1]
        ready = Header.receive(self.sockets[0])
        assert (ready.type, ready.src, ready.dst) == (READY, 1, 0)
        self.known = dataclasses.replace(ready, type=DATA, src=0, dst=1, total=TOTAL)
        time.sleep(2 * STEP)  # the rank waits: an edge's time is bounded by how long its rank has been there

    def frame(self, first: int, count: int, follows: int) -> bytes:
        """A message with `count` pieces of the transfer."""
        return self.known.pack(b"\1" * (PIECE * count), offset=PIECE * first, follows=follows)

    def send(self, data: bytes, connection: int = 0) -> float:
        """Returns the time at which all of it has gone."""
        self.sockets[connection].sendall(data)
        return time.monotonic()

    def read(self) -> None:
        while self.cluster.native.lib.jc_world_pump(self.world):
            pass

    def record(self) -> Record:
        """The record of the edge, once all has been sent and read."""
        deadline = time.monotonic() + 10
        while not self.op.wait(0) and time.monotonic() < deadline:
            self.read()
        [found] = self.cluster.drain(1)
        assert (found.src, found.dst, found.bytes) == (0, 1, TOTAL)
        return found


@contextlib.contextmanager
def sender(loopback: bool = False, connections: int = 1) -> Iterator[Sender]:
    options = {"record": True, "threads": False, "connections": connections, "loopback": loopback}
    with Cluster("tcp", 2, timeout=20, mismatch=10, only=1, **options) as cluster:
        yield Sender(cluster)


kernels = pytest.mark.parametrize("loopback", [False, True], ids=["unix", "tcp"])


@kernels
def test_what_lay_in_the_socket_is_not_timed(loopback: bool):
    with sender(loopback) as s:
        s.send(s.frame(0, PIECES, follows=0))
        time.sleep(0.1)
        found = s.record()
        if loopback:  # the kernel knows when its last parts came, if it took them one by one
            assert found.transfer_ns < 0.02e9
        else:
            assert found.transfer_ns == 0
            assert np.isnan(found.throughput)
        assert found.wait_ns + found.transfer_ns > 0.09e9, "the edge ends when its last byte is there all the same"


def test_one_piece_is_not_timed():
    """However early the reader is."""
    with sender(loopback=True) as s:
        for i in range(PIECES):
            s.send(s.frame(i, 1, follows=0))
            s.read()
            time.sleep(0.002)
        assert s.record().transfer_ns == 0


@kernels
def test_a_slow_sender_is_timed(loopback: bool):
    with sender(loopback) as s:
        data = s.frame(0, PIECES, follows=0)
        first = s.send(data[: len(data) - 7 * PIECE])
        for left in range(7, 0, -1):
            s.read()
            time.sleep(STEP)
            last = s.send(data[len(data) - left * PIECE :][:PIECE])
        took = (last - first) * PIECES / (PIECES - 1)  # the first piece may have set out at any time
        assert s.record().transfer_ns / 1e9 == pytest.approx(took, rel=0.1)


def test_a_late_reader_of_a_slow_sender():
    with sender(loopback=True) as s:
        data = s.frame(0, PIECES, follows=0)
        first = s.send(data[: len(data) - 7 * PIECE])
        s.read()
        for left in range(7, 0, -1):
            time.sleep(STEP)
            last = s.send(data[len(data) - left * PIECE :][:PIECE])
        time.sleep(0.5)
        found = s.record()
        assert found.transfer_ns / 1e9 == pytest.approx((last - first) * PIECES / (PIECES - 1), rel=0.1)
        assert (found.wait_ns + found.transfer_ns) / 1e9 > last - first + 0.45


@pytest.mark.parametrize("connections", [1, 2])
def test_pieces_one_behind_the_other_are_timed_by_those_before(connections: int):
    """Each comes whole. The sender says whether it had others under way when it sent one, on whichever connection."""
    with sender(loopback=True, connections=connections) as s:
        first = s.send(s.frame(0, 1, follows=0))
        s.read()
        for i in range(1, PIECES):
            time.sleep(STEP)
            last = s.send(s.frame(i, 1, follows=1), i % connections)
            s.read()
        took = (last - first) * PIECES / (PIECES - 1)
        assert s.record().transfer_ns / 1e9 == pytest.approx(took, rel=0.1)


def test_the_sender_says_what_follows_what():
    with Cluster("tcp", 2, timeout=20, mismatch=10, only=0, connections=1) as cluster:
        key = cluster.define([build("ring", Kind.ALL_REDUCE, 2)])
        value = np.ones(1 << 20, np.float32)
        peer = Peer(cluster, cluster.start(0, Kind.ALL_REDUCE, value, key, launch=1))
        peer.sockets[0].setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while peer.sockets[0].recv(4096):  # the rest of what it has said so far: nothing is under way
                pass
        for transfer in range(4):  # one of them is rank 0's first to send
            peer.send(peer.known.pack(type=READY, transfer=transfer))
        time.sleep(0.1)
        follows: list[int] = []
        got, total = 0, 1
        while got < total:
            header = Header.receive(peer.sockets[0])
            exactly(peer.sockets[0], header.payload)
            if header.type == DATA:
                follows.append(header.follows)
                got, total = got + header.payload, header.total
        assert len(follows) > 1
        assert follows == [0] + [1] * (len(follows) - 1), "it all waited for the peer to read"


def test_what_is_read_in_place_beside_a_value_that_is_fetched():
    """One pass reduces both: a local rank's value takes its share of that pass, not the nanosecond that is no time."""
    schedule, count = build("direct", Kind.ALL_REDUCE, 4), 1 << 20
    with Cluster("mixed", 8, record=True) as cluster:  # ranks 0 and 1 in one process, 2 and 3 in another of that host
        key, devices = cluster.define([schedule], range(4)), range(4)
        value = np.ones(count, np.float32)
        cluster.finish([cluster.start(r, schedule.kind, value, key, launch=1, devices=devices) for r in devices])
        records = [r for world in (0, 1) for r in cluster.drain(world) if r.step == 0]
    assert len(records) == 12
    for r in records:
        assert r.bytes == count
        assert r.bytes / r.transfer_ns < 500, r  # bytes a nanosecond; no memory does that
