"""What a tree-packing solve returns when its time is up before it has trees: shortest ones, or an earlier solve's."""

from __future__ import annotations

from collections import deque
from fractions import Fraction

import numpy as np

from jaxcoll.synth.evaluate import neighbours, pair_route
from jaxcoll.synth.forest import History
from jaxcoll.synth.trees import Tree
from jaxcoll.topology.graph import Topology


def simple_bound(topology: Topology) -> Fraction:
    """A bound of the AllGather rate without any flow: every rank receives ranks - 1 blocks and sends one."""
    ranks = topology.nranks
    into, out = [Fraction(0)] * ranks, [Fraction(0)] * ranks
    for (tail, head), amount in topology.capacity.items():
        if head < ranks:
            into[head] += amount
        if tail < ranks:
            out[tail] += amount
    return min(min(into) / max(1, ranks - 1), min(out))


def shortest_trees(topology: Topology, warm: History | None) -> tuple[list[Tree], Fraction]:
    """Spanning trees that need no search, sorted by root, and the rate that they reach (the busiest link decides).

    The trees of `warm` where it is of the same nodes and all their hops still exist, else breadth first: fewest hops
    between ranks, each hop through switches alone.
    """
    near = _next_ranks(topology)
    trees = [] if warm is None or (warm.nodes, warm.nranks) != (topology.nodes, topology.nranks) else warm.trees
    hops = {(int(a), int(b)) for tree in trees for a, b in tree.edges}
    if not trees or any(b not in near[a] for a, b in hops):
        trees = [Tree(root, 1, _grown(root, near)) for root in range(topology.nranks)]
    trees = sorted(trees, key=lambda tree: tree.root)
    return trees, _rate(topology, trees)


def _next_ranks(topology: Topology) -> list[dict[int, None]]:
    """For every rank the ranks that it reaches through switches alone, nearest first."""
    heads = neighbours(topology)
    found: list[dict[int, None]] = []
    for rank in range(topology.nranks):
        seen, queue, ranks = {rank}, deque([rank]), dict[int, None]()
        while queue:
            for head in heads.get(queue.popleft(), ()):
                if head in seen:
                    continue
                seen.add(head)
                if topology.is_switch(head):
                    queue.append(head)
                else:
                    ranks[head] = None
        found.append(ranks)
    return found


def _grown(root: int, near: list[dict[int, None]]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    seen, queue, edges = {root}, deque([root]), list[tuple[int, int]]()
    while queue:
        tail = queue.popleft()
        # Roots begin with different neighbours, so that they don't all lean on the same ranks.
        for head in sorted(near[tail], key=lambda rank: (rank - root) % len(near)):
            if head not in seen:
                seen.add(head)
                edges.append((tail, head))
                queue.append(head)
    return np.array(edges, np.int32).reshape(-1, 2)


def _rate(topology: Topology, trees: list[Tree]) -> Fraction:
    ranks = topology.nranks
    crossing = np.zeros((ranks, ranks), np.int64)
    for tree in trees:
        crossing[tree.edges[:, 0], tree.edges[:, 1]] += tree.count
    heads, load = neighbours(topology), dict[tuple[int, int], int]()
    for tail, head in np.argwhere(crossing).tolist():
        for link in pair_route(topology, tail, head, heads):
            load[link] = load.get(link, 0) + int(crossing[tail, head])
    per_root = sum(tree.count for tree in trees if tree.root == 0)
    return min((topology.capacity[link] / amount for link, amount in load.items()), default=Fraction(0)) * per_root
