"""Phase 1: the optimal rate, exactly, and how many trees per root reach it.

Every rank broadcasts at rate x. By Edmonds' theorem (with the switches split off, MCCL 4.3 phase 1) that works iff
every set X of nodes that holds a rank can take x from each rank outside: capacity into X >= x * ranks outside X. So the
optimum is the least ratio over all cuts. It is found as by Newton: start from a ratio that some cut gives; ask by
maximum flows whether any cut is worse; if so take its ratio, which is smaller, and ask again. All in integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from jaxcoll.errors import SynthesisError
from jaxcoll.synth.cuts import CutPool, inflow, mask_matrix
from jaxcoll.synth.flow import INFINITE, Cut, FlowGraph, Query
from jaxcoll.topology.graph import Topology

MULTIPLES_TRIED = 4
Tick = Callable[[float | None], None]


@dataclass(frozen=True)
class Network:
    """A topology in integers: `capacity[i]` * `unit` is arc i's capacity."""

    nodes: int
    ranks: int
    tails: NDArray[np.int32]
    heads: NDArray[np.int32]
    capacity: list[int]
    unit: Fraction

    @staticmethod
    def of(topology: Topology) -> Network:
        """The topology's arcs, all capacities divided by their gcd."""
        tails, heads, capacity, unit = topology.integers()
        if sum(capacity) * topology.nranks >= INFINITE:
            raise SynthesisError(
                f"topology {topology.name!r}: capacities with a common unit of {unit} make numbers beyond 2^60; "
                "round them (Topology.with_capacity, or from_measurements with fewer bits)"
            )
        return Network(
            len(topology.nodes), topology.nranks, np.array(tails, np.int32), np.array(heads, np.int32), capacity, unit
        )

    def graph(self) -> FlowGraph:
        """For flow questions."""
        return FlowGraph(self.nodes, self.tails.tolist(), self.heads.tolist())


@dataclass(frozen=True)
class Packing:
    """What the trees must fit into: `trees` trees per root, each of rate `tree_rate`; arc i fits `room[i]`."""

    trees: int
    tree_rate: Fraction  # in units of the network
    room: list[int]


def order_targets(ranks: int, first: list[int]) -> list[int]:
    """All ranks, those that failed before first: a failing check then ends soon."""
    lead = list(dict.fromkeys(rank for rank in reversed(first) if 0 <= rank < ranks))
    known = set(lead)
    return lead + [rank for rank in range(ranks) if rank not in known]


def violated(
    graph: FlowGraph, ranks: int, capacity: list[int], trees: int, first: list[int], max_cuts: int
) -> list[Cut]:
    """Cuts that can't take `trees` from every rank outside."""
    demand = [trees] * ranks + [0] * (graph.nodes - ranks)
    query = Query(capacity, demand, ranks * trees, order_targets(ranks, first), max_cuts=max_cuts)
    return graph.cuts(query)


def optimal_rate(network: Network, graph: FlowGraph, pool: CutPool, tick: Tick) -> Fraction:
    """The greatest x, in units of the network; the cuts that fix it are in the pool afterwards."""
    if network.ranks == 1:
        return Fraction(0)
    rate = cut_rate(network, pool.masks)
    first: list[int] = []
    while True:
        tick(None)
        scaled = [amount * rate.denominator for amount in network.capacity]
        found = violated(graph, network.ranks, scaled, rate.numerator, first, max_cuts=4)
        if not found:
            return rate
        first += [cut.target for cut in found]
        masks = [mask for cut in found for mask in (cut.small, cut.large)]
        for mask in masks:
            pool.add(mask)
        rate = cut_rate(network, masks)


def cut_rate(network: Network, masks: list[int]) -> Fraction:
    """The least rate that any of these cuts allows."""
    inside = mask_matrix(masks, network.nodes)
    flows = inflow(inside, network.tails, network.heads, np.array(network.capacity, np.int64)).tolist()
    outside = (network.ranks - inside[:, : network.ranks].sum(axis=1)).tolist()
    best = min(range(len(flows)), key=lambda i: flows[i] / outside[i])  # close enough to narrow it down
    near = flows[best] / outside[best] * (1 + 1e-9)
    return min(Fraction(flow, count) for flow, count in zip(flows, outside, strict=True) if flow / count <= near)


def rate_packing(network: Network, rate: Fraction, trees: int) -> Packing:
    """`trees` trees per root at `rate` together, capacities rounded down to whole trees (nothing is checked)."""
    return Packing(trees, rate / trees, _room(network, rate / trees))


def _room(network: Network, tree_rate: Fraction) -> list[int]:
    """How many trees of that rate each arc carries."""
    num, den = tree_rate.numerator, tree_rate.denominator
    return [amount * den // num for amount in network.capacity]


def exact_packing(network: Network, rate: Fraction) -> Packing:
    """The packing that uses every capacity to the full: trees so thin that all capacities are whole multiples."""
    scaled = [amount * rate.denominator for amount in network.capacity]
    divisor = math.gcd(rate.numerator, *scaled)
    trees = rate.numerator // divisor
    return Packing(trees, rate / trees, [amount // divisor for amount in scaled])


def small_packing(network: Network, graph: FlowGraph, rate: Fraction, pool: CutPool, tick: Tick) -> Packing:
    """A packing of few trees at the optimal rate.

    Capacities may be rounded down to whole trees as long as no cut becomes too small. The cuts that fix the rate have
    nothing to spare, so their arcs must be whole multiples; that gives the least candidate. Where another cut turns out
    too small, it too must be whole (if it is tight) or the candidate's multiples are tried, up to `exact_packing`.
    """
    full = exact_packing(network, rate)
    base, multiple, first = 1, 1, []
    seen = 0
    while True:
        base, seen = math.lcm(base, whole_trees(network, rate, pool.masks[seen:])), len(pool.masks)
        if base * multiple >= full.trees or multiple > MULTIPLES_TRIED:
            return full
        trees = base * multiple
        room = _room(network, rate / trees)
        tick(None)
        found = violated(graph, network.ranks, room, trees, first, max_cuts=2)
        if not found:
            return Packing(trees, rate / trees, room)
        first += [cut.target for cut in found]
        masks = [mask for cut in found for mask in (cut.small, cut.large)]
        fresh = [mask for mask in masks if pool.add(mask)]
        if base % whole_trees(network, rate, fresh) == 0:
            multiple += 1


def whole_trees(network: Network, rate: Fraction, masks: list[int]) -> int:
    """The least number of trees for which every arc into the tight cuts among `masks` carries whole trees."""
    if not masks:
        return 1
    capacity = np.array(network.capacity, np.int64)
    inside = mask_matrix(masks, network.nodes)
    flows = inflow(inside, network.tails, network.heads, capacity).tolist()
    outside = (network.ranks - inside[:, : network.ranks].sum(axis=1)).tolist()
    result, amounts = 1, set[int]()
    for side, flow, count in zip(inside, flows, outside, strict=True):
        if flow == rate * count:
            amounts.update(np.unique(capacity[side[network.heads] & ~side[network.tails]]).tolist())
    for amount in amounts:
        result = math.lcm(result, (amount / rate).denominator)
    return result


def fixed_packing(network: Network, graph: FlowGraph, rate: Fraction, trees: int, tick: Tick) -> Packing:
    """The fastest packing of exactly `trees` trees per root (ForestColl's fixed-k variant).

    Only rates at which some capacity is a whole number of trees can be optimal. Bisection keeps `low` feasible and
    always moves it up to the next such rate, so it ends exactly.
    """

    def feasible(tree_rate: Fraction) -> bool:
        tick(None)
        found = violated(graph, network.ranks, _room(network, tree_rate), trees, first, max_cuts=1)
        first.extend(cut.target for cut in found)
        return not found

    def raised(tree_rate: Fraction) -> Fraction:
        room = _room(network, tree_rate)
        rates = (Fraction(amount, count) for amount, count in zip(network.capacity, room, strict=True) if count)
        return min(rates, default=high)

    first: list[int] = []
    high = rate / trees
    if feasible(high):
        return Packing(trees, high, _room(network, high))
    low = high / 2
    while not feasible(low):
        low, high = low / 2, low
    low = raised(low)
    while True:
        rates = (
            Fraction(amount, count - 1) if count * low == amount else Fraction(amount, count)
            for amount, count in zip(network.capacity, _room(network, low), strict=True)
            if count > 1 or (count == 1 and amount > low)
        )
        after = min(rates, default=high)  # no arc carries a tree of any higher rate
        if after >= high:
            break
        middle = (low + high) / 2
        probe = raised(middle) if middle > after else after
        if probe < high and feasible(probe):
            low = probe
        else:
            high = min(high, middle if middle > after else after)
    return Packing(trees, low, _room(network, low))
