"""Rings: every position sends to its right neighbour only (REACT, A.1)."""

from __future__ import annotations

from jaxcoll.schedule.builders.registry import Builder, Request
from jaxcoll.schedule.ir import Chunk, ChunkGraph, Edge, Kind, Op, Schedule, home_chunks


def _hops(n: int, chunk: int, start: int, first_step: int, op: Op) -> list[Edge]:
    """A chunk's way once around the ring from `start`, one hop a step."""
    return [Edge(first_step + s, (start + s) % n, (start + s + 1) % n, op, (chunk,)) for s in range(n - 1)]


def _ring(request: Request) -> Schedule:
    # Chunk c is reduced from position c + 1 round to position c, then spread from there; each is a graph of its own.
    n, kind = request.nranks, request.kind
    graphs: list[ChunkGraph] = []
    for c in range(n if n > 1 else 0):
        edges: list[Edge] = []
        if kind.reduces:
            edges += _hops(n, c, c + 1, 0, Op.REDUCE)
        if kind is not Kind.REDUCE_SCATTER:
            edges += _hops(n, c, c, n - 1 if kind.reduces else 0, Op.COPY)
        graphs.append(ChunkGraph(tuple(edges), f"chunk{c}"))
    steps = (n - 1) * (2 if kind is Kind.ALL_REDUCE else 1)
    chunks = home_chunks(request.collective, n if kind is Kind.ALL_REDUCE else 1)
    return Schedule(request.name, request.collective, steps, chunks, tuple(graphs), request.pipeline)


def _chain(request: Request) -> Schedule:
    # A chain is a ring cut at the root: it pays when `pipeline` keeps all its hops busy.
    n, root = request.nranks, request.root
    start, op = (root, Op.COPY) if request.kind is Kind.BROADCAST else (root + 1, Op.REDUCE)
    edges = _hops(n, 0, start, 0, op)
    graphs = (ChunkGraph(tuple(edges), "chain"),) if edges else ()
    return Schedule(request.name, request.collective, n - 1, (Chunk(None, None),), graphs, request.pipeline)


def _make(request: Request) -> Schedule:
    return _chain(request) if request.kind.rooted else _ring(request)


BUILDERS = (
    Builder(
        "ring",
        (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.BROADCAST, Kind.REDUCE),
        _make,
        "neighbours in a ring; least data sent, most steps; a pipelined chain for broadcast and reduce",
    ),
)
