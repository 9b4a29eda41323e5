"""Builders: right for every number of ranks, and shaped as their names promise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule import Kind, Op, bit_equal, build, builders, check, stats
from jaxcoll.schedule.builders.trees import Tree, double_tree

from .cases import all_schedules, describe


@pytest.mark.parametrize("n", range(1, 18))
def test_every_builder_is_valid_for_every_n(n: int) -> None:
    count = 0
    for schedule in all_schedules([n]):
        check(schedule)
        assert bit_equal(schedule), describe(schedule)
        assert n > 1 or not schedule.edges, describe(schedule)
        count += 1
    assert count >= 30


def _children(tree: Tree) -> dict[int, list[int]]:
    return {p: list(c) for p, c in enumerate(tree.children) if c}


@pytest.mark.parametrize(
    ("n", "roots", "first", "second"),
    [
        (2, (0, 1), {0: [1]}, {1: [0]}),
        (4, (0, 3), {0: [2], 2: [1, 3]}, {3: [1], 1: [2, 0]}),
        (5, (0, 1), {0: [4], 4: [2], 2: [1, 3]}, {1: [0], 0: [3], 3: [2, 4]}),
        (8, (0, 7), {0: [4], 4: [2, 6], 2: [1, 3], 6: [5, 7]}, {7: [3], 3: [5, 1], 1: [2, 0], 5: [6, 4]}),
    ],
)
def test_double_tree_is_nccls(
    n: int, roots: tuple[int, int], first: dict[int, list[int]], second: dict[int, list[int]]
) -> None:
    trees = double_tree(n)
    assert tuple(t.root for t in trees) == roots
    assert [_children(t) for t in trees] == [first, second]


def _nccl_parent(n: int, r: int) -> int:
    # ncclGetBtree's own way to the parent, told from the facts rather than from the builder's child lists
    if r == 0:
        return -1
    bit = 1
    while not r & bit:
        bit <<= 1
    up = (r ^ bit) | (bit << 1)
    return r ^ bit if up >= n else up


@pytest.mark.parametrize("n", [2, 3, 6, 7, 12, 13, 16, 31, 64])
def test_double_tree_parents(n: int) -> None:
    first, second = double_tree(n)
    for tree, shift in ((first, False), (second, True)):
        for p, children in enumerate(tree.children):
            for c in children:
                if not shift:
                    assert _nccl_parent(n, c) == p
                elif n % 2 == 0:
                    assert n - 1 - _nccl_parent(n, n - 1 - c) == p
                else:
                    assert (_nccl_parent(n, (c - 1) % n) + 1) % n == p


def test_dual_tree_lies_between_consecutive_steps() -> None:
    schedule = build("dual_tree", "all_reduce", 16)
    assert schedule.steps == 8
    assert [g.name for g in schedule.graphs] == ["tree0", "tree1"]
    for graph in schedule.graphs:
        arrivals = Counter((e.step, e.dst) for e in graph.edges if e.op is Op.REDUCE)
        senders = Counter(e.src for e in graph.edges if e.op is Op.REDUCE)
        assert max(senders.values()) == 1
        assert len(senders) == 15
        assert set(arrivals.values()) <= {1, 2}
        assert len(arrivals) == len({dst for _, dst in arrivals})  # both children in one step


def test_ring_sends_least_and_steps() -> None:
    n = 6
    schedule = build("ring", Kind.ALL_REDUCE, n)
    s = stats(schedule, None, 6 * 4096)
    assert schedule.steps == 2 * (n - 1)
    assert len(schedule.graphs) == n
    assert (s.send_bytes.sum(axis=0) == 2 * (n - 1) * 4096).all()
    assert (s.send_degree == 1).all()
    assert (s.recv_degree == 1).all()


@pytest.mark.parametrize(("name", "kind", "n", "steps"), [
    ("recursive_doubling", "all_gather", 8, 3),
    ("recursive_doubling", "all_gather", 9, 4),
    ("recursive_doubling", "all_reduce", 8, 3),
    ("recursive_doubling", "all_reduce", 9, 5),
    ("halving_doubling", "all_reduce", 8, 6),
    ("halving_doubling", "reduce_scatter", 16, 4),
    ("binomial", "broadcast", 9, 4),
    ("binomial", "reduce", 8, 3),
    ("direct", "all_reduce", 7, 2),
    ("direct", "all_to_all", 7, 1),
    ("one_shot", "all_reduce", 7, 1),
    ("pairwise", "all_to_all", 7, 6),
    ("hierarchical", "all_reduce", 1, 0),
])  # fmt: skip
def test_number_of_steps(name: str, kind: str, n: int, steps: int) -> None:
    params = {"groups": [list(range(n))]} if name == "hierarchical" else {}
    assert build(name, kind, n, **params).steps == steps


def test_gather_by_doubling_moves_every_chunk_once_to_each_position() -> None:
    for n in (5, 8, 11):
        schedule = build("recursive_doubling", "all_gather", n)
        arrived = Counter((e.dst, c) for e in schedule.edges for c in e.chunks)
        assert len(arrived) == n * (n - 1)
        assert set(arrived.values()) == {1}


def test_direct_shares_set_what_each_position_reduces() -> None:
    schedule = build("direct", "all_reduce", 4, shares=[2, 0, 1, 1])
    check(schedule)
    received = stats(schedule, None, 4096).recv_bytes
    assert received[0].tolist() == [3 * 2048, 0, 3 * 1024, 3 * 1024]
    assert received[1].tolist() == [2048, 4096, 3072, 3072]
    assert not any(1 in e.chunks for e in schedule.edges)


@pytest.mark.parametrize("shares", [[1, 2], [0, 0, 0], [1, -1, 1], [1, 0.5, 1], "abc", 7])
def test_direct_refuses_bad_shares(shares: object) -> None:
    with pytest.raises(ScheduleError, match="3 integers >= 0"):
        build("direct", "all_reduce", 3, shares=shares)


def test_direct_shares_belong_to_all_reduce() -> None:
    with pytest.raises(ScheduleError, match="leave shares out"):
        build("direct", "all_gather", 3, shares=[1, 1, 1])


def test_hierarchical_crosses_groups_only_in_the_middle() -> None:
    groups = [[0, 3, 4], [1, 2], [5]]
    member = {p: k for k, g in enumerate(groups) for p in g}
    schedule = build("hierarchical", "all_reduce", 6, groups=groups, inter="ring", inner="direct")
    check(schedule)
    crossing = {e.step for e in schedule.edges if member[e.src] != member[e.dst]}
    inside = {e.step for e in schedule.edges if member[e.src] == member[e.dst]}
    assert crossing == {1, 2, 3, 4}
    assert inside == {0, 5}
    even = build("hierarchical", "all_reduce", 6, groups=[[0, 3, 4], [1, 2, 5]])
    assert len(even.graphs) == 3  # slots are independent


@pytest.mark.parametrize("inter", sorted(builders("all_reduce").keys() - {"hierarchical"}))
def test_hierarchical_takes_any_inter_schedule(inter: str) -> None:
    for groups in ([[0, 1, 2], [3, 4, 5], [6, 7]], [[i] for i in range(8)], [list(range(8))]):
        schedule = build("hierarchical", "all_reduce", 8, groups=groups, inter=inter, inner="ring")
        check(schedule)
        assert bit_equal(schedule)


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2], []], 5, [[0, 1], ["x"]]])
def test_hierarchical_refuses_bad_groups(groups: object) -> None:
    with pytest.raises(ScheduleError, match="groups="):
        build("hierarchical", "all_reduce", 3, groups=groups)


def test_hierarchical_names_the_part_that_fails() -> None:
    with pytest.raises(ScheduleError, match="part 'one_shot' across 2"):
        build("hierarchical", "all_gather", 4, groups=[[0, 1], [2, 3]], inter="one_shot")


@pytest.mark.parametrize(
    ("perm", "what"),
    [([(0, 1), (0, 2)], "source 0"), ([(0, 2), (1, 2)], "destination 2"), ([(0, 3)], "outside"), (3, "pairs")],
)
def test_permute_refuses_bad_pairs(perm: object, what: str) -> None:
    with pytest.raises(ScheduleError, match=what):
        build("permute", "permute", 3, perm=perm)


def test_pipeline_reaches_every_schedule() -> None:
    for name, builder in builders().items():
        params = {"permute": {"perm": [(0, 1)]}, "hierarchical": {"groups": [[0, 1], [2]]}}.get(name, {})
        assert build(name, builder.kinds[0], 3, pipeline=5, **params).pipeline == 5


def test_errors_list_what_is_known() -> None:
    with pytest.raises(ScheduleError, match="unknown schedule 'rong'; known are .*dual_tree.*ring"):
        build("rong", "all_reduce", 4)
    with pytest.raises(ScheduleError, match="can't do all_to_all, only .*; for all_to_all there are direct, pairwise"):
        build("ring", "all_to_all", 4)
    with pytest.raises(ScheduleError, match="unknown collective 'sum'; known are all_reduce"):
        build("ring", "sum", 4)
    with pytest.raises(ScheduleError, match="no parameter 'lanes'; it takes pipeline, root"):
        build("binomial", "reduce", 4, lanes=2)
    with pytest.raises(ScheduleError, match="number of ranks is 0; it must lie in 1"):
        build("ring", "all_reduce", 0)
    with pytest.raises(ScheduleError, match="needs perm="):
        build("permute", "permute", 4)
    with pytest.raises(ScheduleError, match=r"root is 4; it must lie in 0\.\.3"):
        build("binomial", "reduce", 4, root=4)
    with pytest.raises(ScheduleError, match="pipeline is 0"):
        build("ring", "all_reduce", 4, pipeline=0)


def test_builders_can_be_selected_by_kind() -> None:
    assert set(builders("all_to_all")) == {"direct", "pairwise"}


@pytest.mark.parametrize(
    ("n", "weights"),
    [(1000, [1, 1, 1]), (5, [1, 1, 1]), (0, [1, 2]), (4096, [3, 0, 1, 0]), (4100, [3, 0, 1, 0]), (7, [0, 1])],
)
def test_ranges_cover_a_block(n: int, weights: list[int]) -> None:
    schedule = build("direct", "all_reduce", len(weights), shares=weights)
    ranges = schedule.ranges(n)
    assert ranges[0, 0] == 0
    assert ranges[-1, 1] == n
    assert (ranges[1:, 0] == ranges[:-1, 1]).all()
    assert (np.diff(ranges, axis=1) >= 0).all()
    exact = np.cumsum([0, *weights[:-1]]) * n / sum(weights)
    assert (np.abs(ranges[:, 0] - exact) < 16).all()
    if n >= 64 * len(weights):
        assert (ranges[:, 0] % 16 == 0)[np.cumsum([0, *weights[:-1]]) < sum(weights)].all()
    assert all(a == b for (a, b), w in zip(ranges.tolist(), weights, strict=True) if w == 0)
