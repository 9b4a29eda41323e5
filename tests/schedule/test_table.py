"""Tables: what the three swaps exchange, and the binary form."""

from __future__ import annotations

import contextlib
import random
import struct
import zlib

import numpy as np
import pytest

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule import Schedule, Table, build


@pytest.fixture
def schedule() -> Schedule:
    return build("dual_tree", "all_reduce", 6)


def test_identity(schedule: Schedule) -> None:
    table = Table.identity(schedule, version=7)
    assert table.home == tuple(range(6))
    assert table.version == 7
    assert table.vertex.shape == (2, schedule.steps + 1, 6)
    assert table.vertex.dtype == np.int16
    assert (table.vertex == np.arange(6)).all()


def test_swaps_exchange_ranks_not_positions(schedule: Schedule) -> None:
    start = Table.identity(schedule).swap_global(0, 3)  # rank 3 at position 0
    again = start.swap_global(3, 5)  # now rank 5 there
    assert again.home == (5, 1, 2, 0, 4, 3)
    assert (again.vertex == np.array([5, 1, 2, 0, 4, 3])).all()


def test_swap_graph_leaves_the_rest(schedule: Schedule) -> None:
    table = Table.identity(schedule).swap_graph(1, 2, 4)
    assert table.home == tuple(range(6))
    assert (table.vertex[0] == np.arange(6)).all()
    assert (table.vertex[1] == np.array([0, 1, 4, 3, 2, 5])).all()


def test_swap_vertex_leaves_the_rest(schedule: Schedule) -> None:
    table = Table.identity(schedule).swap_vertex(0, 2, 1, 5)
    changed = np.argwhere((table.vertex != np.arange(6)).any(axis=2)).tolist()
    assert changed == [[0, 2]]
    assert table.vertex[0, 2].tolist() == [0, 5, 2, 3, 4, 1]


def test_swaps_undo_themselves_and_are_immutable(schedule: Schedule) -> None:
    table = Table.identity(schedule)
    assert table.swap_graph(0, 1, 2).swap_graph(0, 1, 2) == table != table.swap_graph(0, 1, 2)
    with pytest.raises(ValueError, match="read-only"):
        table.vertex[0, 0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        table.swap_global(0, 1).vertex[0, 0, 0] = 1


def test_swaps_refuse_what_is_not_there(schedule: Schedule) -> None:
    table = Table.identity(schedule)
    for call in (lambda: table.swap_global(0, 6), lambda: table.swap_graph(2, 0, 1), lambda: table.swap_graph(-1, 0, 1),
                 lambda: table.swap_vertex(0, 99, 0, 1), lambda: table.swap_vertex(0, 0, -1, 1)):  # fmt: skip
        with pytest.raises(ScheduleError, match="the table has"):
            call()


def test_construction_wants_permutations() -> None:
    good = np.zeros((1, 1, 2), dtype=np.int16) + np.arange(2, dtype=np.int16)
    with pytest.raises(ScheduleError, match="home"):
        Table((0, 0), good)
    with pytest.raises(ScheduleError, match=r"vertex\[0\]\[0\] = \[1, 1\]"):
        Table((0, 1), np.ones((1, 1, 2), dtype=np.int16))
    with pytest.raises(ScheduleError, match="shape"):
        Table((0, 1), good[0])


def test_bytes_keep_the_table_in_the_coarsest_scope(schedule: Schedule) -> None:
    plain = Table.identity(schedule, version=2**40 + 3).swap_global(1, 2)
    by_graph, by_vertex = plain.swap_graph(1, 0, 5), plain.swap_vertex(0, 1, 0, 5)
    for table, scope in ((plain, 0), (by_graph, 1), (by_vertex, 2)):
        data = table.to_bytes()
        assert struct.unpack_from("<4sHH", data) == (b"JXCT", 1, scope)
        assert Table.from_bytes(data) == table
    assert len(plain.to_bytes()) == 32 + 12 + 12


def test_layout_is_the_documented_one() -> None:
    schedule = build("direct", "broadcast", 2)
    payload = struct.pack("<QHHHH", 9, 2, 1, 1, 0) + struct.pack("<2h", 0, 1) + struct.pack("<2h", 0, 1)
    whole = struct.pack("<4sHHII", b"JXCT", 1, 0, 16 + len(payload), zlib.crc32(payload)) + payload
    assert Table.identity(schedule, version=9).to_bytes() == whole


def test_nothing_moves_with_one_rank() -> None:
    table = Table.identity(build("ring", "all_reduce", 1))
    assert Table.from_bytes(table.to_bytes()) == table


def test_damaged_bytes_are_refused_not_read() -> None:
    data = Table.identity(build("dual_tree", "all_reduce", 5)).swap_vertex(0, 1, 2, 3).to_bytes()
    rng = random.Random(3)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.5:  # a checksum that fits, so that the checks behind it are reached
            damaged[12:16] = struct.pack("<I", zlib.crc32(bytes(damaged[16:])))
        with contextlib.suppress(ScheduleError):  # harmless changes (the version, another permutation) are read
            Table.from_bytes(bytes(damaged))
    for size in range(0, len(data), 7):
        with pytest.raises(ScheduleError):
            Table.from_bytes(data[:size])
