"""The array form of a topology that the AllToAll solvers work on, and its symmetry classes.

Ranks are nodes 0..ranks-1, switches follow. An arc is a directed link; parallel links are merged by the topology.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from jaxcoll.topology import Topology

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Net:
    """A directed capacitated graph. `tail`, `head`: int64 [arcs]; `capacity`: exact, one a directed arc, in the
    topology's unit."""

    ranks: int
    nodes: int
    tail: IntArray
    head: IntArray
    capacity: tuple[Fraction, ...]
    names: tuple[str, ...] = field(default=(), compare=False)

    @property
    def arcs(self) -> int:
        return len(self.capacity)

    @cached_property
    def cap(self) -> FloatArray:
        """Capacities as float64 [arcs]."""
        ratios = (c.numerator / c.denominator for c in self.capacity)
        return np.fromiter(ratios, np.float64, len(self.capacity))

    @cached_property
    def key(self) -> IntArray:
        """tail * nodes + head of every arc, int64 [arcs], increasing."""
        return self.tail * self.nodes + self.head

    def name(self, node: int) -> str:
        """What to call a node in a message."""
        return self.names[node] if self.names else str(node)

    @staticmethod
    def from_arcs(
        ranks: int, nodes: int, arcs: Iterable[tuple[int, int, Fraction | int]], names: Iterable[str] = ()
    ) -> Net:
        """Build from (tail, head, capacity) triples; equal (tail, head) pairs add up."""
        total: dict[tuple[int, int], Fraction] = {}
        for u, v, c in arcs:
            total[u, v] = total.get((u, v), Fraction(0)) + Fraction(c)
        keys = sorted(total)
        ends = np.array(keys, dtype=np.int64).reshape(-1, 2)
        return Net(ranks, nodes, ends[:, 0].copy(), ends[:, 1].copy(), tuple(total[k] for k in keys), tuple(names))

    @staticmethod
    def from_topology(topology: Topology, like: Net | None = None) -> Net:
        """The topology's own numbering, links sorted by (tail, head). `like`: an earlier state of the network, whose
        numbers are taken over where the links are the same."""
        nodes, count = len(topology.nodes), len(topology.capacity)
        tail, head = np.fromiter(chain.from_iterable(topology.capacity), np.int64, 2 * count).reshape(count, 2).T
        order = np.argsort(tail * nodes + head)
        capacity = tuple(map(list(topology.capacity.values()).__getitem__, order.tolist()))
        net = Net(topology.nranks, nodes, tail[order], head[order], capacity, topology.nodes)
        if like is not None and like.nodes == nodes and np.array_equal(like.key, net.key):
            cap = like.cap.copy()
            for a in [a for a, (new, old) in enumerate(zip(capacity, like.capacity, strict=True)) if new is not old]:
                cap[a] = float(capacity[a])
            net.__dict__["cap"] = cap
        return net


@dataclass(frozen=True)
class Symmetry:
    """Classes of ranks and arcs that the network's structure cannot tell apart.

    `arc_class`: int64 [arcs]; `arc_count`: members a class; `reps`: one source rank a class; `rep_class`: class of
    every rank, int64 [ranks];
    `rank_count`: members a rank class. The all-to-all LP has an optimum that is constant on the classes of an
    automorphism group (average any
    optimum over the group), so one source a class and one capacity row an arc class are enough.
    """

    arc_class: IntArray
    arc_count: IntArray
    reps: IntArray
    rank_class: IntArray
    rank_count: IntArray

    @property
    def trivial(self) -> bool:
        return len(self.reps) == len(self.rank_class)


def no_symmetry(net: Net) -> Symmetry:
    """Every rank and every arc alone in its class."""
    ranks, arcs = np.arange(net.ranks), np.arange(net.arcs)
    return Symmetry(arcs, np.ones(net.arcs, np.int64), ranks, ranks, np.ones(net.ranks, np.int64))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 64-bit finaliser: spreads every input bit over the word, so that sums of mixed colours act as multiset
    hashes."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def refine(net: Net, individual: int | None = None) -> tuple[IntArray, IntArray]:
    """Colour refinement (1-dimensional Weisfeiler-Leman) over capacities, in both directions: (node colours [nodes],
    arc colours [arcs]).

    Nodes of different colours are in different orbits; the converse holds on the usual networks and is checked by the
    solver, not assumed.
    `individual` gives one node a colour of its own first.
    """
    _, cap = np.unique(net.cap, return_inverse=True)
    cap_key = _mix(cap.astype(np.uint64) + np.uint64(0x9E37))
    colour = (np.arange(net.nodes) >= net.ranks).astype(np.int64)
    if individual is not None:
        colour[individual] = 2
    count = len(np.unique(colour))
    for _ in range(net.nodes):
        key = _mix(colour.astype(np.uint64) + np.uint64(1))
        sums = np.zeros(net.nodes, np.uint64)
        np.add.at(sums, net.head, _mix(key[net.tail] ^ cap_key))
        out = np.zeros(net.nodes, np.uint64)
        np.add.at(out, net.tail, _mix(key[net.head] + cap_key))
        _, colour = np.unique(_mix(_mix(key + sums) ^ out), return_inverse=True)
        if colour.max() + 1 == count:
            break
        count = int(colour.max()) + 1
    triple = (colour[net.tail] * count + colour[net.head]) * (int(cap.max()) + 1 if len(cap) else 1) + cap
    return colour, np.unique(triple, return_inverse=True)[1]


def symmetry(net: Net) -> Symmetry:
    """The classes that colour refinement finds."""
    colour, arc_class = refine(net)
    _, reps, rank_class, count = np.unique(
        colour[: net.ranks], return_index=True, return_inverse=True, return_counts=True
    )
    if len(reps) == net.ranks:
        return no_symmetry(net)
    return Symmetry(arc_class, np.bincount(arc_class), reps, rank_class, count)


def is_equitable(net: Net, sym: Symmetry, rounds: int = 8, block: int = 32) -> bool:
    """Whether the classes hold for (source, node) pairs too, so that the LP over classes is the LP.

    Every source in turn gets a colour of its own. Sources of one class must then see the same multiset of node
    colours, and arcs of one class the
    same multiset, over all sources, of (tail colour, head colour). Colours are hashes that mean the same for every
    source. Costs some
    ranks * arcs * rounds operations; a false "True" needs a collision of 64-bit hashes, or classes that part only
    after `rounds` rounds.
    """
    cap = _mix(np.unique(net.cap, return_inverse=True)[1].astype(np.uint64) + np.uint64(0x51))[:, None]
    into, out = np.argsort(net.head, kind="stable"), np.argsort(net.tail, kind="stable")
    at_head = np.flatnonzero(np.diff(net.head[into], prepend=-1))
    at_tail = np.flatnonzero(np.diff(net.tail[out], prepend=-1))
    seen = np.zeros(net.arcs, np.uint64)
    profile = np.zeros(net.ranks, np.uint64)
    start = (np.arange(net.nodes) >= net.ranks).astype(np.uint64)[:, None]
    for first in range(0, net.ranks, block):
        source = np.arange(first, min(first + block, net.ranks))
        colour = np.repeat(_mix(start + np.uint64(1)), len(source), axis=1)
        colour[source, np.arange(len(source))] = np.uint64(7)
        for _ in range(rounds):
            fresh = _mix(colour)
            fresh[net.head[into[at_head]]] += np.add.reduceat(_mix(colour[net.tail[into]] ^ cap[into]), at_head, axis=0)
            fresh[net.tail[out[at_tail]]] ^= _mix(
                np.add.reduceat(_mix(colour[net.head[out]] + cap[out]), at_tail, axis=0)
            )
            colour = fresh
        profile[source] = _mix(colour).sum(axis=0, dtype=np.uint64)
        ends = _mix(_mix(colour[net.tail]) + colour[net.head])
        seen += ends.sum(axis=1, dtype=np.uint64)
    alike = (profile == profile[sym.reps][sym.rank_class]).all()
    member = np.zeros(len(sym.arc_count), np.uint64)
    member[sym.arc_class] = seen
    return bool(alike and (seen == member[sym.arc_class]).all())


def strong_components(nodes: int, tail: IntArray, head: IntArray) -> IntArray:
    """A label 0.. for every node, int64 [nodes]; equal for nodes that reach each other. Tarjan's algorithm, without
    recursion."""
    order = np.argsort(tail, kind="stable")
    near = head[order].tolist()
    start = np.searchsorted(tail[order], np.arange(nodes + 1)).tolist()
    index, low, label = [-1] * nodes, [0] * nodes, [-1] * nodes
    place, stack = start[:-1], []
    clock = found = 0
    for first in range(nodes):
        if index[first] >= 0:
            continue
        calls = [first]
        while calls:
            v = calls[-1]
            if index[v] < 0:
                index[v] = low[v] = clock
                clock += 1
                stack.append(v)
            while place[v] < start[v + 1]:
                w = near[place[v]]
                place[v] += 1
                if index[w] < 0:
                    calls.append(w)
                    break
                if label[w] < 0:
                    low[v] = min(low[v], index[w])
            else:
                calls.pop()
                if low[v] == index[v]:
                    while label[v] < 0:
                        label[stack.pop()] = found
                    found += 1
                if calls:
                    low[calls[-1]] = min(low[calls[-1]], low[v])
    return np.array(label)
