"""The flow model against cases that can be worked out by hand, and lanes against an exact expansion."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxcoll.errors import UsageError
from jaxcoll.schedule import Kind, Table, build
from jaxcoll.sim import Job, Plan, plan, simulate, simulate_one, spines, star
from tests.sim.conftest import Choose

C = 1e9
NB = 8_000_000


@pytest.fixture(autouse=True, params=["native", "numpy"])
def engine(request: pytest.FixtureRequest, choose: Choose) -> None:
    """Every test here runs on both."""
    choose(request.param)


def quiet(n: int, **kw: float):
    return star(n, C, alpha=0.0, **kw)


def flows(*edges: tuple[int, int, int, float], deps: tuple[tuple[int, int], ...] = (), lanes: int = 1) -> Plan:
    """A plan of (src, dst, step, bytes), with (child, parent) pairs."""
    src, dst, step = (np.array([e[i] for e in edges], np.int64) for i in range(3))
    pairs = np.array(deps, np.int64).reshape(-1, 2)
    size = np.array([e[3] for e in edges], float)
    return Plan(src, dst, np.zeros(len(edges), np.int64), step, size, pairs[:, 0], pairs[:, 1], lanes)


def test_two_flows_share_a_receiver_and_the_last_gets_all() -> None:
    result = simulate_one(flows((0, 2, 0, 1e6), (1, 2, 0, 3e6)), quiet(3))
    np.testing.assert_allclose(result.end, [2e-3, 4e-3], rtol=1e-9)
    np.testing.assert_allclose(result.busy, result.end, rtol=1e-9)


def test_max_min_gives_the_rest_of_a_link_to_who_can_use_it() -> None:
    # 0->2 is held to C/3 by two others at host 2, so 0->1 gets 2C/3 of host 0's sending side.
    edges = flows((0, 2, 0, 1e6), (3, 2, 0, 1e6), (4, 2, 0, 1e6), (0, 1, 0, 2e6))
    np.testing.assert_allclose(simulate_one(edges, quiet(5)).end, [3e-3] * 4, rtol=1e-9)


def test_strangers_take_their_share_and_not_more_than_their_cap() -> None:
    edge = flows((0, 1, 0, 1e6))
    assert simulate_one(edge, quiet(2).congest(1, 2)).total == pytest.approx(3e-3)
    assert simulate_one(edge, quiet(2).congest(1, 2, cap=0.1 * C)).total == pytest.approx(1e-3 / 0.8)
    assert simulate_one(edge, quiet(2).congest(0, 1, "outgoing")).total == pytest.approx(2e-3)
    assert simulate_one(edge, quiet(2).congest(0, 1)).total == pytest.approx(1e-3), "incoming doesn't touch sending"


def test_dependent_edges_run_one_after_the_other_with_latency() -> None:
    chain = flows((0, 1, 0, 1e6), (1, 2, 1, 1e6), deps=((1, 0),))
    result = simulate_one(chain, quiet(3).with_alpha(1e-4))
    np.testing.assert_allclose(result.end, [1.1e-3, 2.2e-3], rtol=1e-9)
    np.testing.assert_allclose(result.ready, [0, 1.1e-3], atol=1e-12)


def test_lanes_overlap_and_a_starved_edge_is_not_called_slow() -> None:
    chain = flows((0, 1, 0, 1e6), (1, 2, 1, 1e6), deps=((1, 0),), lanes=10)
    slow_first = quiet(3).slow(0, "outgoing", 0.5)
    result = simulate_one(chain, slow_first)
    np.testing.assert_allclose(result.end, [2e-3, 2.1e-3], rtol=1e-6)
    assert result.busy[1] == pytest.approx(1e-3, rel=1e-6), "its own links were free for twice its rate"


def test_one_connection_a_pair_or_one_an_edge() -> None:
    edges = flows((0, 2, 0, 1e6), (0, 2, 0, 1e6), (1, 2, 0, 1e6))
    pair = simulate_one(edges, quiet(3))
    edge = simulate_one(edges, dataclasses.replace(quiet(3), connection="edge"))
    np.testing.assert_allclose(pair.end, [3e-3, 3e-3, 2e-3], rtol=1e-9)
    np.testing.assert_allclose(edge.end, [3e-3] * 3, rtol=1e-9)


def test_a_connection_serves_first_come_first_served() -> None:
    edges = flows((0, 1, 0, 1e6), (2, 0, 0, 5e5), (0, 1, 1, 1e6), deps=((2, 1),))
    result = simulate_one(edges, quiet(3))
    np.testing.assert_allclose(result.end, [1e-3, 5e-4, 2e-3], rtol=1e-9)
    np.testing.assert_allclose(result.busy, [1e-3, 5e-4, 1e-3], rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "kw", "seconds"),
    [
        ("ring", {}, 14 / 8),
        ("halving_doubling", {}, 14 / 8),
        ("direct", {}, 14 / 8),
        ("recursive_doubling", {}, 3.0),
        ("one_shot", {}, 7.0),
        ("dual_tree", {"pipeline": 200}, 2.0),
    ],
)
def test_quiet_schedules_take_what_the_textbook_says(name: str, kw: dict[str, int], seconds: float) -> None:
    schedule = build(name, Kind.ALL_REDUCE, 8, **kw)
    result = simulate_one(
        plan(schedule, Table.identity(schedule), NB), dataclasses.replace(quiet(8), connection="edge")
    )
    assert result.total == pytest.approx(seconds * NB / C, rel=0.02)


def test_every_byte_takes_its_time_whatever_the_congestion() -> None:
    schedule = build("ring", Kind.ALL_REDUCE, 4)
    rows = plan(schedule, Table.identity(schedule), NB)
    result = simulate_one(rows, quiet(4).congest(2, 2))
    into = rows.dst == 2
    assert result.total == pytest.approx(6 * NB / 4 / (C / 3), rel=1e-6), "one connection beside two strangers"
    assert result.busy[into].sum() == pytest.approx(6 * NB / 4 / (C / 3), rel=1e-6)


def expand(rows: Plan) -> Plan:
    """Each lane an edge of its own, behind the edge's lane before: the exact form of pipelining."""
    lanes, n = rows.lanes, len(rows.src)
    pairs = [(c * lanes + i, p * lanes + i) for c, p in zip(rows.child, rows.parent, strict=True) for i in range(lanes)]
    pairs += [(e * lanes + i, e * lanes + i - 1) for e in range(n) for i in range(1, lanes)]
    ordered = np.array(sorted(pairs), np.int64)
    columns = [np.repeat(column, lanes) for column in (rows.src, rows.dst, rows.graph, rows.step)]
    return Plan(*columns, np.repeat(rows.size / lanes, lanes), ordered[:, 0], ordered[:, 1], 1)


@pytest.mark.parametrize("lanes", [2, 8])
@pytest.mark.parametrize("congested", [None, 1, 4])
def test_fluid_lanes_stay_near_discrete_lanes(lanes: int, congested: int | None) -> None:
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8, pipeline=lanes)
    rows = plan(schedule, Table.identity(schedule), NB)
    network = dataclasses.replace(quiet(8), connection="edge")
    network = network if congested is None else network.congest(congested, 2)
    fluid, exact = simulate([Job(rows, network), Job(expand(rows), network)])
    assert fluid.total == pytest.approx(exact.total, rel=0.12)


def test_jobs_side_by_side_don_t_touch_each_other() -> None:
    jobs: list[Job] = []
    for i, (name, kw) in enumerate([("dual_tree", {"pipeline": 4}), ("ring", {}), ("direct", {"pipeline": 8})] * 2):
        schedule = build(name, Kind.ALL_REDUCE, 6, **kw)
        table = Table.identity(schedule).swap_graph(0, 1, i % 4 + 2)
        network = quiet(6).congest(i, 1 + i % 3)
        connection = "pair" if i % 2 else "edge"
        jobs.append(Job(plan(schedule, table, NB), dataclasses.replace(network, connection=connection)))
    for job, result in zip(jobs, simulate(jobs), strict=True):
        alone = simulate([job])[0]
        np.testing.assert_allclose(result.end, alone.end, rtol=1e-9)
        np.testing.assert_allclose(result.busy, alone.busy, rtol=1e-6)


def test_swapped_tables_move_the_flows() -> None:
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8, pipeline=16)
    base = Table.identity(schedule)
    rows = plan(schedule, base.swap_graph(0, 2, 3), NB)
    first = plan(schedule, base, NB)
    renamed = np.array([0, 1, 3, 2, 4, 5, 6, 7])
    np.testing.assert_array_equal(rows.src[:14], renamed[first.src[:14]])
    np.testing.assert_array_equal(rows.src[14:], first.src[14:])


def test_a_share_of_zero_brings_no_bytes() -> None:
    schedule = build("direct", Kind.ALL_REDUCE, 4, shares=[0, 1, 1, 2])
    rows = plan(schedule, Table.identity(schedule), 4000)
    assert rows.size.sum() == 6 * 4000
    assert simulate_one(rows, quiet(4)).total > 0


def test_ecmp_routes_can_collide() -> None:
    network = spines([[0, 1], [2, 3]], C, C, count=2, alpha=0.0)
    edges = flows((0, 2, 0, 1e6), (1, 3, 0, 1e6))
    apart = simulate([Job(edges, network, choice=np.array([0, 1])), Job(edges, network, choice=np.array([0, 0]))])
    assert apart[0].total == pytest.approx(1e-3)
    assert apart[1].total == pytest.approx(2e-3)


def test_a_late_rank_delays_but_does_not_slow() -> None:
    edges = flows((0, 1, 0, 1e6), (1, 2, 1, 1e6), deps=((1, 0),))
    result = simulate_one(edges, quiet(3), arrive=np.array([0.05, 0.0, 0.0]))
    whole = simulate_one(edges, quiet(3), arrive=np.array([1, 0, 0]))
    np.testing.assert_allclose(whole.ready, [1, 1.001], rtol=1e-9)
    np.testing.assert_allclose(result.end, [0.051, 0.052], rtol=1e-9)
    np.testing.assert_allclose(result.busy, [1e-3, 1e-3], rtol=1e-9)


def test_errors_say_what_to_mend() -> None:
    with pytest.raises(UsageError, match="can never start"):
        simulate_one(flows((0, 1, 0, 1e6), (1, 0, 0, 1e6), deps=((0, 1), (1, 0))), quiet(2))
    with pytest.raises(UsageError, match="hosts are 0"):
        quiet(2).congest(5, 1)
    with pytest.raises(UsageError, match="more ranks"):
        simulate_one(flows((0, 3, 0, 1e6)), quiet(2))
