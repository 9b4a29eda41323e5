"""Position-equivalent swaps against trying every pair, as the paper does."""

from __future__ import annotations

import itertools
import time

import pytest

from jaxcoll.errors import ScheduleInvalid
from jaxcoll.schedule import (
    Chunk,
    ChunkGraph,
    Collective,
    Edge,
    Kind,
    Op,
    Schedule,
    Table,
    bit_equal,
    build,
    equivalent_swaps,
    valid,
)

from .cases import all_schedules, describe

Pairs = set[tuple[int, int]]


def _active(schedule: Schedule, table: Table, g: int, t: int) -> set[int]:
    positions = {e.dst for e in schedule.graphs[g].edges if e.step == t - 1}
    positions |= {e.src for e in schedule.graphs[g].edges if e.step == t}
    return {int(table.vertex[g, t, p]) for p in positions}


def _brute(schedule: Schedule, table: Table, g: int, t: int, same_bits: bool) -> Pairs:
    active = _active(schedule, table, g, t)
    found: Pairs = set()
    for a, b in itertools.combinations(range(schedule.nranks), 2):
        swapped = table.swap_vertex(g, t, a, b)
        if {a, b} & active and valid(schedule, swapped) and (not same_bits or bit_equal(schedule, swapped)):
            found.add((a, b))
    return found


def _compare(schedule: Schedule, table: Table, same_bits: bool) -> int:
    got = equivalent_swaps(schedule, table, same_bits=same_bits)
    assert set(got) == {(g, t) for g in range(len(schedule.graphs)) for t in range(schedule.steps + 1)}
    count = 0
    for (g, t), sets in got.items():
        active = _active(schedule, table, g, t)
        pairs = {p for s in sets for p in itertools.combinations(sorted(s), 2) if active & set(p)}
        assert pairs == _brute(schedule, table, g, t, same_bits), (describe(schedule), g, t)
        count += len(pairs)
    return count


@pytest.mark.parametrize("same_bits", [True, False])
def test_equal_to_brute_force(same_bits: bool) -> None:
    count = sum(_compare(s, Table.identity(s), same_bits) for s in all_schedules([2, 3, 4, 5, 6]) if s.graphs)
    assert count > 500


def test_equal_to_brute_force_under_tables() -> None:
    for name, kind in (("dual_tree", "all_reduce"), ("recursive_doubling", "all_gather"), ("direct", "all_reduce")):
        schedule = build(name, kind, 8)
        table = Table.identity(schedule).swap_global(1, 4).swap_graph(0, 0, 6)
        if not valid(schedule, table):  # a gather's home doesn't follow its graph
            table = Table.identity(schedule).swap_global(1, 4)
        for (g, t), sets in equivalent_swaps(schedule, table).items():
            if sets:
                a, b = sorted(sets[0])[:2]
                table = table.swap_vertex(g, t, a, b)
                break
        assert _compare(schedule, table, True) > 0


def test_sending_nothing_rules_a_swap_out_even_if_the_result_is_right() -> None:
    # The last step gives everybody the data again, so what the first ones do can't be seen in the result.
    early = (Edge(0, 0, 1, Op.COPY, (0,)), Edge(1, 1, 2, Op.COPY, (0,)))
    late = tuple(Edge(2, 0, p, Op.COPY, (0,)) for p in (1, 2, 3))
    graphs = (ChunkGraph((*early, *late)),)
    schedule = Schedule("again", Collective(Kind.BROADCAST, 4, 0), 3, (Chunk(None, None),), graphs)
    assert _compare(schedule, Table.identity(schedule), True) > 0
    assert equivalent_swaps(schedule)[0, 0] == ()


def test_leaves_of_a_tree_change_places_and_inner_positions_do_not() -> None:
    schedule = build("dual_tree", "all_reduce", 8)
    sets = equivalent_swaps(schedule)
    assert frozenset({1, 3, 5, 7}) in sets[0, 0]  # tree 0's leaves send first
    assert not any({0, 4} <= s for s in sets[0, 3])  # its root and the root's only child


def test_schedules_must_be_valid_to_begin_with() -> None:
    schedule = build("binomial", "broadcast", 4)
    with pytest.raises(ScheduleInvalid):
        equivalent_swaps(schedule, Table.identity(schedule).swap_graph(0, 0, 2))


def test_equal_bits_cost_some_swaps() -> None:
    # In a full-vector exchange a swap may keep every contribution and still change who adds what first.
    strict = loose = 0
    for n in (5, 6, 7):
        schedule = build("recursive_doubling", "all_reduce", n)
        strict += sum(len(s) for sets in equivalent_swaps(schedule).values() for s in sets)
        loose += sum(len(s) for sets in equivalent_swaps(schedule, same_bits=False).values() for s in sets)
    assert 0 < strict <= loose


@pytest.mark.parametrize(
    ("name", "kind", "limit"),
    [
        ("dual_tree", "all_reduce", 3),
        ("ring", "all_reduce", 6),
        ("recursive_doubling", "all_gather", 3),
        ("recursive_doubling", "all_reduce", 3),
    ],
)
def test_sixty_four_ranks_take_seconds(name: str, kind: str, limit: float) -> None:
    schedule = build(name, kind, 64)
    begin = time.process_time()
    sets = equivalent_swaps(schedule)
    assert time.process_time() - begin < limit
    assert len(sets) == len(schedule.graphs) * (schedule.steps + 1)
