"""From the LP's rate to whole parts: every pair's block is cut into K parts, and bundles of parts get paths.

For a target rate z arc a may carry floor(c_a K / z) parts. The search routes all of them, then negotiates: parts
above that number leave an arc and take the cheapest other path, where full arcs are dear and arcs that stay contested
grow dearer for good (the idea of negotiated congestion in circuit routing). A bundle is split where only some of its
parts must go or fit, as long as its pair has chunks left. When the negotiation stalls, the target drops to what fewer
arcs contradict, so a feasible routing always ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net
from jaxcoll.synth.alltoall_routing import Routing, arc_loads, pack_left, room, widen
from jaxcoll.synth.path_trees import SPARE, Int32Array, Noise
from jaxcoll.synth.pricing import Pricer, blocks

FULL = 0.5
"""Surcharge of a full arc at first, relative to its share of even prices. Less than one, so that parts change places
among equally short paths before any takes a detour, which costs capacity elsewhere."""
MENDING = 64.0
"""The same where a routing is only mended."""
GROWTH = 4.0
"""Growth of the surcharge after a round that left more than this share of the excess:"""
STUBBORN = 0.9
WAVES, MENDING_WAVES = 4, 8
"""Waves of a round, in all and where a routing is only mended."""
NOISE = 0.2
"""Noise on arc prices, relative to the even prices, a different one for every end that is priced: equal paths must
not all be chosen alike."""
CLIMB_PATIENCE, STEEP, FLAT = 3, 0.5, 0.02
"""Climbing: rounds without progress that end a try, the first step as a share of what is left to the bound, and the
share at which it ends."""
FEW = 16
"""Fewer ends than this grow several trees each."""


def _before_of_key(key: IntArray, amount: IntArray) -> IntArray:
    """The sum of `amount` of the earlier entries with the same key, int64 [len(key)]."""
    order = np.argsort(key, kind="stable")
    ordered, amounts = key[order], amount[order]
    before = np.cumsum(amounts) - amounts
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    out = np.empty(len(key), np.int64)
    out[order] = before - np.repeat(before[first], np.diff(np.append(first, len(key))))
    return out


class Router:
    """Routes and re-routes bundles on one network. All randomness comes from `seed`."""

    def __init__(
        self,
        net: Net,
        pricer: Pricer,
        weight: FloatArray,
        seed: int,
        stop: Callable[[], bool],
        chunks: int = 1,
        mending: bool = False,
    ):
        """`weight`: the LP's arc prices, float64 [arcs]; the base price is theirs and 1/capacity, for the arcs that
        the LP leaves free. `chunks`: most bundles of a pair. `mending`: little is contested, and
        what is has to leave at once."""
        self.net, self.pricer, self.stop, self.chunks = net, pricer, stop, chunks
        self.least, self.waves = (MENDING, MENDING_WAVES) if mending else (FULL, WAVES)
        self.even = 1 / (net.cap * net.arcs)
        self.base = weight / (net.cap * weight).sum() + self.even  # no BLAS: it would start threads
        self.rng = np.random.default_rng(seed)

    def paths(self, weight: FloatArray, source: IntArray, dest: IntArray) -> Int32Array:
        """Cheapest paths under noisy prices, int32 [len(source), hops].

        Trees grow from the end that more of the paths share, see `_ends`.
        """
        out = np.full((len(source), 0), -1, np.int32)
        for units, side, root, leaf in self._ends(source, dest):
            found = self._trees((self.pricer, self.pricer.turned)[side], weight, root[units], leaf[units])
            out = widen(out, found.shape[1])
            out[units, : found.shape[1]] = pack_left(found[:, ::-1]) if side else found
        return out

    def _trees(self, pricer: Pricer, weight: FloatArray, root: IntArray, leaf: IntArray) -> Int32Array:
        roots, column = np.unique(root, return_inverse=True)
        copies = max(1, FEW // len(roots))
        if copies > 1:  # several trees from one root, each under noise of its own: else all would crowd on one path
            roots = np.repeat(roots, copies)
            column = column * copies + self.rng.integers(copies, size=len(column))
        noise = Noise(NOISE * self.even, self._noise, self.rng.integers(SPARE, size=len(roots)))
        return pricer.paths(weight, noise, roots, column, leaf)

    @cached_property
    def _noise(self) -> FloatArray:
        return self.rng.random(self.net.arcs + SPARE)

    def first(self) -> Routing:
        """One path a pair, source after source, each seeing the loads of those before: prices grow exponentially with
        the use of an arc."""
        n = self.net.ranks
        source, dest = np.divmod(np.arange(n * n), n)
        keep = source != dest
        source, dest = source[keep], dest[keep]
        weight = np.ones(len(source), np.int64)
        work = Routing(1, source, dest, weight, np.full((len(source), 0), -1, np.int32), np.zeros(self.net.arcs, int))
        for block in np.array_split(self.rng.permutation(n), -(-n // 8)):
            units = np.flatnonzero(np.isin(source, block))
            self._place(work, units, self.paths(self._crowded(work.load), source[units], dest[units]))
        return work

    def _crowded(self, load: IntArray) -> FloatArray:
        """Base prices with a surcharge on the arcs that are used most."""
        share = load / self.net.cap
        return self.base + self.even * (FULL * share / max(share.max(), 1e-300))

    def repair(self, routing: Routing, broken: NDArray[np.bool_]) -> None:
        """Give the bundles marked in `broken` new paths at the present loads (their paths are not counted in
        `load`)."""
        units = np.flatnonzero(broken)
        if len(units):
            weight = self._crowded(routing.load)
            self._place(routing, units, self.paths(weight, routing.source[units], routing.dest[units]))

    def improve(self, routing: Routing, target: float, patience: int) -> Routing:
        """A routing of a rate up to `target`, negotiated from a copy of `routing`; never a slower one than that."""
        if not (routing.load > room(self.net.cap, routing.parts, target)).any():
            return routing
        work, history = routing.copy(), np.zeros(self.net.arcs)
        while not self.stop():
            limit = room(self.net.cap, work.parts, target)
            self._settle(work, limit, patience, history)
            over = work.load > limit
            if not over.any():
                break
            # Drop the target to where half of the contested arcs are content.
            target = float(np.median(self.net.cap[over] * work.parts / work.load[over]))
            if target <= routing.rate(self.net):
                break
        return max(routing, work, key=lambda r: r.rate(self.net)).tidy()

    def climb(self, routing: Routing, bound: float) -> Routing:
        """A routing of a higher rate than `routing`, or itself: the target rises from the rate that was reached, by a
        share of what is left to `bound`, which halves after a try that gained nothing.

        `improve` aims at the bound and pushes everything about to get there. Where hardly two links are alike it ends
        some percent below, and small steps reach a few tenths of one.
        """
        best, share = routing, STEEP
        while share > FLAT and not self.stop():
            rate = best.rate(self.net)
            limit = room(self.net.cap, best.parts, rate + share * (bound - rate))
            work = best.copy()
            self._settle(work, limit, CLIMB_PATIENCE, np.zeros(self.net.arcs))
            if work.rate(self.net) <= rate:
                share /= 2
                continue
            share = share if (work.load > limit).any() else min(1.5 * share, 0.9)
            best = work.tidy()
        return best

    def _settle(self, work: Routing, limit: IntArray, patience: int, history: FloatArray) -> None:
        """Negotiate until nothing is above its limit, or until `patience` rounds brought no progress."""
        surcharge, stalled = self.least, 0
        most = 2 * float((self.base / self.even).max())
        excess = least = int(np.maximum(work.load - limit, 0).sum())
        while excess and stalled < patience and not self.stop():
            self._negotiate(work, limit, surcharge, history)
            before, excess = excess, int(np.maximum(work.load - limit, 0).sum())
            stalled, least = (0, excess) if excess < least else (stalled + 1, least)
            if excess > STUBBORN * before:
                surcharge = surcharge * GROWTH if surcharge < most else self.least

    def _negotiate(self, work: Routing, limit: IntArray, surcharge: float, history: FloatArray) -> None:
        """One round: parts above the limits get other paths, in a few waves that each see where the one before went."""
        units = self._evict(work, limit)
        for wave in range(self.waves):
            free = limit - work.load
            weight = self.base + self.even * (history + surcharge * (free <= 0))
            new = self.paths(weight, work.source[units], work.dest[units])
            fits = self._fitting(new, work.weight[units], free)
            if wave == self.waves - 1 or not fits.any():
                fits = work.weight[units]  # no room for these, or none left in this round: they overload their path
            rest = self._split(work, units, fits)
            placed = fits > 0
            self._place(work, units[placed], new[placed])
            units = np.concatenate([units[~placed], rest])
            if not len(units):
                break
        history += 0.1 * np.minimum(np.maximum(work.load - limit, 0) / np.maximum(limit, 1.0), 1.0)

    def _split(self, work: Routing, units: IntArray, amount: IntArray) -> IntArray:
        """Cuts bundles so that `amount` parts (0: leave it) stay in each of `units`: the new bundles, without paths,
        that hold the rest. Where a pair has no chunk left `amount` is set to 0, in place."""
        cut = np.flatnonzero((amount > 0) & (amount < work.weight[units]))
        if not len(cut):
            return cut
        pair = work.pair()
        mine = pair[units[cut]]
        left = self.chunks - np.bincount(pair)[mine]
        allowed = _before_of_key(mine, np.ones(len(mine), np.int64)) < left
        amount[cut[~allowed]] = 0
        cut = cut[allowed]
        old = units[cut]
        rest = work.weight[old] - amount[cut]
        work.weight[old] = amount[cut]
        new = np.arange(len(work.weight), len(work.weight) + len(old))
        work.source, work.dest = np.append(work.source, work.source[old]), np.append(work.dest, work.dest[old])
        work.weight = np.append(work.weight, rest)
        work.path = np.concatenate([work.path, np.full((len(old), work.path.shape[1]), -1, np.int32)])
        return new

    def _evict(self, work: Routing, limit: IntArray) -> IntArray:
        """Take parts off overloaded arcs until those are within their room: the bundles, whose paths are now empty.

        Bundles are drawn at random, but in every second round (on average) those on detours go first: where the LP
        leaves no slack, one that passes through a tight cut twice is what keeps the others out.
        """
        over = np.append(np.maximum(work.load - limit, 0), 0)
        rows, cols = np.divmod(np.flatnonzero((over > 0)[work.path].ravel()), work.path.shape[1])
        order = self.rng.permutation(len(rows))
        if self.rng.random() < 0.5:
            path = work.path[rows[order]]
            paid = np.append(self.base, 0.0)[path].sum(axis=1)
            detour = paid - self._nearest(work.source[rows[order]], work.dest[rows[order]])
            order = order[np.argsort(-np.round(detour / self.even.min()), kind="stable")]
        rows, arcs = rows[order], work.path[rows[order], cols[order]].astype(np.int64)
        must = np.clip(over[arcs] - _before_of_key(arcs, work.weight[rows]), 0, work.weight[rows])
        go = np.zeros(len(work.weight), np.int64)
        np.maximum.at(go, rows, must)
        units = np.flatnonzero(go)
        stay = work.weight[units] - go[units]
        work.load -= arc_loads(work.path[units], work.weight[units], self.net.arcs)
        leave = self._split(work, units, stay)  # those that can't be cut go whole
        kept = units[stay > 0]
        work.load += arc_loads(work.path[kept], work.weight[kept], self.net.arcs)
        whole = units[stay == 0]
        work.path[whole] = -1
        return np.concatenate([whole, leave])

    def _nearest(self, source: IntArray, dest: IntArray) -> FloatArray:
        """Distances at base prices, float64 like `source`."""
        out = np.empty(len(source))
        for units, side, root, leaf in self._ends(source, dest):
            known, pricer = self._distances[side], (self.pricer, self.pricer.turned)[side]
            roots = np.unique(root[units])
            for block in blocks(roots[np.isnan(known[roots, 0])]):
                known[block] = pricer.trees(self.base, block).dist[: self.net.ranks].T
            out[units] = known[root[units], leaf[units]]
        return out

    @cached_property
    def _distances(self) -> tuple[FloatArray, FloatArray]:
        """From every rank to all, and to every rank from all, float64 [ranks, ranks] each; a row of NaN until it is
        asked for."""
        shape = (self.net.ranks, self.net.ranks)
        return np.full(shape, np.nan), np.full(shape, np.nan)

    def _ends(self, source: IntArray, dest: IntArray) -> list[tuple[IntArray, int, IntArray, IntArray]]:
        """(pairs, 0, sources, dests) of the pairs that are priced from their source, and (pairs, 1, dests, sources) of
        those priced, against the arcs, from their destination: whichever end more of the pairs share, if that takes
        fewer trees than one end for all."""
        sources, dests = (np.bincount(end, minlength=self.net.ranks) for end in (source, dest))
        there = dests[dest] > sources[source]
        mixed = len(np.unique(source[~there])) + len(np.unique(dest[there]))
        if mixed >= min(np.count_nonzero(sources), np.count_nonzero(dests)):
            there[:] = np.count_nonzero(dests) < np.count_nonzero(sources)
        ends = [(np.flatnonzero(~there), 0, source, dest), (np.flatnonzero(there), 1, dest, source)]
        return [end for end in ends if len(end[0])]

    def _fitting(self, path: Int32Array, weight: IntArray, free: IntArray) -> IntArray:
        """How many parts of every bundle can be placed together without overloading, int64 like `weight`: in random
        order, as many as every arc has room for after those before."""
        order = self.rng.permutation(len(path))
        rows, cols = np.nonzero(path[order] >= 0)
        bundle = order[rows]
        arcs = path[bundle, cols].astype(np.int64)
        left = np.clip(free[arcs] - _before_of_key(arcs, weight[bundle]), 0, weight[bundle])
        fits = weight.copy()
        np.minimum.at(fits, bundle, left)
        return fits

    def _place(self, work: Routing, units: IntArray, path: Int32Array) -> None:
        work.path = widen(work.path, path.shape[1])
        work.path[units] = -1
        work.path[units, : path.shape[1]] = path
        work.load += arc_loads(path, work.weight[units], self.net.arcs)
