"""Phase 2: switches become direct logical links (edge splitting), without losing rate.

Splitting g units at switch w replaces g of (u, w) and g of (w, v) by g of (u, v). It costs capacity only at cuts X with
w inside and u, v outside, or with u, v inside and w outside. A switch with as much capacity in as out can always be
split off completely without making any cut too small (Mader; Bang-Jensen, Frank and Jackson for the general case), but
not by any choice of pairs. Here a whole switch is split at once after a plan: every neighbour spreads over all others,
in proportion, which keeps trees shallow. The plan is bent where known cuts forbid it, then one flow check says whether
an unknown cut was hurt. If so, the cut joins the pool and the switch is split anew. Every failing check adds a cut, so
this ends; after `MAX_RETRIES` the check is made before each single split instead, which can't fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jaxcoll.errors import SynthesisError
from jaxcoll.synth.cuts import CutPool, inflow
from jaxcoll.synth.flow import FlowGraph, Query
from jaxcoll.synth.rate import Network, Packing, Tick, order_targets, violated

MAX_RETRIES = 40

IntMatrix = NDArray[np.int64]
# (switch, predecessors, successors, capacities in, capacities out) -> wanted splits, or None for the default plan
Planner = Callable[[int, list[int], list[int], IntMatrix, IntMatrix], IntMatrix | None]


@dataclass(frozen=True)
class Room:
    """What a plan for one switch must respect. int64 sums of rows and columns; a cut c loses plan[i, j] where
    tail_side[c, i] and head_side[c, j] (bool), at most slack[c]. same[i, j]: from a node back to itself."""

    inward: IntMatrix
    outward: IntMatrix
    tail_side: NDArray[np.bool_]
    head_side: NDArray[np.bool_]
    slack: IntMatrix
    same: NDArray[np.bool_]


# (plan that hurts a known cut, room) -> a plan that hurts none
Bender = Callable[[IntMatrix, Room], IntMatrix]


@dataclass
class Links:
    """A capacitated graph under splitting. `out[u][v]`, `into[v][u]`: trees that (u, v) carries, no zeros."""

    nodes: int
    out: list[dict[int, int]]
    into: list[dict[int, int]]
    splits: list[tuple[int, list[int], list[int], IntMatrix]] = field(default_factory=list)

    @staticmethod
    def of(network: Network, room: list[int]) -> Links:
        links = Links(network.nodes, [{} for _ in range(network.nodes)], [{} for _ in range(network.nodes)])
        for tail, head, amount in zip(network.tails.tolist(), network.heads.tolist(), room, strict=True):
            links.change(tail, head, amount)
        return links

    def copy(self) -> Links:
        return Links(self.nodes, [dict(d) for d in self.out], [dict(d) for d in self.into], list(self.splits))

    def change(self, tail: int, head: int, amount: int) -> None:
        """Adds `amount` (may be negative) to (tail, head); a link from a node to itself is worth nothing: dropped."""
        if tail == head:
            return
        left = self.out[tail].get(head, 0) + amount
        if left:
            self.out[tail][head] = self.into[head][tail] = left
        else:
            self.out[tail].pop(head, None)
            self.into[head].pop(tail, None)

    def arcs(self) -> tuple[list[int], list[int], list[int]]:
        """(tails, heads, capacities)."""
        tails = [tail for tail, heads in enumerate(self.out) for _ in heads]
        heads = [head for heads in self.out for head in heads]
        return tails, heads, [amount for heads in self.out for amount in heads.values()]

    def drop(self, switch: int) -> None:
        """Removes what is left at a switch."""
        for node in list(self.into[switch]):
            self.change(node, switch, -self.into[switch][node])
        for node in list(self.out[switch]):
            self.change(switch, node, -self.out[switch][node])

    def split(self, switch: int, before: list[int], after: list[int], amounts: IntMatrix) -> None:
        """Splits amounts[i, j] of (before[i], switch), (switch, after[j]), and drops what is left at the switch."""
        for i, j in zip(*(axis.tolist() for axis in np.nonzero(amounts)), strict=True):
            tail, head = before[i], after[j]
            if tail != head:  # as `change`, which this loop is too hot to call: amounts only grow here
                left = self.out[tail].get(head, 0) + int(amounts[i, j])
                self.out[tail][head] = self.into[head][tail] = left
        self.drop(switch)
        self.splits.append((switch, before, after, amounts))


def proportional(
    inward: IntMatrix, outward: IntMatrix, same: NDArray[np.bool_], start: NDArray[np.float64] | None = None
) -> IntMatrix:
    """A whole-number plan: rows sum to `inward`, columns to `outward`, nothing where `same` unless it can't be helped.

    Proportional fitting, from `start` or from an even spread, gives the shares; largest remainders round them.
    inward int64[i], outward int64[j] -> int64[i, j].
    """
    allowed = ~same
    share = np.where(allowed, np.outer(inward, outward).astype(np.float64) if start is None else start, 0.0)
    for _ in range(30):
        for axis, want in ((1, inward), (0, outward)):
            total = share.sum(axis=axis, keepdims=True)
            share = share * np.divide(want.reshape(total.shape), total, out=np.zeros_like(total), where=total > 0)
    plan = np.floor(share + 1e-9).astype(np.int64)
    rows, columns = inward - plan.sum(axis=1), outward - plan.sum(axis=0)
    _trim(plan, rows, 1)
    columns = outward - plan.sum(axis=0)
    _trim(plan, columns, 0)
    rows, columns = inward - plan.sum(axis=1), outward - plan.sum(axis=0)
    order = np.argsort(-(share - plan), axis=None, kind="stable")
    for flat in order.tolist():
        i, j = divmod(flat, plan.shape[1])
        if allowed[i, j] and rows[i] > 0 and columns[j] > 0:
            plan[i, j] += 1
            rows[i] -= 1
            columns[j] -= 1
    _fill(plan, rows, columns, allowed)
    return plan


def _trim(plan: IntMatrix, left: IntMatrix, axis: int) -> None:
    """Rounding noise of the fitting can exceed a sum by a unit; takes it back."""
    for line in np.nonzero(left < 0)[0].tolist():
        view = plan[line] if axis == 1 else plan[:, line]
        while left[line] < 0:
            view[int(np.argmax(view))] -= 1
            left[line] += 1


def _fill(plan: IntMatrix, rows: IntMatrix, columns: IntMatrix, allowed: NDArray[np.bool_]) -> None:
    """Places what is left of the row and column sums, moving other entries aside where only `same` pairs are left."""
    for i in np.nonzero(rows)[0].tolist():
        for j in np.argsort(-columns).tolist():
            amount = int(min(rows[i], columns[j]))
            if allowed[i, j] and amount > 0:
                plan[i, j] += amount
                rows[i] -= amount
                columns[j] -= amount
    for i in np.nonzero(rows)[0].tolist():
        for j in np.nonzero(columns)[0].tolist():
            for k, m in zip(*(axis.tolist() for axis in np.nonzero(plan)), strict=True):
                amount = int(min(rows[i], columns[j], plan[k, m]))
                if amount > 0 and allowed[k, j] and allowed[i, m]:
                    plan[k, m] -= amount
                    plan[k, j] += amount
                    plan[i, m] += amount
                    rows[i] -= amount
                    columns[j] -= amount
            amount = int(min(rows[i], columns[j]))
            if amount > 0:  # no way round: this much goes back where it came from
                plan[i, j] += amount
                rows[i] -= amount
                columns[j] -= amount


class Remover:
    """Splits all switches off a graph whose ranks each broadcast `trees` trees."""

    def __init__(
        self,
        network: Network,
        packing: Packing,
        pool: CutPool,
        tick: Tick,
        planner: Planner | None = None,
        bender: Bender | None = None,
    ):
        self.ranks, self.trees, self.pool, self.tick = network.ranks, packing.trees, pool, tick
        self.planner, self.bender = planner, bender or bend_greedily
        self.links = Links.of(network, packing.room)
        self.checks = 0
        self._first: list[int] = []
        self._stalled = False
        self._plans: dict[tuple[bytes, ...], IntMatrix] = {}

    def run(self, check: bool = True) -> Links:
        """The logical links between ranks; `splits` tells how they run through the switches.

        Without `check` the plans are applied as they are; whether they carry the rate is then the tree packer's to say.
        """
        switches = range(self.ranks, self.links.nodes)
        if not switches:
            return self.links
        start = self.links.copy() if check else self.links
        for switch in switches:
            self._attempt(switch, bend=False)
        if not check or not self._learn():
            return self.links
        self.links = start
        left = set(switches)
        while left:
            # The least entangled switch first: splitting it adds the fewest logical links.
            switch = min(left, key=lambda w: (len(self.links.into[w]) * len(self.links.out[w]), w))
            left.remove(switch)
            self._remove(switch)
            self.tick(1 - len(left) / max(1, len(switches)))
        return self.links

    def _remove(self, switch: int) -> None:
        before = self.links.copy()
        for _ in range(MAX_RETRIES):
            self._attempt(switch, bend=True)
            if not self._learn():
                return
            self.links = before.copy()
            if self._stalled:
                break
        self._carefully(switch)

    def _learn(self) -> bool:
        """Checks all cuts by flows. True when some are too small; they are in the pool then."""
        tails, heads, capacity = self.links.arcs()
        graph = FlowGraph(self.links.nodes, tails, heads)
        self.checks += 1
        found = violated(graph, self.ranks, capacity, self.trees, self._first, max_cuts=4)
        self._first += [cut.target for cut in found]
        fresh = [self.pool.add(mask) for cut in found for mask in (cut.small, cut.large)]
        self._stalled = not any(fresh)
        return bool(found)

    def _slack(self) -> tuple[NDArray[np.bool_], IntMatrix]:
        """(inside [cuts, nodes], what each cut can lose)."""
        inside = self.pool.matrix()
        tails, heads, capacity = self.links.arcs()
        flows = inflow(inside, np.array(tails), np.array(heads), np.array(capacity, np.int64))
        outside = self.ranks - inside[:, : self.ranks].sum(axis=1)
        return inside, flows - self.trees * outside

    def _attempt(self, switch: int, bend: bool) -> None:
        """Splits `switch` by plan; with `bend`, as far as the known cuts allow. What can't be placed is dropped."""
        before, after = list(self.links.into[switch]), list(self.links.out[switch])
        inward = np.array([self.links.into[switch][u] for u in before], np.int64)
        outward = np.array([self.links.out[switch][v] for v in after], np.int64)
        plan = self.planner(switch, before, after, inward, outward) if self.planner else None
        if plan is None:
            plan = self._default(before, after, inward, outward)
        if bend:
            plan = self._within_cuts(switch, before, after, inward, outward, plan)
        self.links.split(switch, before, after, plan)

    def _default(self, before: list[int], after: list[int], inward: IntMatrix, outward: IntMatrix) -> IntMatrix:
        same = np.equal.outer(np.array(before), np.array(after))
        key = (inward.tobytes(), outward.tobytes(), same.tobytes())
        if key not in self._plans:  # large networks are made of few kinds of switches
            self._plans[key] = default_plan(same, inward, outward)
        return self._plans[key]

    def _within_cuts(
        self, switch: int, before: list[int], after: list[int], inward: IntMatrix, outward: IntMatrix, plan: IntMatrix
    ) -> IntMatrix:
        inside, slack = self._slack()
        through = inside[:, [switch]]
        tail_side, head_side = inside[:, before] ^ through, inside[:, after] ^ through
        loss = ((tail_side.astype(np.float64) @ plan.astype(np.float64)) * head_side).sum(axis=1)
        if not (loss > slack).any():
            return plan
        same = np.equal.outer(np.array(before), np.array(after))
        return self.bender(plan, Room(inward, outward, tail_side, head_side, slack, same))

    def _carefully(self, switch: int) -> None:
        """Splits one pair after another, each as much as a flow check of its own allows."""
        before, after = list(self.links.into[switch]), list(self.links.out[switch])
        amounts = np.zeros((len(before), len(after)), np.int64)
        pairs = [(i, j) for i in range(len(before)) for j in range(len(after))]
        pairs.sort(key=lambda pair: before[pair[0]] == after[pair[1]])  # a way back to the same node wastes capacity
        for i, j in pairs:
            u, v = before[i], after[j]
            most = min(self.links.into[switch].get(u, 0), self.links.out[switch].get(v, 0))
            amount = self._splittable(u, switch, v, most) if most else 0
            if amount:
                self.links.change(u, switch, -amount)
                self.links.change(switch, v, -amount)
                self.links.change(u, v, amount)
                amounts[i, j] = amount
        self.links.drop(switch)
        self.links.splits.append((switch, before, after, amounts))
        if self._learn():
            raise SynthesisError(
                f"switch {switch} can't be replaced by direct links at this rate: more capacity enters it than leaves, "
                "or the reverse, once capacities are whole trees; give it equal capacity in and out"
            )

    def _splittable(self, tail: int, switch: int, head: int, most: int) -> int:
        """How much of (tail, switch), (switch, head) may be split off, at most `most`."""
        tails, heads, capacity = self.links.arcs()
        graph = FlowGraph(self.links.nodes, tails, heads)
        total = self.ranks * self.trees
        demand = [self.trees] * self.ranks + [0] * (self.links.nodes - self.ranks)
        ends = [tail] if tail == head else [tail, head]
        targets = order_targets(self.ranks, self._first)
        outer = [rank for rank in targets if rank not in ends]
        inner: list[int] = [] if min(ends) < self.ranks else targets
        for sources, sinks, others in ((ends, [switch], outer), ([switch], ends, inner)):
            while most:
                self.checks += 1
                query = Query(capacity, demand, total + most, others, sources, sinks)
                found = graph.cuts(query)
                if not found:
                    break
                most = max(0, found[0].value - total)
        return most


def default_plan(same: NDArray[np.bool_], inward: IntMatrix, outward: IntMatrix) -> IntMatrix:
    """Everybody to everybody in proportion; where the sums differ, what is too much on one side is left out evenly."""
    least = min(int(inward.sum()), int(outward.sum()))
    return proportional(_shrunk(inward, least), _shrunk(outward, least), same)


def scaled_plan(same: NDArray[np.bool_], inward: IntMatrix, outward: IntMatrix, old: IntMatrix) -> IntMatrix:
    """An earlier plan fitted to other capacities: its proportions as far as the new sums allow."""
    least = min(int(inward.sum()), int(outward.sum()))
    start = old.astype(np.float64) * (least / float(old.sum()))
    start += 1e-6 * max(1.0, float(start.max()))  # what was unused may be needed now
    return proportional(_shrunk(inward, least), _shrunk(outward, least), same, start)


def _shrunk(amounts: IntMatrix, total: int) -> IntMatrix:
    """The amounts scaled down to the given sum, in whole numbers."""
    have = int(amounts.sum())
    if have == total:
        return amounts
    scaled = np.array([amount * total // have for amount in amounts.tolist()], np.int64)
    rest = np.argsort(-(amounts * total % have), kind="stable")
    scaled[rest[: total - int(scaled.sum())]] += 1
    return scaled


def bend_greedily(plan: IntMatrix, room: Room) -> IntMatrix:
    """The plan, each entry cut to what the known cuts can still lose, the rest placed wherever there is room."""
    made = np.zeros_like(plan)
    rows, columns, left = room.inward.copy(), room.outward.copy(), room.slack.copy()

    def place(i: int, j: int, wanted: int) -> None:
        amount = int(min(wanted, rows[i], columns[j]))
        hurt = room.tail_side[:, i] & room.head_side[:, j]
        if amount > 0 and hurt.any():
            amount = min(amount, int(left[hurt].min()))
        if amount > 0:
            made[i, j] += amount
            rows[i] -= amount
            columns[j] -= amount
            left[hurt] -= amount

    for i, j in zip(*(axis.tolist() for axis in np.nonzero(plan)), strict=True):
        place(i, j, int(plan[i, j]))
    for back in (False, True):
        for i in np.nonzero(rows)[0].tolist():
            for j in np.nonzero(columns)[0].tolist():
                if room.same[i, j] == back:
                    place(i, j, int(rows[i]))
    return made
