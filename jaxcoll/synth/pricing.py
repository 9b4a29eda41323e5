"""Shortest-path trees over the time-expanded network, for many sources at once.

A chunk crosses any number of switches within one step and may wait at ranks only (MCCL 4.2). One step is therefore:
relax the arcs into
switches until nothing improves, then relax the arcs into ranks once. All sources are relaxed together, as matrix
operations over [heads, sources].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net

Int32Array = NDArray[np.int32]

BLOCK = 64
"""Sources priced together: their matrices stay in the cache."""


def blocks(sources: IntArray, size: int = BLOCK) -> list[IntArray]:
    """`sources` in pieces of at most `size`."""
    return [sources[i : i + size] for i in range(0, len(sources), size)]


@dataclass(frozen=True)
class _Heads:
    """Arcs grouped by head: heads sorted by in-degree, falling, so that the k-th arcs of all heads that have one are
    a prefix."""

    nodes: IntArray
    arcs: tuple[IntArray, ...]

    @staticmethod
    def of(net: Net, arcs: IntArray) -> _Heads:
        order = arcs[np.argsort(net.head[arcs], kind="stable")]
        nodes, start, degree = np.unique(net.head[order], return_index=True, return_counts=True)
        by_degree = np.argsort(-degree, kind="stable")
        start, degree = start[by_degree], degree[by_degree]
        kth = tuple(order[start[degree > k] + k] for k in range(int(degree.max(initial=0))))
        return _Heads(nodes[by_degree], kth)


@dataclass(frozen=True)
class Trees:
    """Sparse arc loads of k trees: tree i is rooted at rank `source[i]` and puts `units[j]` on arc `arc[j]`, start[i]
    <= j < start[i + 1]."""

    source: IntArray
    start: IntArray
    arc: IntArray
    units: FloatArray

    @staticmethod
    def from_keys(source: IntArray, arcs: int, key: IntArray, units: FloatArray) -> Trees:
        """From entries with key = tree * arcs + arc; equal keys add up."""
        key, inverse = np.unique(key, return_inverse=True)
        tree = key // max(arcs, 1)
        start = np.searchsorted(tree, np.arange(len(source) + 1))
        return Trees(source, start, key - tree * arcs, np.asarray(np.bincount(inverse, units, len(key)), np.float64))

    @staticmethod
    def join(parts: Sequence[Trees]) -> Trees:
        """All trees of `parts`, in order."""
        shift = np.cumsum([0, *(len(p.arc) for p in parts)])
        starts = [p.start[:-1] + s for p, s in zip(parts, shift, strict=False)]
        return Trees(
            np.concatenate([p.source for p in parts]),
            np.concatenate([*starts, shift[-1:]]),
            np.concatenate([p.arc for p in parts]),
            np.concatenate([p.units for p in parts]),
        )

    def __len__(self) -> int:
        return len(self.source)

    @property
    def tree(self) -> IntArray:
        """The tree of every entry, int64 [entries]."""
        return np.repeat(np.arange(len(self)), np.diff(self.start))

    def take(self, keep: IntArray) -> Trees:
        """The trees with the numbers `keep`."""
        size = np.diff(self.start)[keep]
        start = np.concatenate([[0], np.cumsum(size)])
        entry = np.arange(start[-1]) - np.repeat(start[:-1], size) + np.repeat(self.start[keep], size)
        return Trees(self.source[keep], start, self.arc[entry], self.units[entry])

    def cost(self, weight: FloatArray) -> FloatArray:
        """Sum of units times weight of every tree, float64 [k]."""
        return np.asarray(np.bincount(self.tree, self.units * weight[self.arc], len(self)), np.float64)


@dataclass(frozen=True)
class Forest:
    """Shortest-path trees of `sources` (int64 [S]). `dist`: float64 [nodes, S], inf where unreachable within the
    steps."""

    net: Net
    sources: IntArray
    dist: FloatArray
    layers: tuple[tuple[IntArray, Int32Array], ...]
    """(row of every node or -1, arc by which a head was improved or -1 [rows, S]), in the order of relaxation."""

    def total(self) -> FloatArray:
        """Sum of the distances to all ranks, float64 [S]."""
        return self.dist[: self.net.ranks].sum(axis=0)

    def loads(self) -> Trees:
        """The trees as arc loads: one unit goes from every source to every other rank."""
        net, count = self.net, len(self.sources)
        units = np.zeros((net.nodes, count))
        units[: net.ranks] = 1.0
        units[self.sources, np.arange(count)] = 0.0
        keys: list[IntArray] = []
        amounts: list[FloatArray] = []
        for row, pred in reversed(self.layers):
            heads = np.flatnonzero(row >= 0)
            rows, cols = np.nonzero((pred[row[heads]] >= 0) & (units[heads] > 0))
            nodes = heads[rows]
            arcs, moved = pred[row[nodes], cols].astype(np.int64), units[nodes, cols]
            units[nodes, cols] = 0.0
            units += np.bincount(net.tail[arcs] * count + cols, moved, net.nodes * count).reshape(net.nodes, count)
            keys.append(cols * net.arcs + arcs)
            amounts.append(moved)
        return Trees.from_keys(self.sources, net.arcs, np.concatenate(keys), np.concatenate(amounts))

    def paths(self, column: IntArray, dest: IntArray) -> Int32Array:
        """Arcs of the paths sources[column[i]] -> dest[i], int32 [len(dest), longest], from the source on, padded
        with -1."""
        node, back = dest.copy(), []
        for row, pred in reversed(self.layers):
            arc = np.full(len(node), -1, np.int32)
            at = np.flatnonzero(row[node] >= 0)
            arc[at] = pred[row[node[at]], column[at]]
            moved = arc >= 0
            if moved.any():
                node[moved] = self.net.tail[arc[moved]]
                back.append(arc)
        if not back:
            return np.full((len(dest), 0), -1, np.int32)
        path = np.stack(back[::-1], axis=1)
        order = np.argsort(path < 0, axis=1, kind="stable")
        path = np.take_along_axis(path, order, axis=1)
        return path[:, : int((path >= 0).sum(axis=1).max(initial=0))]


class Pricer:
    """Reusable relaxation order of one network; `steps` bounds the rank-to-rank hops of every path (None: no bound)."""

    def __init__(self, net: Net, steps: int | None = None):
        self.net = net
        self.steps = net.ranks - 1 if steps is None else steps

    @cached_property
    def _heads(self) -> tuple[_Heads, _Heads]:
        """Arcs into switches, arcs into ranks."""
        to_switch = self.net.head >= self.net.ranks
        return _Heads.of(self.net, np.flatnonzero(to_switch)), _Heads.of(self.net, np.flatnonzero(~to_switch))

    def _rows(self, heads: _Heads) -> IntArray:
        row = np.full(self.net.nodes, -1, np.int64)
        row[heads.nodes] = np.arange(len(heads.nodes))
        return row

    @cached_property
    def turned(self) -> Pricer:
        """The same with every arc turned round (and its number kept): trees towards a rank."""
        net = self.net
        return Pricer(Net(net.ranks, net.nodes, net.head, net.tail, net.capacity, net.names), self.steps)

    def short(self, trees: Trees) -> Trees:
        """Those of `trees` in which no path takes more rank-to-rank hops than this pricer's steps."""
        net, count = self.net, len(trees)
        depth = np.full(count * net.nodes, -1, np.int64)
        depth[np.arange(count) * net.nodes + trees.source] = 0
        at = trees.tree * net.nodes
        tail, head = at + net.tail[trees.arc], at + net.head[trees.arc]
        hop = net.head[trees.arc] < net.ranks
        moved = True
        while moved:  # ends: depths only grow, and no further than one step too many
            there = depth[tail] >= 0
            before = depth.copy()
            np.maximum.at(depth, head[there], np.minimum(depth[tail[there]] + hop[there], self.steps + 1))
            moved = bool((depth != before).any())
        return trees.take(np.flatnonzero(depth.reshape(count, net.nodes).max(axis=1, initial=0) <= self.steps))

    def trees(self, weight: FloatArray, sources: IntArray) -> Forest:
        """Trees for arc weights `weight` (float64 [arcs], or [arcs, S] to price every source alone; >= 0, inf forbids
        an arc). Of equal paths the one with the fewest steps is kept."""
        dist = np.full((self.net.nodes, len(sources)), np.inf)
        dist[sources, np.arange(len(sources))] = 0.0
        layers: list[tuple[IntArray, Int32Array]] = []
        switch, rank = self._heads
        rows = self._rows(switch), self._rows(rank)
        for _ in range(self.steps):
            while self._relax(switch, rows[0], weight, dist, layers):
                pass
            if not self._relax(rank, rows[1], weight, dist, layers):
                break
        return Forest(self.net, sources, dist, tuple(layers))

    def _relax(
        self,
        heads: _Heads,
        row: IntArray,
        weight: FloatArray,
        dist: FloatArray,
        layers: list[tuple[IntArray, Int32Array]],
    ) -> bool:
        if not len(heads.nodes):
            return False
        best = dist[heads.nodes]
        pred = np.full(best.shape, -1, np.int32)
        # A gain below one part in 10^12 is rounding noise, and would let zero-weight cycles improve for ever.
        floor = best * (1 - 1e-12)
        for arcs in heads.arcs:
            n = len(arcs)
            candidate = dist[self.net.tail[arcs]]
            candidate += weight[arcs] if weight.ndim == 2 else weight[arcs, None]
            better = candidate < floor[:n]
            np.copyto(best[:n], candidate, where=better)
            np.copyto(floor[:n], candidate, where=better)
            np.copyto(pred[:n], arcs[:, None].astype(np.int32), where=better)
        if not (pred >= 0).any():
            return False
        dist[heads.nodes] = best
        layers.append((row, pred))
        return True
