"""Recursive doubling and halving: log2 N steps with partners at growing or shrinking distance (REACT, A.1)."""

from __future__ import annotations

from collections.abc import Iterable

from jaxcoll.schedule.builders.registry import Builder, Request
from jaxcoll.schedule.ir import Chunk, ChunkGraph, Edge, Kind, Op, Schedule, home_chunks


def _finish(request: Request, chunks: tuple[Chunk, ...], steps: int, edges: list[Edge]) -> Schedule:
    graphs = (ChunkGraph(tuple(edges), "all"),) if edges else ()
    return Schedule(request.name, request.collective, steps if edges else 0, chunks, graphs, request.pipeline)


def core_size(n: int) -> int:
    """The largest power of two that is not above n: the positions that take part in the exchange."""
    return 1 << (n.bit_length() - 1)


def _gather(request: Request) -> Schedule:
    n = request.nranks
    edges = _gather_xor(n) if core_size(n) == n else _gather_rotated(n)
    return _finish(request, home_chunks(request.collective), (n - 1).bit_length(), edges)


def _gather_xor(n: int) -> list[Edge]:
    edges: list[Edge] = []
    for s in range((n - 1).bit_length()):
        span = 1 << s
        for p in range(n):
            first = p & -span  # the aligned group of `span` positions whose chunks p holds by now
            edges.append(Edge(s, p, p ^ span, Op.COPY, tuple(range(first, first + span))))
    return edges


def _gather_rotated(n: int) -> list[Edge]:
    # For other N the partner is at distance 2^s round the ring, and the last step fetches only what is left: still
    # ceil(log2 N) steps and N - 1 chunks a position, which folding the surplus positions away would double.
    edges: list[Edge] = []
    for s in range((n - 1).bit_length()):
        span = 1 << s
        count = min(span, n - span)
        for p in range(n):
            edges.append(Edge(s, p, (p - span) % n, Op.COPY, tuple(sorted((p + i) % n for i in range(count)))))
    return edges


def _all_reduce_doubling(request: Request) -> Schedule:
    # Partners add the same two values, so they stay equal to the bit. Surplus positions add theirs to a partner first,
    # and get the result at the end.
    n = request.nranks
    core = core_size(n)
    surplus = range(core, n)
    rounds, fold = core.bit_length() - 1, int(core < n)
    edges = [Edge(0, p, p - core, Op.REDUCE, (0,)) for p in surplus]
    edges += [Edge(fold + s, p, p ^ (1 << s), Op.REDUCE, (0,)) for s in range(rounds) for p in range(core)]
    edges += [Edge(fold + rounds, p - core, p, Op.COPY, (0,)) for p in surplus]
    return _finish(request, (Chunk(None, None),), rounds + 2 * fold, edges)


def _recursive_doubling(request: Request) -> Schedule:
    return _gather(request) if request.kind is Kind.ALL_GATHER else _all_reduce_doubling(request)


def _owned(slot: int, core: int, nchunks: int) -> list[int]:
    """Chunks that end at core position `slot`: its own, and that of the surplus position it stands in for, if any."""
    return list(range(slot, nchunks, core))


def _chunks_of(slots: Iterable[int], core: int, nchunks: int) -> tuple[int, ...]:
    return tuple(sorted(c for slot in slots for c in _owned(slot, core, nchunks)))


def _halving(core: int, nchunks: int, first_step: int) -> list[Edge]:
    """Reduce-scatter: each step a position keeps half of the slots it still works on, and sends the other half."""
    edges: list[Edge] = []
    for s in range(core.bit_length() - 1):
        span = core >> (s + 1)
        for p in range(core):
            partner = p ^ span
            slots = range(partner & -span, (partner & -span) + span)
            edges.append(Edge(first_step + s, p, partner, Op.REDUCE, _chunks_of(slots, core, nchunks)))
    return edges


def _doubling(core: int, nchunks: int, first_step: int) -> list[Edge]:
    """All-gather: the halving backwards."""
    edges: list[Edge] = []
    for s in range(core.bit_length() - 1):
        span = 1 << s
        for p in range(core):
            slots = range(p & -span, (p & -span) + span)
            edges.append(Edge(first_step + s, p, p ^ span, Op.COPY, _chunks_of(slots, core, nchunks)))
    return edges


def _halving_doubling(request: Request) -> Schedule:
    n, scatter = request.nranks, request.kind is Kind.REDUCE_SCATTER
    core = core_size(n)
    nchunks = n if scatter else core
    everything = tuple(range(nchunks))
    rounds, fold = core.bit_length() - 1, int(core < n)
    edges = [Edge(0, p, p - core, Op.REDUCE, everything) for p in range(core, n)]
    edges += _halving(core, nchunks, fold)
    step = fold + rounds
    if not scatter:
        edges += _doubling(core, nchunks, step)
        step += rounds
    edges += [Edge(step, p - core, p, Op.COPY, (p,) if scatter else everything) for p in range(core, n)]
    chunks = home_chunks(request.collective, 1 if scatter else core)
    return _finish(request, chunks, step + fold, edges)


BUILDERS = (
    Builder(
        "recursive_doubling",
        (Kind.ALL_GATHER, Kind.ALL_REDUCE),
        _recursive_doubling,
        "partners at doubling distance; fewest steps; the all_reduce sends the whole vector every step",
    ),
    Builder(
        "halving_doubling",
        (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER),
        _halving_doubling,
        "recursive halving, then doubling; few steps and, at powers of two, least data sent",
    ),
)
