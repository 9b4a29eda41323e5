"""The binary form: its layout byte for byte, its round trip, and damaged input."""

from __future__ import annotations

import random
import struct
import zlib
from dataclasses import replace

import pytest

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule import ChunkGraph, Schedule, build, decode, encode

from .cases import all_schedules, describe


def _nameless(schedule: Schedule) -> Schedule:
    return replace(schedule, graphs=tuple(ChunkGraph(g.edges) for g in schedule.graphs))


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_round_trip(n: int) -> None:
    for schedule in all_schedules([n]):
        assert decode(encode(schedule)) == _nameless(schedule), describe(schedule)


def test_layout_is_the_documented_one() -> None:
    schedule = build("direct", "all_reduce", 2, shares=[3, 1], pipeline=4)
    payload = struct.pack("<BBHhHHHIII", 0, 0, 2, -1, 2, 2, 4, 2, 4, 4)
    payload += struct.pack("<H", 6) + b"direct"
    assert (16 + len(payload)) % 4 == 0
    payload += struct.pack("<hhI", -1, -1, 3) + struct.pack("<hhI", -1, -1, 1)
    payload += struct.pack("<II", 0, 2) + struct.pack("<II", 2, 2)
    edges = [(0, 1, 0, 1), (1, 0, 1, 0), (0, 0, 1, 1), (1, 1, 0, 0)]  # step, src, dst, op
    for i, (step, src, dst, op) in enumerate(edges):
        payload += struct.pack("<HHHBBII", step, src, dst, op, 0, i, 1)
    payload += struct.pack("<4I", 0, 0, 1, 1)
    whole = struct.pack("<4sHHII", b"JXCP", 1, 0, 16 + len(payload), zlib.crc32(payload)) + payload
    assert encode(schedule) == whole


def test_canonical_flag() -> None:
    data = encode(build("one_shot", "all_reduce", 3))
    assert data[6:8] == b"\x01\x00"
    assert decode(data).canonical
    with pytest.raises(ScheduleError, match="unknown flags"):
        decode(data[:6] + b"\x02\x00" + data[8:])


def test_names_beyond_ascii() -> None:
    schedule = replace(build("ring", "all_gather", 3), name="Ringe für λ")
    assert decode(encode(schedule)).name == "Ringe für λ"


@pytest.mark.parametrize(("change", "what"), [
    (lambda d: d[:10], "too few"),
    (lambda d: b"XXXX" + d[4:], "no binary schedule"),
    (lambda d: d[:4] + b"\x09\0" + d[6:], "version 9"),
    (lambda d: d + b"\0", "cut or extended"),
    (lambda d: d[:-1] + bytes([d[-1] ^ 1]), "checksum"),
])  # fmt: skip
def test_damage_is_named(change: object, what: str) -> None:
    data = encode(build("ring", "all_reduce", 4))
    with pytest.raises(ScheduleError, match=what):
        decode(change(data))  # type: ignore[operator]


def test_parts_must_follow_each_other() -> None:
    schedule = build("ring", "all_reduce", 4)
    edges = len(schedule.edges)
    start = len(encode(schedule)) - 4 * edges - 16 * edges  # one chunk an edge
    for at, what in (
        (start + 16 + 8, "edge 1 has references 5..6, wanted 1.."),
        (start - 8, "graph 3 takes edges 5.."),
    ):
        damaged = bytearray(encode(schedule))
        damaged[at : at + 4] = struct.pack("<I", 5)
        damaged[12:16] = struct.pack("<I", zlib.crc32(bytes(damaged[16:])))
        with pytest.raises(ScheduleError, match=what):
            decode(bytes(damaged))


def test_damage_behind_a_right_checksum_never_escapes() -> None:
    data = encode(build("hierarchical", "all_reduce", 5, groups=[[0, 1], [2, 3], [4]]))
    rng = random.Random(1)
    refused = 0
    for _ in range(500):
        damaged = bytearray(data)
        damaged[rng.randrange(16, len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            del damaged[rng.randrange(16, len(data)) :]
        damaged[8:16] = struct.pack("<II", len(damaged), zlib.crc32(bytes(damaged[16:])))
        try:
            decode(bytes(damaged))
        except ScheduleError:
            refused += 1
    assert 100 < refused < 500
