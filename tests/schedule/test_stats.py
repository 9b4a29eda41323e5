"""Bytes and degrees, per edge and per rank."""

from __future__ import annotations

import numpy as np
import pytest

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule import Table, build, stats

from .cases import all_schedules, describe


def test_dual_tree_by_hand() -> None:
    schedule = build("dual_tree", "all_reduce", 4)  # tree 0: 0 - 2 - (1, 3); tree 1: 3 - 1 - (2, 0)
    s = stats(schedule, None, 8192)
    assert (s.edge_bytes == 4096).all()
    assert s.recv_degree[0].tolist() == [0, 2, 2, 0]
    assert s.recv_bytes[0].tolist() == [0, 8192, 8192, 0]
    assert s.send_bytes[2].tolist() == [4096, 0, 0, 4096]
    first = schedule.edges.index(next(e for e in schedule.edges if (e.src, e.dst) == (1, 2)))
    assert s.edge_degree[first] == 2


def test_ranks_follow_the_table() -> None:
    schedule = build("direct", "reduce", 4)
    s = stats(schedule, Table.identity(schedule).swap_vertex(0, 1, 0, 2), 64)
    assert s.recv_degree[0].tolist() == [0, 0, 3, 0]
    assert s.edge_dst.tolist() == [2, 2, 2]


def test_sums_agree_over_all_schedules() -> None:
    for schedule in all_schedules([1, 4, 7]):
        s = stats(schedule, None, 1000 * 4)
        moved = s.edge_bytes.sum()
        assert s.send_bytes.sum() == s.recv_bytes.sum() == moved, describe(schedule)
        assert s.send_degree.sum() == s.recv_degree.sum() == np.count_nonzero(s.edge_bytes)
        ranges = schedule.ranges(1000)
        by_hand = sum(4 * int(ranges[c, 1] - ranges[c, 0]) for e in schedule.edges for c in e.chunks)
        assert moved == by_hand


def test_empty_edges_count_in_no_degree() -> None:
    schedule = build("ring", "all_reduce", 4)
    s = stats(schedule, None, 8)  # two elements for four chunks
    assert s.send_degree.sum() == 2 * 6


def test_whole_elements_only() -> None:
    with pytest.raises(ScheduleError, match="10 bytes don't make whole elements of 4"):
        stats(build("ring", "all_reduce", 4), None, 10)
