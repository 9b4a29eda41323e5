"""The paper's parts, each by itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxcoll.errors import UsageError
from jaxcoll.schedule import Kind, Table, bit_equal, build
from jaxcoll.schedule.verify import valid
from jaxcoll.sim import Plan, World, star
from jaxcoll.telemetry import group_epochs
from jaxcoll.tuner import ReactParams
from jaxcoll.tuner.detect import detect
from jaxcoll.tuner.estimate import Estimator, Memory, remember
from jaxcoll.tuner.measure import Batch, batch_of, pattern_of
from jaxcoll.tuner.paths import critical_path, critical_paths
from jaxcoll.tuner.transforms import Swap, is_valid, viable

NB = 4_000_000


def tree_batch(fct_of_edge: dict[int, list[float]]) -> Batch:
    """A batch of 4 epochs of the 8-rank dual tree, all transfers 0.1 s but the given ones."""
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8)
    pattern = pattern_of(schedule, Table.identity(schedule), NB)
    fct = np.full((4, 28), 0.1)
    for edge, values in fct_of_edge.items():
        fct[:, edge] = values
    return Batch(pattern, fct, np.ones(4), np.zeros((4, 8)), 0)


def test_table_3_has_the_paper_s_values() -> None:
    p = ReactParams()
    assert (p.B, p.delta1, p.delta2, p.K_t, p.epsilon, p.tau_r, p.E_max, p.H) == (6, 0.2, 0.15, 15, 0.05, 0.05, 5, 60)
    with pytest.raises(UsageError, match="K_t is 0"):
        ReactParams(K_t=0)


def test_equation_1_compares_the_90th_percentile_with_flows_of_the_same_degree() -> None:
    found = detect(tree_batch({3: [0.2] * 4}))
    assert np.flatnonzero(found.steady).tolist() == [3]
    assert not found.erratic.any()
    # Three slow epochs of four are not steady: the 90th percentile is a good epoch's.
    found = detect(tree_batch({3: [0.2, 0.2, 0.2, 0.1]}))
    assert not found.steady.any()
    assert np.flatnonzero(found.erratic).tolist() == [3]


def test_equation_1_needs_a_drop_of_delta1() -> None:
    assert not detect(tree_batch({3: [0.115] * 4})).any.any()
    assert detect(tree_batch({3: [0.115] * 4}), delta1=0.05).steady[3]


def test_equation_1_looks_at_its_own_degree_only() -> None:
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8)
    degree = pattern_of(schedule, Table.identity(schedule), NB).degree
    ones = np.flatnonzero(degree == 1).tolist()
    # All flows of degree 1 are slow: they are slow together, so none of them is below its likes.
    assert not detect(tree_batch({edge: [0.3] * 4 for edge in ones})).any.any()


def test_equation_1_compares_flows_inside_a_host_with_each_other() -> None:
    schedule = build("ring", Kind.ALL_REDUCE, 8)
    pattern = pattern_of(schedule, Table.identity(schedule), NB)
    src, dst = pattern.plan.src, pattern.plan.dst
    inside = src // 4 == dst // 4
    fct = np.tile(np.where(inside, 0.001, 0.1), (4, 1))
    hosts = [0] * 4 + [1] * 4
    assert not detect(Batch(pattern, fct, np.ones(4), np.zeros((4, 8)), 0), hosts=hosts).any.any()
    slow = ((src == 3) & (dst == 4)) | ((src == 5) & (dst == 6))
    found = detect(Batch(pattern, np.where(slow, 2 * fct, fct), np.ones(4), np.zeros((4, 8)), 0), hosts=hosts)
    np.testing.assert_array_equal(found.steady, slow)
    # One rank a host, as in the paper: to say so changes nothing.
    plain, told = (detect(tree_batch({3: [0.2] * 4, 7: [0.1, 0.2] * 2}), hosts=h) for h in (None, range(8)))
    for name in ("steady", "erratic", "p90", "usual"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(told, name))


def test_critical_path_is_the_heaviest_chain() -> None:
    columns = [np.array(c) for c in ([0, 2, 1, 3], [1, 3, 3, 4], [0, 0, 0, 0], [0, 0, 1, 2])]
    plan = Plan(*columns, np.ones(4), np.array([2, 3, 3]), np.array([0, 1, 2]), 1)
    assert critical_path(plan, np.array([1.0, 1.5, 1.0, 1.0])).tolist() == [0, 2, 3]
    assert critical_path(plan, np.array([1.0, 5.0, 1.0, 1.0])).tolist() == [1, 3]
    paths = critical_paths(plan, np.array([[1.0, 1.5, 1.0, 1.0], [1.0, 9.0, 1.0, 1.0]]))
    assert [path.tolist() for path, _ in paths] == [[0, 2, 3], [1, 3], [1, 3]]


def test_viable_swaps_keep_the_collective_and_lower_the_degree_first() -> None:
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8)
    table = Table.identity(schedule)
    groups = list(viable(schedule, table, NB, 1, 2, 3))
    found = [option for group in groups for option in group]
    assert found
    assert all(valid(schedule, option.table) for option in found)
    flags = [option.lowers for option in found]
    assert flags == sorted(flags, reverse=True)
    assert any(flags)
    assert not any(
        option.swap.b == 7 for group in viable(schedule, table, NB, 1, 2, 3, exclude={7}) for option in group
    )


def test_pruning_looks_at_the_whole_pattern() -> None:
    # Swapping 1 with 2 in tree 1 would put two children under rank 2 in the same step in which tree 0 gives it two.
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8)
    table = Table.identity(schedule)
    swap = Swap(1, None, 1, 2)
    assert is_valid(schedule, swap.apply(table))
    options = [o.swap for group in viable(schedule, table, NB, 1, 1, 1) for o in group]
    assert swap not in options


def test_position_swaps_are_checked_by_counting_contributions() -> None:
    schedule = build("recursive_doubling", Kind.ALL_REDUCE, 4)
    table = Table.identity(schedule)
    wrong = [
        Swap(0, 1, a, b) for a in range(4) for b in range(a) if not is_valid(schedule, Swap(0, 1, a, b).apply(table))
    ]
    assert wrong, "a swap between the steps adds one contribution twice"


def test_estimates_scale_with_degree_and_size_and_fall_back_on_medians() -> None:
    src, dst = np.array([0, 1]), np.array([1, 2])
    memory = Memory(6, 6, src, dst, np.array([1, 2]), np.array([1e6, 1e6]), np.array([0.1, 0.4]))
    estimator = Estimator([memory], 4)
    schedule = build("dual_tree", Kind.ALL_REDUCE, 4)
    pattern = pattern_of(schedule, Table.identity(schedule), 2_000_000)
    plan = dataclasses.replace(
        pattern.plan, src=np.array([0, 3, 2]), dst=np.array([1, 0, 0]), size=np.array([2e6, 1e6, 1e6])
    )
    seconds = estimator.seconds(dataclasses.replace(pattern, plan=plan, degree=np.array([3, 2, 1])))
    np.testing.assert_allclose(seconds, [0.1 * 2 * 3, 0.4, 0.1])


def test_history_forgets_after_h_epochs() -> None:
    batch = tree_batch({})
    history: tuple[Memory, ...] = ()
    for epoch in (4, 8, 12):
        history = remember(history, batch, epoch, 8)
    assert [m.epoch for m in history] == [8, 12]


def test_batches_match_records_to_edges() -> None:
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8, pipeline=4)
    table = Table.identity(schedule).swap_graph(1, 3, 6)
    world = World(star(8, 25e6).congest(3, 2))
    records, times = world.run(schedule, table, NB, 3)
    pattern = pattern_of(schedule, table, NB)
    batch = batch_of(group_epochs(records[::-1].copy()), pattern, 8)
    assert np.isfinite(batch.fct).all()
    np.testing.assert_allclose(batch.seconds, times, rtol=1e-3)
    np.testing.assert_allclose(np.ptp(batch.fct, axis=0), 0, atol=1e-9)
    other = batch_of(group_epochs(records), pattern_of(schedule, Table.identity(schedule), NB), 8)
    assert np.isnan(other.fct).any(), "records of another table fit no edge"


def test_an_edge_that_nobody_could_time_says_nothing():
    schedule = build("direct", Kind.ALL_REDUCE, 8)
    table = Table.identity(schedule)
    records, _ = World(star(8, 25e6).congest(3, 2)).run(schedule, table, NB, 6)
    pattern = pattern_of(schedule, table, NB)
    into = pattern.plan.dst == 3
    known = detect(batch_of(group_epochs(records), pattern, 8))
    assert known.steady[into].all()
    records["transfer_ns"][(records["dst"] == 3) & (records["side"] == 0)] = 0
    batch = batch_of(group_epochs(records), pattern, 8)
    assert (np.isnan(batch.fct).all(axis=0) == into).all()
    np.testing.assert_array_equal(np.isnan(batch.throughput), np.isnan(batch.fct))
    found = detect(batch)
    assert not found.any[into].any()
    assert np.nanmax(found.usual) < 25e6, "nothing seems quicker than a link"


def test_no_swap_gives_ranks_other_bits() -> None:
    schedule = build("recursive_doubling", Kind.ALL_REDUCE, 4)
    start = Table.identity(schedule)
    apart = Swap(0, 0, 0, 2).apply(start)
    assert valid(schedule, apart), "every rank has every contribution once ..."
    assert not bit_equal(schedule, apart), "... in another order"
    assert not is_valid(schedule, apart)
    assert is_valid(schedule, Swap(None, None, 0, 2).apply(start))
    batches = (viable(schedule, start, 1 << 20, 0, step, rank) for step in range(2) for rank in range(4))
    offered = [one.table for groups in batches for group in groups for one in group]
    assert offered
    assert all(bit_equal(schedule, table) for table in offered)
