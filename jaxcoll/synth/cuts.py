"""Cuts that have mattered, kept for reuse.

A cut is a set X of nodes, held as a bit mask, into which every rank outside must be able to send. Packing can go wrong
only at cuts that are nearly full, and those are few (hosts, single ranks, one degraded region). Everything here works
against the known cuts, which is cheap, and asks for a maximum flow only to find out whether an unknown cut is in the
way; what the flow finds joins the pool. The pool also carries over to the next solve of a changed network.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from jaxcoll.topology.graph import Topology

EXACT_FLOAT = 2.0**52  # whole numbers below it, and their sums, are exact in float64


class CutPool:
    """A set of cuts in the order in which they were found; each has a rank inside and a rank outside."""

    def __init__(self, nodes: int, ranks: int, masks: Iterable[int] = ()):
        self.nodes, self.ranks = nodes, ranks
        self.masks: list[int] = []
        self._known: set[int] = set()
        self._rank_mask = (1 << ranks) - 1
        for mask in masks:
            self.add(mask)

    def add(self, mask: int) -> bool:
        """Adds a cut; False when it was known, or separates no ranks."""
        inside = mask & self._rank_mask
        if mask in self._known or inside in (0, self._rank_mask):
            return False
        self._known.add(mask)
        self.masks.append(mask)
        return True

    def matrix(self) -> NDArray[np.bool_]:
        """[cuts, nodes]: True where the node lies inside."""
        return mask_matrix(self.masks, self.nodes)

    def ranks_only(self) -> CutPool:
        """The cuts as seen once the switches are gone."""
        return CutPool(self.ranks, self.ranks, (mask & self._rank_mask for mask in self.masks))


def mask_matrix(masks: list[int], nodes: int) -> NDArray[np.bool_]:
    """[masks, nodes] of the bits of the masks."""
    return np.unpackbits(pack_masks(masks, nodes), axis=1, bitorder="little")[:, :nodes].astype(np.bool_)


def pack_masks(masks: list[int], nodes: int) -> NDArray[np.uint8]:
    """[masks, ceil(nodes / 8)] bytes, lowest bit first."""
    width = (nodes + 7) // 8
    return np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in masks), np.uint8).reshape(-1, width)


def inflow(
    inside: NDArray[np.bool_], tails: NDArray[np.integer], heads: NDArray[np.integer], capacity: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Capacity into each cut: inside bool[cuts, nodes] -> int64[cuts]."""
    nodes, size = inside.shape[1], inside.sum(axis=1)
    result = np.zeros(len(inside), np.int64)
    # Most cuts hold one node or leave one out; what enters those are sums per node. (bincount would go through floats.)
    for only, ends, wanted in ((size == 1, heads, True), (size == nodes - 1, tails, False)):
        total = np.zeros(nodes, np.int64)
        np.add.at(total, ends, capacity)
        where = np.nonzero(only)[0]
        if len(where):
            result[where] = total[(inside[where] == wanted).argmax(axis=1)]
    rest = np.nonzero((size != 1) & (size != nodes - 1))[0]
    dense_pays = len(rest) > 8 and nodes * nodes <= 16 * len(capacity)
    if dense_pays and float(capacity.sum()) < EXACT_FLOAT:
        dense = np.zeros((nodes, nodes))
        np.add.at(dense, (tails, heads), capacity)
        some = inside[rest].astype(np.float64)
        result[rest] = (((1.0 - some) @ dense) * some).sum(axis=1).astype(np.int64)
    else:
        for row in rest.tolist():  # [cuts, arcs] at once would be large
            side = inside[row]
            result[row] = capacity[side[heads] & ~side[tails]].sum()
    return result


def seed_cuts(pool: CutPool, topology: Topology) -> None:
    """The usual bottlenecks: one rank or host (with the switches that serve it alone), and all but that."""
    everything = (1 << pool.nodes) - 1
    groups: dict[int, int] = {}
    for rank, host in enumerate(topology.hosts):
        groups[host] = groups.get(host, 0) | 1 << rank
    for switch, of in topology.served().items():
        if len(of) == 1:
            host = next(iter(of))
            if host in groups:
                groups[host] |= 1 << switch
    # Ranks grow their trees host after host, so what is overdrawn late is often all hosts up to some host, or the rest.
    prefixes = list(itertools.accumulate((groups[host] for host in sorted(groups)), operator.or_))
    for mask in (*(1 << rank for rank in range(pool.ranks)), *groups.values(), *prefixes):
        pool.add(mask)
        pool.add(everything ^ mask)
