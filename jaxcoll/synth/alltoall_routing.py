"""Where the chunks of an all-to-all go: a pair's block is cut into K parts, and a bundle of parts shares a path."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net
from jaxcoll.synth.path_trees import Int32Array, Trees


@dataclass
class Routing:
    """Bundles on paths.

    `parts`: K, into which every pair's block is cut. `source`, `dest`, `weight`: int64 [bundles], the pair and how
    many of its parts a bundle holds (K for every pair in all, the bundles in any order); `path`: int32 [bundles, hops]
    of arcs, -1 padded; `load`: int64 [arcs], parts on every arc. A bundle is a chunk of the schedule.
    """

    parts: int
    source: IntArray
    dest: IntArray
    weight: IntArray
    path: Int32Array
    load: IntArray

    def rate(self, net: Net) -> float:
        """Rate of every pair when each part has the share 1/K: K * min over arcs of capacity / load."""
        used = self.load > 0
        return float(self.parts * (net.cap[used] / self.load[used]).min(initial=np.inf))

    def pair(self) -> IntArray:
        """One number a pair of ranks, int64 [bundles]."""
        return self.source * (int(self.dest.max(initial=0)) + 1) + self.dest

    def most_chunks(self) -> int:
        """Bundles of the pair that has most."""
        return int(np.bincount(self.pair()).max(initial=0))

    def columns(self, net: Net) -> Trees:
        """What every source sends as arc loads, for one unit to every other rank: columns of the LP."""
        rows, cols = np.nonzero(self.path >= 0)
        key = self.source[rows] * net.arcs + self.path[rows, cols]
        return Trees.from_keys(np.arange(net.ranks), net.arcs, key, self.weight[rows] / self.parts)

    def copy(self) -> Routing:
        """A routing that can be changed without changing this one."""
        return Routing(self.parts, self.source, self.dest, self.weight.copy(), self.path.copy(), self.load.copy())

    def with_parts(self, parts: int, arcs: int) -> Routing:
        """The same paths with blocks cut into `parts` (itself, if it has as many). Bundles that round to nothing are
        left out."""
        if parts == self.parts:
            return self
        weight = np.full(len(self.weight), parts, np.int64)
        shared = self._shared()
        old, pair = self.weight[shared], self.pair()[shared]
        end = np.cumsum(old)
        first = np.flatnonzero(np.diff(pair, prepend=-1))
        end -= np.repeat((end - old)[first], np.diff(np.append(first, len(pair))))
        weight[shared] = end * parts // self.parts - (end - old) * parts // self.parts
        keep = np.flatnonzero(weight)
        return Routing.of(parts, self.source[keep], self.dest[keep], weight[keep], self.path[keep], arcs)

    def tidy(self) -> Routing:
        """The same with the bundles of one pair on one path made one."""
        shared = self._shared()
        table = np.column_stack([self.pair()[shared], self.path[shared]])
        order = np.lexsort(table.T[::-1])
        new = np.ones(len(order), dtype=bool)
        new[1:] = (table[order[1:]] != table[order[:-1]]).any(axis=1)
        if new.all():
            return self
        weight, gone = self.weight.copy(), np.zeros(len(self.weight), dtype=bool)
        weight[shared[order[new]]] = np.add.reduceat(self.weight[shared[order]], np.flatnonzero(new))
        gone[shared[order[~new]]] = True
        keep = np.flatnonzero(~gone)
        return Routing(self.parts, self.source[keep], self.dest[keep], weight[keep], self.path[keep], self.load)

    def _shared(self) -> IntArray:
        """The bundles whose pair has more than one, pair by pair."""
        pair = self.pair()
        shared = np.flatnonzero(np.bincount(pair)[pair] > 1)
        return shared[np.argsort(pair[shared], kind="stable")]

    @staticmethod
    def of(parts: int, source: IntArray, dest: IntArray, weight: IntArray, path: Int32Array, arcs: int) -> Routing:
        """A routing with its loads counted."""
        return Routing(parts, source, dest, weight, path, arc_loads(path, weight, arcs))


def arc_loads(path: Int32Array, weight: IntArray, arcs: int) -> IntArray:
    """Parts on every arc, int64 [arcs]."""
    load = np.zeros(arcs, np.float64)  # exact: far below 2^53
    for column in path.T:
        load += np.bincount(column + 1, weight, arcs + 1)[1:]
    return load.astype(np.int64)


def widen(path: Int32Array, width: int) -> Int32Array:
    """`path` with at least `width` columns."""
    if path.shape[1] >= width:
        return path
    out = np.full((len(path), width), -1, np.int32)
    out[:, : path.shape[1]] = path
    return out


def pack_left(path: Int32Array) -> Int32Array:
    """Rows with their -1 moved behind the arcs, in the arcs' order."""
    path = np.take_along_axis(path, np.argsort(path < 0, axis=1, kind="stable"), axis=1)
    return path[:, : int((path >= 0).sum(axis=1).max(initial=0))]


def room(cap: FloatArray, parts: int, rate: float) -> IntArray:
    """Parts that every arc may carry at `rate`, int64 like `cap`."""
    return np.floor(cap * (parts / rate) * (1 + 1e-12) + 1e-9).astype(np.int64)


def rate_bound(cap: FloatArray, weights: FloatArray, parts: int, bound: float) -> float:
    """The highest rate that the dual weights allow to K whole parts; <= `bound`.

    `cap`: float64 [m], one a class of arcs of one capacity; `weights`: float64 [duals, m], the sum over each class's
    arcs, scaled so that the distances of all pairs add up to 1. A routing at rate z keeps to room(z), so
    K <= weights . room(z) for every dual. room only changes where c K / z is whole, hence the largest such z is found
    by bisection and moved up to the next change.
    """

    def fits(rate: float) -> bool:
        return bool(((weights * room(cap, parts, rate)).sum(axis=1) >= parts * (1 - 1e-9)).all())

    def snap(rate: float) -> float:
        limit = room(cap, parts, rate)
        open_ = limit > 0
        return float((cap[open_] * parts / limit[open_]).min())

    if fits(bound * (1 - 1e-9)):
        return min(bound, snap(bound * (1 - 1e-9)))
    low, high = 0.0, bound
    while high - low > 1e-7 * bound:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(bound, snap(low)) if low else 0.0
