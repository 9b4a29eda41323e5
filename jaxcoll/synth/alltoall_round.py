"""From the LP's rate to whole chunks: every pair's block is cut into K chunks, and every chunk gets one path.

For a target rate z arc a may carry floor(c_a K / z) chunks. The search routes all chunks, then negotiates: chunks
above that number leave an
arc and take the cheapest other path, where full arcs are dear and arcs that stay contested grow dearer for good (the
idea of negotiated congestion
in circuit routing). When the negotiation stalls, the target drops to what fewer arcs contradict, so a feasible
routing always ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net
from jaxcoll.synth.pricing import Int32Array, Pricer, blocks

FULL = 0.5
"""Surcharge of a full arc at first, relative to its share of even prices. Less than one, so that chunks change places
among equally short paths
before any takes a detour, which costs capacity elsewhere."""
GROWTH = 4.0
"""Growth of the surcharge after a round that left more than this share of the excess:"""
STUBBORN = 0.9
WAVES = 4
NOISE = 0.2
"""Noise on arc prices, relative to the even prices, a different one for every source: equal paths must not all be
chosen alike."""
BLOCK = 32
"""Sources priced together."""


@dataclass
class Routing:
    """Whole chunks on paths. `source`, `dest`: int64 [units], sorted by (source, dest) with K = `chunks` units a
    pair; `path`: int32 [units, hops]
    of arcs, -1 padded; `load`: int64 [arcs]."""

    chunks: int
    source: IntArray
    dest: IntArray
    path: Int32Array
    load: IntArray

    def rate(self, net: Net) -> float:
        """Rate of every pair when each chunk has the share 1/K: K * min over arcs of capacity / load."""
        used = self.load > 0
        return float(self.chunks * (net.cap[used] / self.load[used]).min(initial=np.inf))

    def with_chunks(self, chunks: int) -> Routing:
        """The same paths in other proportions: unit i of K' follows old unit floor(i K / K')."""
        pairs = len(self.source) // self.chunks
        pick = (np.arange(chunks) * self.chunks // chunks + np.arange(pairs)[:, None] * self.chunks).ravel()
        path = self.path[pick]
        return Routing(chunks, self.source[pick], self.dest[pick], path, arc_loads(path, len(self.load)))

    def copy(self) -> Routing:
        """A routing that can be changed without changing this one."""
        return Routing(self.chunks, self.source, self.dest, self.path.copy(), self.load.copy())


def arc_loads(path: Int32Array, arcs: int) -> IntArray:
    """Units on every arc, int64 [arcs]."""
    return np.bincount(path[path >= 0], minlength=arcs).astype(np.int64)


def room(cap: FloatArray, chunks: int, rate: float) -> IntArray:
    """Chunks that every arc may carry at `rate`, int64 like `cap`."""
    return np.floor(cap * (chunks / rate) * (1 + 1e-12) + 1e-9).astype(np.int64)


def rate_bound(cap: FloatArray, weights: FloatArray, chunks: int, bound: float) -> float:
    """The highest rate that the dual weights allow to K whole chunks; <= `bound`.

    `cap`: float64 [m], one a class of arcs of one capacity; `weights`: float64 [duals, m], the sum over each class's
    arcs, scaled so that the
    distances of all pairs add up to 1. A routing at rate z keeps to room(z), so K <= weights . room(z) for every
    dual. room only changes where
    c K / z is whole, hence the largest such z is found by bisection and moved up to the next change.
    """

    def fits(rate: float) -> bool:
        return bool(((weights * room(cap, chunks, rate)).sum(axis=1) >= chunks * (1 - 1e-9)).all())

    def snap(rate: float) -> float:
        limit = room(cap, chunks, rate)
        open_ = limit > 0
        return float((cap[open_] * chunks / limit[open_]).min())

    if fits(bound * (1 - 1e-9)):
        return min(bound, snap(bound * (1 - 1e-9)))
    low, high = 0.0, bound
    while high - low > 1e-7 * bound:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return min(bound, snap(low)) if low else 0.0


def _nth_of_key(key: IntArray) -> IntArray:
    """How many earlier entries have the same key, int64 [len(key)]."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    out = np.empty(len(key), np.int64)
    out[order] = np.arange(len(key)) - np.repeat(first, np.diff(np.append(first, len(key))))
    return out


class Router:
    """Routes and re-routes units on one network. All randomness comes from `seed`."""

    def __init__(self, net: Net, pricer: Pricer, weight: FloatArray, seed: int, stop: Callable[[], bool]):
        """`weight`: the LP's arc prices, float64 [arcs]. Half of the base price is theirs, half is 1/capacity, for
        the arcs the LP leaves free."""
        self.net, self.pricer, self.stop = net, pricer, stop
        self.even = 1 / (net.cap * net.arcs)
        self.noise = (NOISE * self.even)[:, None]
        self.base = weight / (net.cap @ weight) + self.even
        self.rng = np.random.default_rng(seed)

    def paths(self, weight: FloatArray, source: IntArray, dest: IntArray) -> Int32Array:
        """Cheapest paths under noisy prices, int32 [units, hops]."""
        sources, column = np.unique(source, return_inverse=True)
        order = np.argsort(column, kind="stable")
        cuts = np.searchsorted(column[order], np.arange(0, len(sources), BLOCK)[1:])
        parts: list[tuple[IntArray, Int32Array]] = []
        for i, units in enumerate(np.split(order, cuts)):
            block = sources[i * BLOCK : (i + 1) * BLOCK]
            noise = self.rng.random((self.net.arcs, len(block)), dtype=np.float32) * self.noise
            forest = self.pricer.trees(weight[:, None] + noise, block)
            parts.append((units, forest.paths(column[units] - i * BLOCK, dest[units])))
        out = np.full((len(source), max((p.shape[1] for _, p in parts), default=0)), -1, np.int32)
        for units, part in parts:
            out[units, : part.shape[1]] = part
        return out

    def first(self) -> Routing:
        """One path a pair, source after source, each seeing the loads of those before: prices grow exponentially with
        the use of an arc."""
        n = self.net.ranks
        source, dest = np.divmod(np.arange(n * n), n)
        keep = source != dest
        source, dest = source[keep], dest[keep]
        load = np.zeros(self.net.arcs, np.int64)
        path = np.full((len(source), 0), -1, np.int32)
        for block in np.array_split(self.rng.permutation(n), -(-n // 8)):
            weight = self._crowded(load)
            units = np.flatnonzero(np.isin(source, block))
            new = self.paths(weight, source[units], dest[units])
            path = _widen(path, new.shape[1])
            path[units, : new.shape[1]] = new
            load += arc_loads(new, self.net.arcs)
        return Routing(1, source, dest, path, load)

    def _crowded(self, load: IntArray) -> FloatArray:
        """Base prices with a surcharge on the arcs that are used most."""
        share = load / self.net.cap
        return self.base + self.even * (FULL * share / max(share.max(), 1e-300))

    def repair(self, routing: Routing, broken: NDArray[np.bool_]) -> None:
        """Give the units marked in `broken` new paths at the present loads (their paths are not counted in `load`)."""
        units = np.flatnonzero(broken)
        if len(units):
            weight = self._crowded(routing.load)
            self._place(routing, units, self.paths(weight, routing.source[units], routing.dest[units]))

    def improve(self, routing: Routing, target: float, patience: int = 24) -> Routing:
        """A routing of a rate up to `target`, negotiated from a copy of `routing`; never a slower one than that."""
        work, history = routing.copy(), np.zeros(self.net.arcs)
        while not self.stop():
            limit = room(self.net.cap, work.chunks, target)
            self._settle(work, limit, patience, history)
            over = work.load > limit
            if not over.any():
                break
            # Drop the target to where half of the contested arcs are content.
            target = float(np.median(self.net.cap[over] * work.chunks / work.load[over]))
            if target <= routing.rate(self.net):
                break
        return max(routing, work, key=lambda r: r.rate(self.net))

    def _settle(self, work: Routing, limit: IntArray, patience: int, history: FloatArray) -> None:
        """Negotiate until nothing is above its limit, or until `patience` rounds brought no progress."""
        surcharge, stalled = FULL, 0
        most = 2 * float((self.base / self.even).max())
        excess = least = int(np.maximum(work.load - limit, 0).sum())
        while excess and stalled < patience and not self.stop():
            self._negotiate(work, limit, surcharge, history)
            before, excess = excess, int(np.maximum(work.load - limit, 0).sum())
            stalled, least = (0, excess) if excess < least else (stalled + 1, least)
            if excess > STUBBORN * before:
                surcharge = surcharge * GROWTH if surcharge < most else FULL

    def _negotiate(self, work: Routing, limit: IntArray, surcharge: float, history: FloatArray) -> None:
        """One round: units above the limits get other paths, in a few waves that each see where the one before went."""
        units = self._evict(work, limit)
        for wave in range(WAVES):
            free = limit - work.load
            weight = self.base + self.even * (history + surcharge * (free <= 0))
            new = self.paths(weight, work.source[units], work.dest[units])
            fits = self._fitting(new, free)
            if wave == WAVES - 1 or not fits.any():
                fits[:] = True  # no room for these, or none left in this round: they overload their cheapest path
            self._place(work, units[fits], new[fits])
            units = units[~fits]
            if not len(units):
                break
        history += 0.1 * np.minimum(np.maximum(work.load - limit, 0) / np.maximum(limit, 1.0), 1.0)

    def _evict(self, work: Routing, limit: IntArray) -> IntArray:
        """Take units off overloaded arcs until those are within their room: the units, whose paths are now empty.

        Units are drawn at random, but in every second round (on average) those on detours go first: where the LP
        leaves no slack, one chunk that
        passes through a tight cut twice is what keeps the others out.
        """
        over = np.append(np.maximum(work.load - limit, 0), 0)
        rows, cols = np.divmod(np.flatnonzero((over > 0)[work.path].ravel()), work.path.shape[1])
        order = self.rng.permutation(len(rows))
        if self.rng.random() < 0.5:
            path = work.path[rows[order]]
            paid = np.append(self.base, 0.0)[path].sum(axis=1)
            detour = paid - self.nearest[work.source[rows[order]], work.dest[rows[order]]]
            order = order[np.argsort(-np.round(detour / self.even.min()), kind="stable")]
        rows, arcs = rows[order], work.path[rows[order], cols[order]]
        units = np.unique(rows[_nth_of_key(arcs.astype(np.int64)) < over[arcs]])
        work.load -= arc_loads(work.path[units], self.net.arcs)
        work.path[units] = -1
        return units

    @cached_property
    def nearest(self) -> FloatArray:
        """Distances at base prices, float64 [ranks, ranks]."""
        parts = [
            self.pricer.trees(self.base, block).dist[: self.net.ranks].T for block in blocks(np.arange(self.net.ranks))
        ]
        return np.concatenate(parts)

    def _fitting(self, path: Int32Array, free: IntArray) -> NDArray[np.bool_]:
        """Which units can be placed together without overloading: in random order, those whose every arc has room
        after the ones before."""
        order = self.rng.permutation(len(path))
        rows, cols = np.nonzero(path[order] >= 0)
        arcs = path[order[rows], cols].astype(np.int64)
        late = _nth_of_key(arcs) >= free[arcs]
        fits = np.ones(len(path), dtype=bool)
        fits[order[rows[late]]] = False
        return fits

    def _place(self, work: Routing, units: IntArray, path: Int32Array) -> None:
        work.path = _widen(work.path, path.shape[1])
        work.path[units] = -1
        work.path[units, : path.shape[1]] = path
        work.load += arc_loads(path, self.net.arcs)


def _widen(path: Int32Array, width: int) -> Int32Array:
    if path.shape[1] >= width:
        return path
    out = np.full((len(path), width), -1, np.int32)
    out[:, : path.shape[1]] = path
    return out
