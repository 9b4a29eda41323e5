"""Tree packing in Python: the method of `trees` where the native packer is missing, and its oracle in the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxcoll.errors import SynthesisError
from jaxcoll.synth.cuts import CutPool, inflow, mask_matrix
from jaxcoll.synth.flow import Cut, FlowGraph, Query, members_of
from jaxcoll.synth.rate import Tick, order_targets

MAX_CUTS = 16

Arc = tuple[int, int]
Grown = tuple[int, int, list[Arc]]  # root, count, edges
Wish = tuple[int, int, list[Arc]]  # root, count, hint


@dataclass
class _Batch:
    """`count` equal trees while they grow; `touched`: mask of the known cuts that they have entered."""

    count: int
    reached: int
    touched: int
    edges: list[Arc]
    depth: dict[int, int]


class Packer:
    """Packs trees into `capacity` int64[ranks, ranks]. `max_depth`: no tree may be deeper (None: any)."""

    def __init__(
        self, ranks: int, capacity: NDArray[np.int64], pool: CutPool, tick: Tick, max_depth: int | None = None
    ):
        self.ranks, self.pool, self.tick, self.max_depth = ranks, pool, tick, max_depth
        self.capacity = capacity.copy()
        self.all = (1 << ranks) - 1
        self.checks = self.rollbacks = self.regrown = 0
        self._fresh: list[int] = []
        self._arcs = np.nonzero(self.capacity)
        self._scale = 1.0 / np.maximum(self.capacity, 1)
        self._graph: FlowGraph | None = None
        self._first: list[int] = []
        self._near: list[list[int]] = []
        self._slack: list[int] = []
        self._inside: list[int] = []  # per rank: mask of the known cuts that hold it
        self._pending = [0] * ranks

    def run(self, orders: Sequence[Wish]) -> list[Grown]:
        """All trees. Raises SynthesisError when the orders can't be met (with `max_depth`, or too little capacity)."""
        for root, count, _ in orders:
            self._pending[root] += count
        self._index()
        if min(self._slack, default=0) < 0:
            raise SynthesisError(stuck_message(self.max_depth))
        sequence, grown = self._easy_first(orders)
        while len(grown) < len(sequence):
            trees = self._grow(*sequence[len(grown)])
            if trees is None:
                self._roll_back(sequence, grown)
            else:
                grown.append(trees)
            self.tick(len(grown) / len(sequence))
        return [tree for trees in grown for tree in trees]

    def _easy_first(self, orders: Sequence[Wish]) -> tuple[list[Wish], list[list[Grown]]]:
        """Grows the orders that get their ideal tree at once: the old one whole, or one of shortest paths.

        The others need what the easy ones leave over anyway, and would spoil their trees if they came first. Returns
        all orders, the easy ones first, and the trees of those.
        """
        easy: list[Wish] = []
        hard: list[Wish] = []
        grown: list[list[Grown]] = []
        for order in orders:
            trees = self._grow(*order, ideal=True)
            if trees is None:
                hard.append(order)
            else:
                easy.append(order)
                grown.append(trees)
        return easy + hard, grown

    def _is_ideal(self, batch: _Batch, root: int, hint: list[Arc]) -> bool:
        if batch.reached != self.all:
            return False
        return batch.edges == hint if hint else batch.depth == self._distances(root)

    def _distances(self, root: int) -> dict[int, int]:
        """Hops from `root` over all arcs that there were at the start."""
        if not self._near:
            self._near = [[] for _ in range(self.ranks)]
            for tail, head in zip(*(ends.tolist() for ends in self._arcs), strict=True):
                self._near[tail].append(head)
        distance, queue = {root: 0}, [root]
        for tail in queue:
            for head in self._near[tail]:
                if head not in distance:
                    distance[head] = distance[tail] + 1
                    queue.append(head)
        return distance

    # -- known cuts

    def _index(self) -> None:
        """Slack of every known cut, from scratch: capacity into it less the pending trees of the ranks outside."""
        inside = mask_matrix(self.pool.masks, self.ranks)
        self._inside = [_bits(column) for column in inside.T]
        flows = inflow(inside, self._arcs[0], self._arcs[1], self._capacities())
        pending = np.array(self._pending, np.int64)
        self._slack = (flows - ~inside @ pending).tolist()

    def _capacities(self) -> NDArray[np.int64]:
        return self.capacity[self._arcs]

    def _cuts(self, query: Query) -> list[Cut]:
        if self._graph is None:
            self._graph = FlowGraph(self.ranks, self._arcs[0].tolist(), self._arcs[1].tolist())
        self.checks += 1
        return self._graph.cuts(query)

    def _diagnose(self, batches: list[_Batch]) -> None:
        """Learns the overdrawn cuts of the present state. Raises SynthesisError when there is none."""
        groups = [(batch.count, members_of(batch.reached)) for batch in batches]
        total = sum(self._pending) + sum(batch.count for batch in batches)
        targets = order_targets(self.ranks, self._first)
        found = self._cuts(Query(self._capacities(), self._pending, total, targets, groups=groups, max_cuts=MAX_CUTS))
        self._first += [cut.target for cut in found]
        self._fresh = [mask for cut in found for mask in (cut.small, cut.large) if self.pool.add(mask)]
        if not self._fresh:
            raise SynthesisError(stuck_message(self.max_depth))

    def _roll_back(self, orders: Sequence[Wish], grown: list[list[Grown]]) -> None:
        """Undoes trees until none of the cuts just learnt is overdrawn."""
        self.rollbacks += 1
        keep = min(self._last_good(mask, grown) for mask in self._fresh)
        while len(grown) > keep:
            self.regrown += 1
            for _, count, edges in grown.pop():
                self._give_back(edges, count)
            root, count, _ = orders[len(grown)]
            self._pending[root] += count
        self._index()
        if min(self._slack) < 0:
            raise SynthesisError(stuck_message(self.max_depth))

    def _last_good(self, mask: int, grown: list[list[Grown]]) -> int:
        """How many of the grown orders can stay for this cut not to be overdrawn."""
        inside = mask_matrix([mask], self.ranks)[0]
        slack = int(self.capacity[np.ix_(~inside, inside)].sum() - np.array(self._pending)[~inside].sum())
        keep = len(grown)
        while slack < 0 and keep:
            keep -= 1
            for root, count, edges in grown[keep]:
                ends = np.array(edges).reshape(-1, 2)
                entries = int((inside[ends[:, 1]] & ~inside[ends[:, 0]]).sum())
                slack += count * (entries - (0 if mask >> root & 1 else 1))
        return keep

    # -- growth

    def _grow(self, root: int, count: int, hint: list[Arc], ideal: bool = False) -> list[Grown] | None:
        """The trees of one order, taken from the capacities. None when stuck: nothing is taken, cuts are learnt.

        With `ideal`, one batch that must come out ideal; nothing is learnt when it doesn't.
        """
        self._pending[root] -= count
        slack = list(self._slack)
        open_batches = [_Batch(count, 1 << root, self._inside[root], [], {root: 0})]
        done: list[_Batch] = []
        while open_batches:
            batch = open_batches.pop()
            self._expand(batch, hint)
            if ideal and not self._is_ideal(batch, root, hint):
                self._give_back(batch.edges, batch.count)
                self._pending[root] += count
                self._slack = slack
                return None
            while batch.reached != self.all:
                rest = self._force(batch)
                if rest is None:
                    self._diagnose([*open_batches, batch])
                    for other in (*done, *open_batches, batch):
                        self._give_back(other.edges, other.count)
                    self._pending[root] += count
                    return None
                if rest.count:
                    open_batches.append(rest)
                self._expand(batch, hint)
            done.append(batch)
        return [(root, batch.count, batch.edges) for batch in done]

    def _give_back(self, edges: Sequence[Arc], count: int) -> None:
        if edges:  # a tree has each edge once, so plain indexing adds right
            ends = np.array(edges)
            self.capacity[ends[:, 0], ends[:, 1]] += count

    def _expand(self, batch: _Batch, hint: Sequence[Arc]) -> None:
        """Grows the batch by edges that can carry all of it: first along the hint, then breadth first."""
        depth, count = batch.depth, batch.count
        for tail, head in hint:
            fits = tail in depth and head not in depth and (self.max_depth is None or depth[tail] < self.max_depth)
            if fits and self._room(batch, tail, head) >= count:
                self._take(batch, tail, head)
        level = 0
        while batch.reached != self.all and (self.max_depth is None or level < self.max_depth):
            layer = sorted(rank for rank, hops in depth.items() if hops == level)
            if not layer and level > max(depth.values()):
                break
            self._expand_layer(batch, layer)
            level += 1

    def _expand_layer(self, batch: _Batch, layer: list[int]) -> None:
        """Reaches what it can from the ranks of one depth, each rank by the edge that has most of its capacity left."""
        depth, count = batch.depth, batch.count
        heads = np.array([rank for rank in range(self.ranks) if rank not in depth])
        if not len(heads) or not layer:
            return
        block = np.ix_(np.array(layer), heads)
        capacity = self.capacity[block]
        score = np.where(capacity >= count, capacity * self._scale[block], -1.0)
        best = score.argmax(axis=0)
        for column, (head, row) in enumerate(zip(heads.tolist(), best.tolist(), strict=True)):
            if score[row, column] < 0:
                continue
            if self._room(batch, layer[row], head) >= count:
                self._take(batch, layer[row], head)
                continue
            for other in np.argsort(-score[:, column], kind="stable").tolist():
                if score[other, column] < 0:
                    break
                if other != row and self._room(batch, layer[other], head) >= count:
                    self._take(batch, layer[other], head)
                    break

    def _room(self, batch: _Batch, tail: int, head: int) -> int:
        """How many trees of the batch may take the edge, by its capacity and the known cuts."""
        room = min(batch.count, int(self.capacity[tail, head]))
        crossed = self._inside[head] & ~self._inside[tail] & batch.touched
        while crossed and room > 0:
            low = crossed & -crossed
            room = min(room, self._slack[low.bit_length() - 1])
            crossed ^= low
        return max(0, room)

    def _take(self, batch: _Batch, tail: int, head: int) -> None:
        self.capacity[tail, head] -= batch.count
        crossed = self._inside[head] & ~self._inside[tail] & batch.touched
        while crossed:
            low = crossed & -crossed
            self._slack[low.bit_length() - 1] -= batch.count
            crossed ^= low
        batch.touched |= self._inside[head]
        batch.reached |= 1 << head
        batch.edges.append((tail, head))
        batch.depth[head] = batch.depth[tail] + 1

    def _force(self, batch: _Batch) -> _Batch | None:
        """No edge carries the whole batch: splits it. The rest, or None when there is no edge at all."""
        best, arc = 0, (-1, -1)
        heads = np.array([rank for rank in range(self.ranks) if rank not in batch.depth])
        deepest = max(batch.depth.values())
        for level in range(deepest + 1 if self.max_depth is None else min(deepest + 1, self.max_depth)):
            if 2 * best >= batch.count:
                break  # shallow and wide enough
            for tail in sorted(rank for rank, hops in batch.depth.items() if hops == level):
                row = self.capacity[tail, heads]
                for position in np.nonzero(row > best)[0].tolist():
                    room = self._room(batch, tail, int(heads[position])) if row[position] > best else 0
                    if room > best:
                        best, arc = room, (tail, int(heads[position]))
        if best == 0:
            return None
        rest = _Batch(batch.count - best, batch.reached, batch.touched, list(batch.edges), dict(batch.depth))
        batch.count = best
        self._take(batch, *arc)
        return rest


def _bits(column: NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(column, bitorder="little").tobytes(), "little")


def stuck_message(max_depth: int | None) -> str:
    """Why no further tree fits."""
    if max_depth is not None:
        return f"the trees don't fit within depth {max_depth}; allow more depth or a lower rate"
    return "the links can't carry as many trees as asked for"
