"""Shortest-path trees over the time-expanded network, for many sources at once.

A chunk crosses any number of switches within one step and may wait at ranks only (MCCL 4.2). One step is therefore:
relax the arcs into switches until nothing improves, then relax the arcs into ranks once. The native library does it
source by source, and looks only at the arcs whose tail has come nearer (ffi/src/flow/paths.h); without it all sources
are relaxed together, as matrix operations over [heads, sources]. Both give the same trees.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from jaxcoll.synth import native
from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net
from jaxcoll.synth.alltoall_routing import widen
from jaxcoll.synth.native_paths import NativeNet
from jaxcoll.synth.path_trees import Int32Array, Noise, Trees

BLOCK = 64
"""Sources priced together: their matrices stay in the cache."""
NOISY_BLOCK = 32
"""The same where every source has arc weights of its own."""


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


class Forest(Protocol):
    """Shortest-path trees of S sources."""

    @property
    def dist(self) -> FloatArray:
        """float64 [nodes, S], inf where unreachable within the steps."""
        ...

    def total(self) -> FloatArray:
        """Sum of the distances to all ranks, float64 [S]."""
        ...

    def loads(self) -> Trees:
        """The trees as arc loads: one unit goes from every source to every other rank."""
        ...

    def paths(self, column: IntArray, dest: IntArray) -> Int32Array:
        """Arcs of the paths from source number column[i] to node dest[i], int32 [len(dest), longest], from the source
        on, padded with -1."""
        ...


@dataclass(frozen=True)
class LayeredForest:
    """A `Forest` of `sources` (int64 [S]), grown in numpy."""

    net: Net
    sources: IntArray
    dist: FloatArray
    layers: tuple[tuple[IntArray, Int32Array], ...]
    """(row of every node or -1, arc by which a head was improved or -1 [rows, S]), in the order of relaxation."""

    def total(self) -> FloatArray:
        return self.dist[: self.net.ranks].sum(axis=0)

    def loads(self) -> Trees:
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

    @cached_property
    def _native(self) -> NativeNet | None:
        library = native.load()
        return NativeNet(library, self.net) if library else None

    def trees(self, weight: FloatArray, sources: IntArray) -> Forest:
        """Trees for arc weights `weight` (float64 [arcs]; >= 0, inf forbids an arc). Of equal paths the one with the
        fewest steps is kept."""
        if self._native:
            return self._native.grow(self.steps, weight, sources)
        return self.layered(weight, sources)

    def paths(
        self, weight: FloatArray, noise: Noise, sources: IntArray, column: IntArray, dest: IntArray
    ) -> Int32Array:
        """The cheapest paths from sources[column[i]] to rank dest[i], as `Forest.paths` gives them, where `noise` is
        added to the weights and is different for every source."""
        if self._native:
            order = np.argsort(column, kind="stable")
            want = column[order], dest[order]
            return self._native.grow(self.steps, weight, sources, noise, want).paths(column, dest)
        out = np.full((len(dest), 0), -1, np.int32)
        for first in range(0, len(sources), NOISY_BLOCK):
            block = slice(first, first + NOISY_BLOCK)
            mine = np.flatnonzero((column >= first) & (column < first + NOISY_BLOCK))
            forest = self.layered(weight[:, None] + noise.cost(block), sources[block])
            found = forest.paths(column[mine] - first, dest[mine])
            out = widen(out, found.shape[1])
            out[mine, : found.shape[1]] = found
        return out

    def layered(self, weight: FloatArray, sources: IntArray) -> LayeredForest:
        """`trees` in numpy; `weight` may be float64 [arcs, S], too, to price every source alone."""
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
        return LayeredForest(self.net, sources, dist, tuple(layers))

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
