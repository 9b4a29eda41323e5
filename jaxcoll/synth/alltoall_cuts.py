"""Cuts that a look at the network already suggests, as arc prices for the column generation to start from.

A cut with the node set S bounds the rate by capacity leaving S / (ranks in S * ranks outside). As arc prices it is 1
on the arcs that leave S. Tried are
the clusters of single linkage (join nodes over ever thinner links: ranks, hosts, racks, ...), outward and inward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxcoll.synth.alltoall_net import FloatArray, Net


def clusters(net: Net) -> list[NDArray[np.bool_]]:
    """Node sets joined by links of at least some capacity, for every capacity, and every single rank; bool [nodes]
    each."""
    parent = list(range(net.nodes))
    member = [np.arange(net.nodes) == v for v in range(net.nodes)]
    found = member[: net.ranks]

    def root(v: int) -> int:
        while parent[v] != v:
            parent[v] = v = parent[parent[v]]
        return v

    order = np.argsort(-net.cap, kind="stable")
    tail, head, cap = net.tail[order].tolist(), net.head[order].tolist(), net.cap[order]
    for i, (u, v) in enumerate(zip(tail, head, strict=True)):
        a, b = root(u), root(v)
        if a != b:
            parent[b] = a
            member[a] = member[a] | member[b]
        # Links of one capacity join at once: what a prefix of them joins means nothing.
        if i + 1 == len(tail) or cap[i + 1] < cap[i]:
            live = {root(x) for x in range(net.nodes)}
            found += [member[r] for r in sorted(live) if 1 < member[r][: net.ranks].sum() < net.ranks]
            if len(live) == 1:
                break
    return found


def cut_prices(net: Net, keep: int = 4) -> list[FloatArray]:
    """Prices (float64 [arcs]) of the `keep` tightest clusters' cuts, the tightest first."""
    found: list[tuple[float, int, FloatArray]] = []
    seen: set[bytes] = set()
    for inside in clusters(net):
        key = np.packbits(inside).tobytes()
        if key in seen:
            continue
        seen.add(key)
        ranks = int(inside[: net.ranks].sum())
        for leaves in (inside[net.tail] & ~inside[net.head], ~inside[net.tail] & inside[net.head]):
            bound = float(net.cap[leaves].sum()) / (ranks * (net.ranks - ranks))
            found.append((bound, len(found), leaves.astype(float)))
            if len(found) > 16 * keep:
                found = sorted(found, key=lambda f: f[:2])[:keep]
    return [price for _, _, price in sorted(found, key=lambda f: f[:2])[:keep]]
