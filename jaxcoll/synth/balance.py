"""Switches with more capacity in than out (or the reverse): what can't be used is cut off before anything else.

A switch only forwards, so it never takes in more than it gives out; splitting it off without loss needs equal sums.
Which links to cut matters: first those that no cut of the network misses at the optimal rate, as far as flows allow;
what must still go is taken from all links of the side in proportion, and then the rate may fall below the max-flow
bound (which itself may be out of reach for switches that can't duplicate: the gap reported is against that bound).
"""

from __future__ import annotations

from fractions import Fraction

from jaxcoll.synth.cuts import CutPool, seed_cuts
from jaxcoll.synth.flow import Query
from jaxcoll.synth.rate import Network, Tick, optimal_rate
from jaxcoll.topology.graph import Capacity, Topology


def balanced(topology: Topology, tick: Tick) -> Topology:
    """The topology with every switch cut to equal capacity in and out."""
    network = Network.of(topology)
    graph = network.graph()
    pool = CutPool(network.nodes, network.ranks)
    seed_cuts(pool, topology)
    rate = optimal_rate(network, graph, pool, tick)
    scale = rate.denominator
    capacity = [amount * scale for amount in network.capacity]
    ends = list(zip(network.tails.tolist(), network.heads.tolist(), strict=True))
    total = network.ranks * rate.numerator
    demand = [rate.numerator] * network.ranks + [0] * (network.nodes - network.ranks)
    for switch in topology.unbalanced():
        arcs, surplus = _surplus(switch, ends, capacity)
        for arc in sorted(arcs, key=lambda arc: -capacity[arc]):
            cut = min(surplus, capacity[arc])
            if cut > 0:
                tick(None)
                tail, head = ends[arc]
                targets = [rank for rank in range(network.ranks) if rank != tail]
                query = Query(capacity, demand, total + cut, targets, (tail,), (head,), max_cuts=network.ranks)
                cut = min([cut, *(max(0, short.value - total) for short in graph.cuts(query))])
                capacity[arc] -= cut
                surplus -= cut
    for _ in topology.unbalanced():  # a switch may unbalance the next; each pass settles one for good
        for switch in range(network.ranks, network.nodes):
            _shave(switch, ends, capacity)
    changes: dict[tuple[int, int], Capacity | None] = {}
    for arc, link in enumerate(ends):
        if capacity[arc] != network.capacity[arc] * scale:
            changes[link] = Fraction(capacity[arc], scale) * network.unit if capacity[arc] else None
    return topology.with_capacity(changes)


def _surplus(switch: int, ends: list[tuple[int, int]], capacity: list[int]) -> tuple[list[int], int]:
    """(arcs of the side with more capacity, how much more)."""
    inward = [arc for arc, (_, head) in enumerate(ends) if head == switch]
    outward = [arc for arc, (tail, _) in enumerate(ends) if tail == switch]
    more = sum(capacity[arc] for arc in inward) - sum(capacity[arc] for arc in outward)
    return (inward, more) if more >= 0 else (outward, -more)


def _shave(switch: int, ends: list[tuple[int, int]], capacity: list[int]) -> None:
    """Takes the surplus of a switch from all arcs of its side in proportion."""
    arcs, surplus = _surplus(switch, ends, capacity)
    total = sum(capacity[arc] for arc in arcs)
    for arc in sorted(arcs, key=lambda arc: capacity[arc]):
        cut = min(capacity[arc], -(-capacity[arc] * surplus // total)) if total else 0
        total -= capacity[arc]
        capacity[arc] -= cut
        surplus -= cut
