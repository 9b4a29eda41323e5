"""Safe transforms of a table, and which of them can help (REACT, sections 5.3.1 and 5.3.2)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from jaxcoll.schedule import Equivalence, Schedule, Table, bit_equal
from jaxcoll.schedule.verify import valid
from jaxcoll.tuner.measure import Pattern, pattern_of


@dataclasses.dataclass(frozen=True, order=True)
class Swap:
    """Ranks a and b exchanged: in vertex row (graph, step), in a graph (step None), or everywhere (graph None)."""

    graph: int | None
    step: int | None
    a: int
    b: int

    def apply(self, table: Table) -> Table:
        """The table after the swap."""
        if self.graph is None:
            return table.swap_global(self.a, self.b)
        if self.step is None:
            return table.swap_graph(self.graph, self.a, self.b)
        return table.swap_vertex(self.graph, self.step, self.a, self.b)

    def text(self, schedule: Schedule) -> str:
        """For a decision's reason."""
        if self.graph is None:
            return f"swapped ranks {self.a} and {self.b} everywhere"
        where = graph_name(schedule, self.graph)
        at = "" if self.step is None else f" at step {self.step}"
        return f"swapped positions of {self.a} and {self.b} in {where}{at}"


def graph_name(schedule: Schedule, graph: int) -> str:
    """A chunk graph's name, or its number."""
    return schedule.graphs[graph].name or f"graph {graph}"


@dataclasses.dataclass(frozen=True)
class Viable:
    """A swap that keeps the collective correct, and whether it lowers the congested rank's degree."""

    swap: Swap
    table: Table
    lowers: bool


_KEPT = 20_000


class _Known:
    """What has been found out about the tables of one schedule."""

    def __init__(self, schedule: Schedule):
        self.tables: dict[bytes, bool] = {}
        self.vertices = Equivalence(schedule)


@functools.lru_cache(maxsize=256)
def _known_of(schedule: Schedule) -> _Known:
    return _Known(schedule)


def is_valid(schedule: Schedule, table: Table) -> bool:
    """Whether the table keeps the collective correct, and all ranks' results equal to the bit; cached by schedule.

    In a recursive doubling a swap at one step alone lets each rank's result hold all contributions once, added in
    another order than on its neighbour: parameters that are taken to be replicated would drift apart.
    """
    known = _known_of(schedule).tables
    key = hashlib.blake2b(np.array(table.home).tobytes() + table.vertex.tobytes(), digest_size=16).digest()
    if key not in known:
        if len(known) >= _KEPT:
            known.clear()
        # A permutation of all steps alike renames the ranks of every sum in the same way.
        alike = bool((table.vertex == table.vertex[:, :1]).all())
        known[key] = valid(schedule, table) and (alike or bit_equal(schedule, table))
    return known[key]


def swapped(schedule: Schedule, table: Table, swap: Swap) -> Table | None:
    """The table after the swap, or None where it would break the collective (see `is_valid`) or change nothing.

    `table` must be valid. Swaps at one step are looked up among the position-equivalent ones, which are worked out for
    all ranks of a vertex together, once a program.
    """
    if swap.graph is not None and swap.step is not None:
        allowed = _known_of(schedule).vertices.allows(table, swap.graph, swap.step, swap.a, swap.b)
        return swap.apply(table) if allowed else None
    after = swap.apply(table)
    return after if is_valid(schedule, after) else None


def viable(
    schedule: Schedule,
    table: Table,
    nbytes: int,
    graph: int,
    step: int,
    rank: int,
    exclude: Collection[int] = (),
) -> Iterator[list[Viable]]:
    """Swaps for the congested vertex (step, rank) of `graph`, in groups of falling priority.

    Those that lower the rank's degree come first; among those, and among the others, position-equivalent swaps come
    before chunk-local ones and those before global ones. Left out are swaps that break the collective, that raise the
    degree of a place at some step over the whole pattern, and those with a rank of `exclude`.
    """
    before = pattern_of(schedule, table, nbytes)
    others = [b for b in range(schedule.nranks) if b != rank and b not in exclude]
    remaining: list[list[Viable]] = []
    for kind in ((graph, step), (graph, None), (None, None)):
        options = [Swap(kind[0], kind[1], rank, b) for b in others]
        found = [v for swap in options if (v := _check(schedule, table, nbytes, swap, before, step)) is not None]
        yield [v for v in found if v.lowers]
        remaining.append([v for v in found if not v.lowers])
    yield from remaining


def _check(schedule: Schedule, table: Table, nbytes: int, swap: Swap, before: Pattern, step: int) -> Viable | None:
    after_table = swapped(schedule, table, swap)
    if after_table is None:
        return None
    after = pattern_of(schedule, after_table, nbytes)
    if not _keeps_degrees(before, after, swap.a, swap.b):
        return None
    return Viable(swap, after_table, _degree(after, step, swap.a) < _degree(before, step, swap.a))


def _degree(pattern: Pattern, step: int, rank: int) -> int:
    """Flows at vertex (step, rank): those coming in from the step before and those going out."""
    arriving = int(pattern.recv_degree[step - 1, rank]) if step > 0 else 0
    leaving = int(pattern.send_degree[step, rank]) if step < len(pattern.send_degree) else 0
    return max(arriving, leaving)


def _keeps_degrees(before: Pattern, after: Pattern, a: int, b: int) -> bool:
    """At each step, neither rank has more flows than the one that stood in its place had, in either direction."""
    pair = [a, b]
    for old, new in ((before.send_degree, after.send_degree), (before.recv_degree, after.recv_degree)):
        if bool((new[:, pair].max(axis=1, initial=0) > old[:, pair].max(axis=1, initial=0)).any()):
            return False
    return True


def moved_edges(before: Pattern, after: Pattern) -> npt.NDArray[np.bool_]:
    """Edges whose ends or degree differ between two tables of one schedule."""
    same = (before.plan.src == after.plan.src) & (before.plan.dst == after.plan.dst) & (before.degree == after.degree)
    return ~same
