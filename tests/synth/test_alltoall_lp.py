"""The parts of the all-to-all solver against independent formulations."""

from __future__ import annotations

import importlib.util
from fractions import Fraction

import networkx as nx
import numpy as np
import pytest
from needs import need

from jaxcoll.synth import arc_lp
from jaxcoll.synth.alltoall import all_to_all
from jaxcoll.synth.alltoall_cg import ColumnGeneration, Limits, certified_bound
from jaxcoll.synth.alltoall_cuts import cut_prices
from jaxcoll.synth.alltoall_net import Net, is_equitable, no_symmetry, symmetry
from jaxcoll.synth.alltoall_round import Router
from jaxcoll.synth.alltoall_routing import arc_loads, rate_bound
from jaxcoll.synth.pricing import Pricer
from jaxcoll.topology import Topology
from jaxcoll.topology.builders import overlay, parse
from jaxcoll.topology.failures import fail
from tests.synth.networks import random_net

need(importlib.util.find_spec("highspy") is not None, "highspy: pip install jaxcoll[synth]", "SYNTH")


def solve(net: Net, steps: int | None = None, tolerance: float = 1e-7) -> tuple[float, float]:
    cg = ColumnGeneration(net, Pricer(net, steps), no_symmetry(net), Limits())
    cg.seed(4)
    lp = cg.run(tolerance)
    return lp.rate, lp.bound


@pytest.mark.parametrize("seed", range(30))
def test_column_generation_equals_the_arc_lp(seed: int) -> None:
    net = random_net(seed)
    oracle = arc_lp.solve(net).throughput
    rate, bound = solve(net)
    assert rate == pytest.approx(oracle, rel=1e-6)
    assert bound == pytest.approx(oracle, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_a_bound_on_steps_equals_the_time_expanded_arc_lp(seed: int) -> None:
    net = random_net(seed, ranks=5, switches=1)
    need = int(max(len(Pricer(net).layered(np.ones(net.arcs), np.array([s])).layers) for s in range(net.ranks)))
    for steps in range(1, need + 1):
        if np.isinf(Pricer(net, steps).trees(np.ones(net.arcs), np.arange(net.ranks)).dist[: net.ranks]).any():
            continue
        assert solve(net, steps)[0] == pytest.approx(arc_lp.solve(net, steps=steps).throughput, rel=1e-6)


@pytest.mark.parametrize("failure", range(4))
def test_classes_do_not_change_the_lp(failure: int) -> None:
    base = overlay(1, 3, 8)
    topology = fail(base, failure) if failure else base
    net = Net.from_topology(topology)
    assert len(symmetry(net).reps) < 8
    assert is_equitable(net, symmetry(net))
    with_classes = all_to_all(topology, build=False)
    oracle = arc_lp.solve(net).throughput
    assert with_classes.bound == pytest.approx(oracle, rel=1e-6)
    assert with_classes.details["lp_rate"] == pytest.approx(oracle, rel=1e-6)
    plain = all_to_all(topology, build=False, use_symmetry=False)
    assert plain.bound >= oracle * (1 - 1e-9)
    assert plain.bound == pytest.approx(oracle, rel=2e-3)


def test_ranks_that_only_look_alike() -> None:
    """Regular networks fool colour refinement: the certificate notices, and the answer is still that of the arc LP."""
    for seed in range(6):
        graph = nx.random_regular_graph(3, 10, seed=seed)
        links = [(str(u), str(v), 5) for u, v in graph.edges]
        topology = Topology.of("regular", [str(v) for v in range(10)], [], links, both_ways=True)
        net = Net.from_topology(topology)
        assert len(symmetry(net).reps) == 1
        assert not is_equitable(net, symmetry(net))
        oracle = arc_lp.solve(net).throughput
        result = all_to_all(topology, build=False)
        assert result.bound >= oracle * (1 - 1e-9)
        assert result.bound == pytest.approx(oracle, rel=2e-3)


def test_any_prices_bound_the_rate() -> None:
    for seed in range(5):
        net = random_net(seed)
        oracle = arc_lp.solve(net).throughput
        rng = np.random.default_rng(seed)
        for weight in (rng.random(net.arcs), *cut_prices(net)):
            assert certified_bound(net, Pricer(net), weight)[0] >= oracle * (1 - 1e-9)


def test_a_host_is_the_cut_that_is_found_first() -> None:
    net = Net.from_topology(overlay(1, 4, 8))
    bound, _ = certified_bound(net, Pricer(net), cut_prices(net)[0])
    assert bound == pytest.approx(16.625)


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_shortest_paths(seed: int) -> None:
    net = random_net(seed, ranks=7, switches=3)
    rng = np.random.default_rng(seed)
    weight = rng.random(net.arcs)
    graph = nx.DiGraph()
    graph.add_weighted_edges_from(zip(net.tail.tolist(), net.head.tolist(), weight.tolist(), strict=True))
    forest = Pricer(net).trees(weight, np.arange(net.ranks))
    loads, want = forest.loads(), np.zeros((net.ranks, net.arcs))
    for source in range(net.ranks):
        length = nx.single_source_dijkstra_path_length(graph, source)
        for dest in range(net.ranks):
            assert forest.dist[dest, source] == pytest.approx(length[dest])
            path = forest.paths(np.array([source]), np.array([dest]))[0]
            path = path[path >= 0]
            assert weight[path].sum() == pytest.approx(length[dest])
            ends = [source, *net.head[path].tolist()]
            assert ends[-1] == dest
            assert net.tail[path].tolist() == ends[:-1]
            want[source] += np.bincount(path, minlength=net.arcs)
    for source in range(net.ranks):
        mine = slice(loads.start[source], loads.start[source + 1])
        np.testing.assert_allclose(np.bincount(loads.arc[mine], loads.units[mine], net.arcs), want[source])


def test_of_equal_paths_the_one_with_fewer_steps_wins() -> None:
    # 0 -> 1 -> 2 costs the same as 0 -> switch -> 2, which is one step.
    net = Net.from_arcs(3, 4, [(0, 1, 1), (1, 2, 1), (0, 3, 1), (3, 2, 1), (2, 0, 1)])
    forest = Pricer(net).trees(np.ones(net.arcs), np.array([0]))
    path = forest.paths(np.array([0]), np.array([2]))[0]
    assert net.head[path].tolist() == [3, 2]


def test_a_chunk_cannot_wait_in_a_switch() -> None:
    # Two switches in a row are still one step.
    net = Net.from_arcs(2, 4, [(0, 2, 4), (2, 3, 4), (3, 1, 4), (1, 0, 4)])
    assert Pricer(net, 1).trees(np.ones(net.arcs), np.array([0])).dist[1, 0] == 3
    assert solve(net, 1)[0] == pytest.approx(4.0)


@pytest.mark.parametrize("spec", ["ring:4", "star:4", "overlay:1x2x2", "rail:1x2x2"])
def test_whole_chunks_against_the_milp(spec: str) -> None:
    topology = parse(spec)
    worse = topology.with_capacity({next(iter(topology.capacity)): Fraction(7, 3)})
    net = Net.from_topology(worse)
    best = 0.0
    for chunks in (1, 2, 3):
        milp = arc_lp.solve(net, chunks=chunks, time_limit=20)
        assert milp.optimal
        best = max(best, milp.throughput)
        bound = all_to_all(worse, chunks=chunks, build=False).details["chunk_bound"]
        assert bound >= best * (1 - 1e-6)
    result = all_to_all(worse, chunks=3, build=False)
    assert result.details["chunks"] <= 3
    assert float(result.throughput) <= arc_lp.solve(net).throughput * (1 + 1e-6)
    assert float(result.throughput) >= best * (1 - 0.0213)  # chunks of unequal size may also beat the MILP's


def test_chunk_bound_moves_to_the_next_possible_rate() -> None:
    # One link of capacity 10 shared by 3 pairs: K chunks each, so 3 K chunks at best on it.
    cap, weights = np.array([10.0]), np.array([[1 / 3]])
    assert rate_bound(cap, weights, 1, 10 / 3) == pytest.approx(10 / 3)
    # Two links that share 3 units: at K = 1 one of them carries 2.
    assert rate_bound(np.array([10.0, 10.0]), np.array([[1 / 3, 1 / 3]]), 1, 20 / 3) == pytest.approx(5.0)
    assert rate_bound(np.array([10.0, 10.0]), np.array([[1 / 3, 1 / 3]]), 2, 20 / 3) == pytest.approx(20 / 3)


def test_negotiation_never_loses() -> None:
    net = Net.from_topology(fail(overlay(1, 3, 8), 3))
    router = Router(net, Pricer(net), 1 / net.cap, 3, lambda: False)
    first = router.first()
    better = router.improve(first, 100.0, patience=2)
    assert better.rate(net) >= first.rate(net)
    again = arc_loads(better.path, better.weight, net.arcs)
    np.testing.assert_array_equal(better.load, again)
    assert router.improve(better, better.rate(net), patience=2).rate(net) == better.rate(net)
