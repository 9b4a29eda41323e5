"""What a peer puts into the shared memory: what makes no sense ends the operation at once, not at its deadline."""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import pytest

from jaxcoll.schedule import Kind, build

from .harness import Cluster, Op
from .test_frames import DATA as DATA_FRAME
from .test_frames import EAGER, MAGIC, OFFER, POSTED, Header

pytestmark = pytest.mark.timeout(60)

# ffi/src/transport/shm_layout.h
WITHDRAWALS, RINGS, RING, DATA, RING_BYTES = 192, 192 + (8 << 10), 192 + (512 << 10), 192, 512 << 10
SLAB = 2 << 20
MESSAGE = 1
_RECORD = struct.Struct("<IIQ")
_FORM = struct.Struct("<IIBBHHHQQqI4xI4xQQQ")


class Peer:
    """Process 1 of two, played by the test, and an operation of rank 0 in process 0."""

    def __init__(self, cluster: Cluster, op: Op):
        self.op = op
        self.theirs, self.mine = (mmap.mmap(fd, 0) for fd in cluster.segments)
        ring = RINGS + 0 * RING  # from process 0
        (head,) = struct.unpack_from("<Q", self.mine, ring)
        assert head > 0, "rank 0 has said nothing"
        header = Header(*_FORM.unpack_from(self.mine, ring + DATA + _RECORD.size))
        assert header.magic == MAGIC
        # Of the two transfers, 0->1 and 1->0, the other one.
        self.known = Header(**{**vars(header), "src": 1, "dst": 0, "transfer": 1 - header.transfer})

    def write(self, frame: bytes) -> None:
        """One record in the ring to process 0."""
        ring = RINGS + 1 * RING
        (head,) = struct.unpack_from("<Q", self.theirs, ring)
        size = (_RECORD.size + len(frame) + 15) // 16 * 16
        at = ring + DATA + head % RING_BYTES
        self.theirs[at : at + size] = (_RECORD.pack(size, MESSAGE, 0) + frame).ljust(size, b"\0")
        struct.pack_into("<Q", self.theirs, ring, head + size)


@contextmanager
def peer(count: int) -> Generator[Peer, None, None]:
    with Cluster("shm", 2, timeout=30, mismatch=10, only=0, keep_segments=True) as cluster:
        key = cluster.define([build("one_shot", Kind.ALL_REDUCE, 2)])
        yield Peer(cluster, cluster.start(0, Kind.ALL_REDUCE, np.ones(count, np.float32), key, launch=1))


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (POSTED, struct.pack("<QQ", SLAB, 4096)),
        (POSTED, struct.pack("<QQ", 2**64 - 64, 4096)),
        (POSTED, struct.pack("<QQ", 100, 4096)),
        (POSTED, struct.pack("<QQ", 64, 2**63)),
        (POSTED, struct.pack("<QQ", 64, 400)),
        (POSTED, b"abc"),
        (OFFER, struct.pack("<QQ", 4096, 8)),
        (OFFER, b""),
        (EAGER, b"x" * 40),
        (DATA_FRAME, b"x" * 4096),
    ],
    ids=[
        "behind", "around", "unaligned", "huge", "short", "no block", "short offer", "no offer", "short message",
        "no such stream",
    ],
)  # fmt: skip
def test_what_does_not_belong_ends_the_operation(kind: int, payload: bytes):
    with peer(1024) as p:
        p.write(p.known.pack(payload, type=kind))
        error = p.op.error(2)
        assert "rank 1 sent something that doesn't belong here" in error, error
        assert "all_reduce sum f32[1024] (call 1 of its program) of rank 0" in error
        assert (p.op.outputs[0].view(np.uint8) == 0xA5).all()


def test_an_offer_of_memory_that_is_not_there():
    with peer(100_000) as p:  # one lane, and too large for the slab
        p.write(p.known.pack(struct.pack("<QQ", 4096, 400_000), type=OFFER))
        error = p.op.error(2)
        assert "rank 1 can't be read in place" in error, error
        assert "edge 1->0 of graph 0" in error


@pytest.mark.parametrize("count", [0, 1, 1023])
def test_what_is_read_after_its_sender_has_failed_is_no_result(count: int):
    # The memory is still there, and holds anything; a sender that has failed too often since then may have failed here.
    value = np.full(100_000, 9, np.float32)
    with peer(value.size) as p:
        struct.pack_into("<Q", p.mine, WITHDRAWALS, count)
        p.write(p.known.pack(struct.pack("<QQ", value.ctypes.data, value.nbytes), type=OFFER))
        error = p.op.error(2) if count == 1023 else ""
        assert ("rank 1 has given up this operation at" in error) == (count == 1023), error
        if not error:
            until = time.monotonic() + 5
            while (p.op.outputs[0] != 10).any():
                assert time.monotonic() < until
                time.sleep(0.01)


def test_damaged_messages_take_the_link_down():
    with peer(1024) as p:
        p.write(p.known.pack(b"", type=EAGER, magic=7))
        assert "rank 1 is lost (its messages are damaged)" in p.op.error(2)


def _head_of(cluster: Cluster, place: int) -> int:
    """How far process 0 has written into its ring to the process at `place`."""
    with mmap.mmap(cluster.segments[place], 0) as segment:
        return struct.unpack_from("<Q", segment, RINGS)[0]


def _kinds(cluster: Cluster, place: int, since: int) -> list[int]:
    """The types of what process 0 has put into its ring to the process at `place` from position `since` on."""
    kinds: list[int] = []
    with mmap.mmap(cluster.segments[place], 0) as segment:
        while since < struct.unpack_from("<Q", segment, RINGS)[0]:
            at = RINGS + DATA + since % RING_BYTES
            kinds.append(Header(*_FORM.unpack_from(segment, at + _RECORD.size)).type)
            since += _RECORD.unpack_from(segment, at)[0]
    return kinds


def test_a_lost_process_leaves_the_slab_to_the_others():
    # Process 2 dies with all of process 0's slab still to be read; then values for process 1 have room in it again.
    with Cluster("shm", 3, timeout=30, mismatch=10, only=0, keep_segments=True) as cluster:
        keys = {peer: cluster.define([build("binomial", Kind.BROADCAST, 2, root=0)], [0, peer]) for peer in (1, 2)}

        def post(peer: int) -> tuple[list[int], Op]:
            since, value = _head_of(cluster, peer), np.ones(50_000, np.float32)
            launch = cluster.new_launch()
            op = cluster.start(0, Kind.BROADCAST, value, keys[peer], launch=launch, devices=[0, peer])
            return _kinds(cluster, peer, since), op

        while post(2)[0] == [POSTED]:
            pass
        assert post(1)[0] == [OFFER]
        _, waits = post(2)
        cluster.kill(2)
        assert "rank 1 is lost" in waits.error(2)
        assert post(1)[0] == [POSTED]
