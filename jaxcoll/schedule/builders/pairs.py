"""Patterns without forwarding: every position talks to every other one itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.builders.registry import Builder, Request
from jaxcoll.schedule.ir import Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule, home_chunks


def _graphs(parts: Iterable[Sequence[Edge]], name: str) -> tuple[ChunkGraph, ...]:
    return tuple(ChunkGraph(tuple(edges), f"{name}{i}") for i, edges in enumerate(parts) if edges)


def _steps(graphs: Iterable[ChunkGraph]) -> int:
    return max((e.step + 1 for g in graphs for e in g.edges), default=0)


def _finish(request: Request, chunks: tuple[Chunk, ...], graphs: tuple[ChunkGraph, ...]) -> Schedule:
    return Schedule(request.name, request.collective, _steps(graphs), chunks, graphs, request.pipeline)


def _fan_in(n: int, at: int, chunk: int, step: int) -> list[Edge]:
    # The order is rotated, so that not everybody starts with a message to the same position.
    return [Edge(step, (at + i) % n, at, Op.REDUCE, (chunk,)) for i in range(1, n)]


def _fan_out(n: int, at: int, chunk: int, step: int) -> list[Edge]:
    return [Edge(step, at, (at + i) % n, Op.COPY, (chunk,)) for i in range(1, n)]


def _shares(value: Any, kind: Kind, n: int) -> list[int]:
    if value is None:
        return [1] * n
    if kind is not Kind.ALL_REDUCE:
        raise ScheduleError(f"direct: leave shares out; only all_reduce takes them, {kind.label} has fixed ones")
    wanted = f"direct: shares={value!r}; give {n} integers >= 0, not all 0: the part that each position reduces"
    try:
        shares = [int(w) for w in value]
        exact = all(int(w) == w for w in value)
    except (TypeError, ValueError, OverflowError):
        raise ScheduleError(wanted) from None
    if len(shares) != n or not exact or min(shares) < 0 or sum(shares) == 0:
        raise ScheduleError(wanted)
    return shares


def _direct_all_reduce(request: Request) -> Schedule:
    n = request.nranks
    shares = _shares(request.params.get("shares"), request.kind, n)
    parts = [[*_fan_in(n, p, p, 0), *_fan_out(n, p, p, 1)] if w else [] for p, w in enumerate(shares)]
    chunks = tuple(Chunk(None, None, w) for w in shares)
    return _finish(request, chunks, _graphs(parts, "chunk"))


def _direct(request: Request) -> Schedule:
    n, kind, root = request.nranks, request.kind, request.root
    if kind is Kind.ALL_REDUCE:
        return _direct_all_reduce(request)
    _shares(request.params.get("shares"), kind, n)
    chunks = home_chunks(request.collective)
    if kind is Kind.ALL_TO_ALL:
        parts = [[Edge(0, p, q, Op.COPY, (p * n + q,)) for q in _others(n, p)] for p in range(n)]
        return _finish(request, chunks, _graphs(parts, "from"))
    if kind.rooted:
        fan = _fan_in if kind is Kind.REDUCE else _fan_out
        return _finish(request, chunks, _graphs([fan(n, root, 0, 0)], "root"))
    fan = _fan_in if kind is Kind.REDUCE_SCATTER else _fan_out
    return _finish(request, chunks, _graphs([fan(n, p, p, 0) for p in range(n)], "chunk"))


def _others(n: int, p: int) -> list[int]:
    return [(p + i) % n for i in range(1, n)]


def _one_shot(request: Request) -> Schedule:
    n = request.nranks
    edges = [Edge(0, p, q, Op.REDUCE, (0,)) for q in range(n) for p in range(n) if p != q]
    # Every position adds all contributions itself: only a common order of additions gives all of them the same bits.
    return replace(_finish(request, (Chunk(None, None),), _graphs([edges], "all")), canonical=True)


def _pairwise(request: Request) -> Schedule:
    n, kind = request.nranks, request.kind
    chunks = home_chunks(request.collective, n if kind is Kind.ALL_REDUCE else 1)
    if kind is Kind.ALL_TO_ALL:
        # Nothing is forwarded, so the finest graphs would be single edges; one a step keeps the tables small.
        parts = [[Edge(s - 1, p, (p + s) % n, Op.COPY, (p * n + (p + s) % n,)) for p in range(n)] for s in range(1, n)]
        return _finish(request, chunks, _graphs(parts, "distance"))
    parts = [_pairwise_chunk(n, kind, p) for p in range(n)]
    return _finish(request, chunks, _graphs(parts, "chunk"))


def _pairwise_chunk(n: int, kind: Kind, at: int) -> list[Edge]:
    edges: list[Edge] = []
    if kind.reduces:
        edges += [Edge(s - 1, (at - s) % n, at, Op.REDUCE, (at,)) for s in range(1, n)]
    if kind is not Kind.REDUCE_SCATTER:
        first = n - 1 if kind.reduces else 0
        edges += [Edge(first + s - 1, at, (at + s) % n, Op.COPY, (at,)) for s in range(1, n)]
    return edges


def _permute(request: Request) -> Schedule:
    pairs = _checked_perm(request.params["perm"], request.collective)
    edges = [Edge(0, src, dst, Op.COPY, (i,)) for i, (src, dst) in enumerate(pairs) if src != dst]
    return _finish(request, tuple(Chunk(src, dst) for src, dst in pairs), _graphs([edges], "all"))


def _checked_perm(value: Any, collective: Collective) -> list[tuple[int, int]]:
    n = collective.nranks
    try:
        pairs = [(int(src), int(dst)) for src, dst in value]
    except (TypeError, ValueError, OverflowError):
        raise ScheduleError(f"permute: perm={value!r}; give (source, destination) pairs") from None
    for side, ends in (("source", [s for s, _ in pairs]), ("destination", [d for _, d in pairs])):
        outside = [p for p in ends if not 0 <= p < n]
        if outside:
            raise ScheduleError(f"permute: {side} {outside[0]} lies outside 0..{n - 1}")
        twice = [p for p in set(ends) if ends.count(p) > 1]
        if twice:
            raise ScheduleError(f"permute: {side} {twice[0]} appears twice; every {side} may appear once")
    return pairs


BUILDERS = (
    Builder(
        "direct",
        (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.BROADCAST, Kind.REDUCE),
        _direct,
        "all pairs at once: one step, two for all_reduce",
        {"shares": "all_reduce: an integer weight a position, the part of the data it reduces, maybe 0 (all 1)"},
    ),
    Builder("one_shot", (Kind.ALL_REDUCE,), _one_shot, "everybody sends everything to everybody; for tiny messages"),
    Builder(
        "pairwise",
        (Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_REDUCE),
        _pairwise,
        "all pairs, one partner a step",
    ),
    Builder(
        "permute", (Kind.PERMUTE,), _permute, "one message a pair", {"perm": "(source, destination) pairs"}, ("perm",)
    ),
)
