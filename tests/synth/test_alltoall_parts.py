"""Bundles of parts, the solve without an LP, and the contraction of free arcs."""

from __future__ import annotations

import importlib.util

import networkx as nx
import numpy as np
import pytest
from needs import need

from jaxcoll.schedule import check
from jaxcoll.synth.alltoall import all_to_all
from jaxcoll.synth.alltoall_cg import certified_bound
from jaxcoll.synth.alltoall_cuts import tight_cuts
from jaxcoll.synth.alltoall_net import Net, strong_components
from jaxcoll.synth.alltoall_routing import Routing
from jaxcoll.synth.pricing import Pricer
from jaxcoll.topology.builders import overlay
from jaxcoll.topology.failures import fail

need(importlib.util.find_spec("highspy") is not None, "highspy: pip install jaxcoll[synth]", "SYNTH")


def small() -> Routing:
    """Pair (0, 1) in two bundles on different paths, pair (1, 0) in two on one path."""
    source, dest, weight = np.array([0, 1, 0, 1]), np.array([1, 0, 1, 0]), np.array([3, 1, 1, 3])
    return Routing.of(4, source, dest, weight, np.array([[0], [1], [2], [1]], np.int32), 3)


def test_parts_are_regrouped_and_equal_paths_joined() -> None:
    routing = small()
    assert routing.load.tolist() == [3, 4, 1]
    assert routing.with_parts(4, 3) is routing
    finer = routing.with_parts(8, 3)
    assert finer.load.tolist() == [6, 8, 2]
    coarse = routing.with_parts(1, 3)
    assert len(coarse.weight) == 2
    assert coarse.load.sum() == 2
    tidy = routing.tidy()
    assert sorted(tidy.weight.tolist()) == [1, 3, 4]
    assert tidy.load.tolist() == routing.load.tolist()
    assert (routing.most_chunks(), tidy.most_chunks()) == (2, 2)


@pytest.mark.parametrize("chunks", [1, 2, 3, 10])
def test_no_pair_has_more_chunks_than_asked(chunks: int) -> None:
    result = all_to_all(fail(overlay(1, 3, 8), 3), chunks=chunks)
    assert result.schedule is not None
    check(result.schedule)
    assert result.details["chunks"] <= chunks
    moved = [(c.src, c.dst) for c in result.schedule.chunks if c.src != c.dst]
    assert max(map(moved.count, set(moved))) == result.details["chunks"]


def test_nothing_moves_where_nothing_is_contested() -> None:
    base = all_to_all(overlay(1, 3, 8))
    again = all_to_all(fail(overlay(1, 3, 8), 1), warm=base.warm)
    assert again.schedule is not None
    assert base.schedule is not None
    assert again.schedule.columns is base.schedule.columns
    assert again.schedule.name == "all_to_all:overlay:1x3x8:fail1"
    assert (again.throughput, again.details["lp_rate"]) == (base.throughput, 0.0)


@pytest.mark.parametrize("seed", range(6))
def test_components_and_distances_are_those_of_the_whole_graph(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tail, head = rng.integers(12, size=(2, 20))
    label = strong_components(12, tail, head)
    graph = nx.DiGraph()
    graph.add_nodes_from(range(12))
    graph.add_edges_from(zip(tail.tolist(), head.tolist(), strict=True))
    want = {frozenset(part) for part in nx.strongly_connected_components(graph)}
    assert {frozenset(np.flatnonzero(label == name).tolist()) for name in set(label.tolist())} == want
    net = Net.from_topology(fail(overlay(1, 3, 8), 2))
    weight = rng.random(net.arcs) * (rng.random(net.arcs) < 0.3)
    whole = Pricer(net).trees(weight, np.arange(net.ranks)).total()
    np.testing.assert_allclose(certified_bound(net, Pricer(net), weight)[1], whole)


def test_cuts_bound_what_prices_prove() -> None:
    net = Net.from_topology(fail(overlay(1, 3, 8), 2))
    for bound, price in tight_cuts(net):
        assert certified_bound(net, Pricer(net), price)[0] <= bound * (1 + 1e-9)
