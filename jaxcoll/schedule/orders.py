"""In which order does each rank's result combine its contributions? Equal orders mean results equal to the bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxcoll.schedule.ir import Kind, Op, Schedule
from jaxcoll.schedule.table import Table


class RankEdge(NamedTuple):
    """An edge with the ranks at its ends, and the positions there (which order the terms of a canonical schedule)."""

    step: int
    src: int
    dst: int
    op: int
    src_position: int
    dst_position: int


def rank_edges(schedule: Schedule, table: Table, graph: int) -> list[RankEdge]:
    """The edges of a graph in their order, with ranks."""
    vertex = table.vertex[graph].tolist()
    return [
        RankEdge(e.step, vertex[e.step][e.src], vertex[e.step + 1][e.dst], int(e.op), e.src, e.dst)
        for e in schedule.graphs[graph].edges
    ]


def expressions(edges: Iterable[RankEdge], nranks: int, canonical: bool) -> list[int]:
    """A number for the value that each rank ends with; equal numbers are equal sums in equal order.

    `edges` are those that carry one chunk of a reducing collective, in step order. a + b and b + a count as equal, as
    they are in floating point.
    """
    values = list(range(nranks))
    known: dict[tuple[int, int], int] = {}

    def combined(a: int, b: int) -> int:
        return known.setdefault((a, b) if a <= b else (b, a), nranks + len(known))

    arrivals: dict[int, list[tuple[int, int]]] = {}
    copies: dict[int, int] = {}
    positions: dict[int, int] = {}

    def settle() -> None:
        for rank, terms in arrivals.items():
            terms.insert(0, (positions[rank], values[rank]))
            if canonical:
                terms.sort(key=lambda term: term[0])
            total = terms[0][1]
            for _, value in terms[1:]:
                total = combined(total, value)
            copies[rank] = total
        for rank, value in copies.items():
            values[rank] = value
        arrivals.clear()
        copies.clear()

    step = -1
    for e in edges:
        if e.step != step:
            settle()
            step = e.step
        if e.op == Op.COPY:
            copies[e.dst] = values[e.src]
        else:
            arrivals.setdefault(e.dst, []).append((e.src_position, values[e.src]))
            positions[e.dst] = e.dst_position
    settle()
    return values


def bit_equal(schedule: Schedule, table: Table | None = None) -> bool:
    """Whether a valid schedule gives all ranks the same bits, whatever the reduction rounds.

    Counting can't see this: two ranks may both hold every contribution once and have added them in different orders.
    """
    if schedule.kind is not Kind.ALL_REDUCE:
        return True  # one rank reduces each chunk, the rest are copies
    table = table or Table.identity(schedule)
    for g, graph in enumerate(schedule.graphs):
        edges = rank_edges(schedule, table, g)
        seen: set[tuple[int, ...]] = set()
        for c in graph.chunks:
            mine = tuple(i for i, e in enumerate(graph.edges) if c in e.chunks)
            if mine in seen:  # rides with a chunk already looked at
                continue
            seen.add(mine)
            if len(set(expressions((edges[i] for i in mine), schedule.nranks, schedule.canonical))) > 1:
                return False
    return True
