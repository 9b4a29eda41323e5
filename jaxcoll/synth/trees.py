"""Phase 3: spanning trees out of every rank, packed into the logical links.

Tree packing by Edmonds' theorem: with `pending` trees still to come from every rank, an edge may be taken as long as
every cut X keeps capacity >= the pending trees that have not entered X. The textbook way asks for a maximum flow per
edge. Here trees grow breadth first against the *known* cuts, a few machine words of bit mask per edge. Only when a tree
gets stuck do flows tell which unknown cut was overdrawn; it joins the pool, and the trees from the one that overdrew it
onwards are grown again. A packing that is complete needs no proof: it fits the capacities. If nothing was overdrawn, the
tree is grown with a flow check per edge, which Edmonds' theorem says can't get stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxcoll.errors import SynthesisError
from jaxcoll.synth.cuts import CutPool, mask_matrix
from jaxcoll.synth.flow import Cut, FlowGraph, Query, members_of
from jaxcoll.synth.rate import Tick, order_targets

Arc = tuple[int, int]


@dataclass(frozen=True)
class Tree:
    """`count` equal spanning trees out of `root`: edges (parent, child), parents before children."""

    root: int
    count: int
    edges: tuple[Arc, ...]

    def depths(self) -> dict[int, int]:
        """Hops from the root, per rank."""
        depth = {self.root: 0}
        for parent, child in self.edges:
            depth[child] = depth[parent] + 1
        return depth

    def depth(self) -> int:
        """The longest chain of hops."""
        return max(self.depths().values())


@dataclass(frozen=True)
class Order:
    """A wish: `count` trees out of `root`, along `hint` (edges of an earlier tree) where that is still possible."""

    root: int
    count: int
    hint: tuple[Arc, ...] = ()


@dataclass
class _Batch:
    """`count` equal trees while they grow; `touched`: mask of the known cuts that they have entered."""

    count: int
    reached: int
    touched: int
    edges: list[Arc]
    depth: dict[int, int]


class Packer:
    """Packs trees into `capacity` (dict per tail: head -> trees). `max_depth`: no tree may be deeper (None: any)."""

    def __init__(
        self, ranks: int, out: Sequence[dict[int, int]], pool: CutPool, tick: Tick, max_depth: int | None = None
    ):
        self.ranks, self.pool, self.tick, self.max_depth = ranks, pool, tick, max_depth
        self.capacity = [dict(heads) for heads in out[:ranks]]
        self.all = (1 << ranks) - 1
        self.checks = self.rollbacks = self.careful = 0
        tails = [tail for tail, heads in enumerate(self.capacity) for _ in heads]
        self._arcs = (tails, [head for heads in self.capacity for head in heads])
        self._graph: FlowGraph | None = None
        self._first: list[int] = []
        self._slack: list[int] = []
        self._inside: list[int] = []  # per rank: mask of the known cuts that hold it
        self._pending = [0] * ranks

    def run(self, orders: Sequence[Order]) -> list[Tree]:
        """All trees. Raises SynthesisError when the orders can't be met (with `max_depth`, or too little capacity)."""
        for order in orders:
            self._pending[order.root] += order.count
        self._index()
        grown: list[list[Tree]] = []
        while len(grown) < len(orders):
            order = orders[len(grown)]
            trees = self._grow(order, careful=False)
            if trees is None:
                if self._roll_back(orders, grown):
                    continue
                trees = self._grow(order, careful=True)
                if trees is None:
                    raise SynthesisError(self._stuck(order))
            grown.append(trees)
            if len(grown) % 16 == 0:
                self.tick(len(grown) / len(orders))
        return [tree for trees in grown for tree in trees]

    def _stuck(self, order: Order) -> str:
        if self.max_depth is not None:
            return f"no tree of depth {self.max_depth} is left for rank {order.root}; allow more depth or a lower rate"
        return f"the links can't carry {order.count} more trees out of rank {order.root}"

    # -- known cuts

    def _index(self) -> None:
        """Slack of every known cut, from scratch: capacity into it less the pending trees of the ranks outside."""
        inside = mask_matrix(self.pool.masks, self.ranks)
        self._inside = [_bits(column) for column in inside.T]
        tails, heads = np.array(self._arcs[0], np.int64), np.array(self._arcs[1], np.int64)
        capacity = np.array(self._capacities(), np.int64)
        pending = np.array(self._pending, np.int64)
        total = int(pending.sum())
        self._slack = [
            int(capacity[side[heads] & ~side[tails]].sum()) - total + int(pending[side].sum()) for side in inside
        ]

    def _capacities(self) -> list[int]:
        return [self.capacity[tail].get(head, 0) for tail, head in zip(*self._arcs, strict=True)]

    def _cuts(self, query: Query) -> list[Cut]:
        if self._graph is None:
            self._graph = FlowGraph(self.ranks, *self._arcs)
        self.checks += 1
        return self._graph.cuts(query)

    def _roll_back(self, orders: Sequence[Order], grown: list[list[Tree]]) -> bool:
        """Finds overdrawn cuts; undoes trees until none of them is. False when no cut is overdrawn."""
        targets = order_targets(self.ranks, self._first)
        query = Query(self._capacities(), self._pending, sum(self._pending), targets, max_cuts=4)
        found = self._cuts(query)
        if not found:
            return False
        self._first += [cut.target for cut in found]
        self.rollbacks += 1
        fresh = [mask for cut in found for mask in (cut.small, cut.large) if self.pool.add(mask)]
        if not fresh:
            raise SynthesisError("the logical links carry fewer trees than asked for")
        keep = len(grown)
        for mask in fresh:
            keep = min(keep, self._last_good(mask, grown))
        while len(grown) > keep:
            for tree in grown.pop():
                for tail, head in tree.edges:
                    self.capacity[tail][head] = self.capacity[tail].get(head, 0) + tree.count
            self._pending[orders[len(grown)].root] += orders[len(grown)].count
        self._index()
        return True

    def _last_good(self, mask: int, grown: list[list[Tree]]) -> int:
        """How many of the grown orders can stay for this cut not to be overdrawn."""
        slack = sum(
            amount
            for tail, heads in enumerate(self.capacity)
            if not mask >> tail & 1
            for head, amount in heads.items()
            if mask >> head & 1
        ) - sum(count for rank, count in enumerate(self._pending) if not mask >> rank & 1)
        keep = len(grown)
        while slack < 0 and keep:
            keep -= 1
            for tree in grown[keep]:
                entries = sum(1 for tail, head in tree.edges if mask >> head & 1 and not mask >> tail & 1)
                slack += tree.count * (entries - (0 if mask >> tree.root & 1 else 1))
        return keep

    # -- growth

    def _grow(self, order: Order, careful: bool) -> list[Tree] | None:
        """The trees of one order, taken from the capacities; None (and nothing taken) when stuck."""
        self.careful += careful
        self._pending[order.root] -= order.count
        open_batches = [_Batch(order.count, 1 << order.root, self._inside[order.root], [], {order.root: 0})]
        done: list[_Batch] = []
        while open_batches:
            batch = open_batches.pop()
            self._expand(batch, order.hint, careful, open_batches)
            while batch.reached != self.all:
                rest = self._force(batch, careful, open_batches)
                if rest is None:
                    self._undo(order, [*done, *open_batches, batch])
                    return None
                if rest.count:
                    open_batches.append(rest)
                self._expand(batch, order.hint, careful, open_batches)
            done.append(batch)
        return [Tree(order.root, batch.count, tuple(batch.edges)) for batch in done]

    def _undo(self, order: Order, batches: list[_Batch]) -> None:
        self._pending[order.root] += order.count
        for batch in batches:
            for tail, head in batch.edges:
                self.capacity[tail][head] = self.capacity[tail].get(head, 0) + batch.count
        self._index()

    def _expand(self, batch: _Batch, hint: Sequence[Arc], careful: bool, others: list[_Batch]) -> None:
        """Grows the batch by edges that can carry all of it: first along the hint, then breadth first."""
        depth = batch.depth
        for tail, head in hint:
            if tail in depth and head not in depth and self._fits(batch, tail, head, careful, others):
                self._take(batch, tail, head)
        queue = deque(sorted(depth, key=depth.__getitem__))
        limit = self.max_depth
        while queue and batch.reached != self.all:
            tail = queue.popleft()
            if limit is not None and depth[tail] >= limit:
                continue
            for head, amount in list(self.capacity[tail].items()):
                if amount >= batch.count and head not in depth and self._fits(batch, tail, head, careful, others):
                    self._take(batch, tail, head)
                    queue.append(head)

    def _fits(self, batch: _Batch, tail: int, head: int, careful: bool, others: list[_Batch]) -> bool:
        return self._room(batch, tail, head, careful, others) >= batch.count

    def _room(self, batch: _Batch, tail: int, head: int, careful: bool, others: list[_Batch]) -> int:
        """How many trees of the batch may take the edge, by capacity and the known cuts (careful: by all cuts)."""
        room = min(batch.count, self.capacity[tail].get(head, 0))
        crossed = self._inside[head] & ~self._inside[tail] & batch.touched
        while crossed and room > 0:
            low = crossed & -crossed
            room = min(room, self._slack[low.bit_length() - 1])
            crossed ^= low
        if room <= 0 or not careful:
            return max(0, room)
        groups = [(other.count, members_of(other.reached)) for other in others]
        demand = sum(self._pending) + sum(other.count for other in others)
        query = Query(self._capacities(), self._pending, demand + room, (), (tail,), (head,), groups)
        found = self._cuts(query)
        return max(0, found[0].value - demand) if found else room

    def _take(self, batch: _Batch, tail: int, head: int) -> None:
        left = self.capacity[tail][head] - batch.count
        if left:
            self.capacity[tail][head] = left
        else:
            del self.capacity[tail][head]
        crossed = self._inside[head] & ~self._inside[tail] & batch.touched
        while crossed:
            low = crossed & -crossed
            self._slack[low.bit_length() - 1] -= batch.count
            crossed ^= low
        batch.touched |= self._inside[head]
        batch.reached |= 1 << head
        batch.edges.append((tail, head))
        batch.depth[head] = batch.depth[tail] + 1

    def _force(self, batch: _Batch, careful: bool, others: list[_Batch]) -> _Batch | None:
        """No edge carries the whole batch: splits it at the widest one. The rest, or None when there is none."""
        best, arc = 0, (-1, -1)
        for tail, level in batch.depth.items():
            if self.max_depth is not None and level >= self.max_depth:
                continue
            for head, amount in self.capacity[tail].items():
                if amount > best and head not in batch.depth:
                    room = self._room(batch, tail, head, careful, others)
                    if room > best:
                        best, arc = room, (tail, head)
        if best == 0:
            return None
        rest = _Batch(batch.count - best, batch.reached, batch.touched, list(batch.edges), dict(batch.depth))
        batch.count = best
        self._take(batch, *arc)
        return rest


def _bits(column: NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(column, bitorder="little").tobytes(), "little")
