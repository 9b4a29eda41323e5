"""The two flow engines give the same cuts, and those are minimum cuts."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from jaxcoll.errors import SynthesisError
from jaxcoll.synth.flow import INFINITE, FlowGraph, Query, members_of, scipy_cuts


def random_question(seed: int, scale: int = 1) -> tuple[FlowGraph, Query] | None:
    rand = random.Random(seed)
    nodes = rand.randint(3, 9)
    arcs = [(a, b) for a in range(nodes) for b in range(nodes) if a != b and rand.random() < 0.45]
    if not arcs:
        return None
    order = rand.sample(range(nodes), nodes)
    nsources, nsinks = rand.choice([0, 0, 1, 2]), rand.choice([0, 0, 1])
    sources, sinks = order[:nsources], order[nsources : nsources + nsinks]
    targets = order[nsources + nsinks :] if not sinks or rand.random() < 0.7 else []
    demand = [scale * rand.choice([0, 1, 3]) for _ in range(nodes)]
    groups = [(scale * rand.randint(1, 4), rand.sample(range(nodes), 2)) for _ in range(rand.choice([0, 0, 1, 2]))]
    limit = sum(demand) + sum(amount for amount, _ in groups) + scale * rand.choice([0, 0, 2])
    capacity = [scale * rand.randint(0, 6) for _ in arcs]
    graph = FlowGraph(nodes, [a for a, _ in arcs], [b for _, b in arcs])
    return graph, Query(capacity, demand, limit, targets, sources, sinks, groups, max_cuts=20)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("scale", [1, 2**33])  # the second is beyond scipy's 32 bits: networkx answers
def test_engines_agree(scale: int) -> None:
    asked = 0
    for seed in range(150):
        question = random_question(seed, scale)
        if question is not None:
            graph, query = question
            assert graph.cuts(query) == scipy_cuts(graph, query), seed
            asked += 1
    assert asked > 100


@pytest.mark.usefixtures("fast")
def test_cuts_are_minimum_cuts() -> None:
    found = 0
    for seed in range(200):
        question = random_question(seed)
        if question is None or question[1].groups or question[1].sources or question[1].sinks:
            continue
        graph, query = question
        arcs = list(zip(graph.tails.tolist(), graph.heads.tolist(), query.capacity, strict=True))
        short = {cut.target: cut for cut in graph.cuts(query)}
        for target in query.targets:
            network = nx.DiGraph()
            network.add_nodes_from([target, "s"])
            for tail, head, amount in arcs:
                network.add_edge(tail, head, capacity=amount)
            for node, amount in enumerate(query.demand):
                network.add_edge("s", node, capacity=amount)
            value = nx.maximum_flow_value(network, "s", target)
            assert (target in short) == (value < query.limit), seed
            if target in short:
                found += 1
                assert short[target].value == value
                for side in (short[target].small, short[target].large):
                    inside = set(members_of(side))
                    assert target in inside
                    crossing = sum(amount for tail, head, amount in arcs if head in inside and tail not in inside)
                    assert crossing + sum(query.demand[node] for node in inside) == value
    assert found > 50


@pytest.mark.usefixtures("fast")
def test_numbers_that_would_overflow_are_refused() -> None:
    graph = FlowGraph(2, [0], [1])
    with pytest.raises(SynthesisError, match=r"2\^60"):
        graph.cuts(Query([INFINITE], [1, 0], 1, [1]))
