"""Cuts that a look at the network already suggests, as arc prices for the column generation to start from.

A cut with the node set S bounds the rate by capacity leaving S / (ranks in S * ranks outside). As arc prices it is 1
on the arcs that leave S. Tried are
the clusters of single linkage (join nodes over ever thinner links: ranks, hosts, racks, ...), outward and inward.
"""

from __future__ import annotations

import numpy as np

from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net


def levels(net: Net) -> list[IntArray]:
    """Node sets joined by links of at least some capacity, for every capacity at which sets join, as a label a node,
    int64 [nodes] each; every node alone at first. The last level, where all are one, is left out."""
    parent = list(range(net.nodes))

    def root(v: int) -> int:
        while parent[v] != v:
            parent[v] = v = parent[parent[v]]
        return v

    found, left, joined = [np.arange(net.nodes)], net.nodes, False
    order = np.argsort(-net.cap, kind="stable")
    tail, head, cap = net.tail[order].tolist(), net.head[order].tolist(), net.cap[order].tolist()
    for i, (u, v) in enumerate(zip(tail, head, strict=True)):
        a, b = root(u), root(v)
        if a != b:
            parent[b], left, joined = a, left - 1, True
            if left == 1:
                break
        # Links of one capacity join at once: what a prefix of them joins means nothing.
        if joined and i + 1 < len(tail) and cap[i + 1] < cap[i]:
            found.append(np.array([root(x) for x in range(net.nodes)]))
            joined = False
    return found


def tight_cuts(net: Net, keep: int = 4) -> list[tuple[float, FloatArray]]:
    """(bound of the rate, prices float64 [arcs]) of the `keep` tightest clusters' cuts, the tightest first. The prices
    are scaled so that what crosses the cut pays 1 in all: their sum over all pairs' distances is at least 1."""
    best: list[tuple[float, int, int, bool]] = []
    found = levels(net)
    for number, label in enumerate(found):
        ranks = np.bincount(label[: net.ranks], minlength=net.nodes)
        inside = np.flatnonzero((ranks > 0) & (ranks < net.ranks))
        cross = label[net.tail] != label[net.head]
        for outward in (True, False):
            ends = (net.tail if outward else net.head)[cross]
            total = np.bincount(label[ends], net.cap[cross], net.nodes)[inside]
            bound = total / (ranks[inside] * (net.ranks - ranks[inside]))
            for at in np.argsort(bound, kind="stable")[: 2 * keep]:
                best.append((float(bound[at]), number, int(inside[at]), outward))
    cuts: list[tuple[float, FloatArray]] = []
    for bound, number, name, outward in sorted(best):
        inside = found[number] == name
        leaves = inside[net.tail] & ~inside[net.head] if outward else ~inside[net.tail] & inside[net.head]
        if not any(np.array_equal(leaves, price > 0) for _, price in cuts):
            ranks = int(inside[: net.ranks].sum())
            cuts.append((bound, leaves / (ranks * (net.ranks - ranks))))
        if len(cuts) == keep:
            break
    return cuts


def cut_prices(net: Net) -> list[FloatArray]:
    """The prices of `tight_cuts` alone."""
    return [price for _, price in tight_cuts(net)]
