"""The verifier: every code is found at its place, and its verdict is the interpreter's."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcoll.errors import ScheduleInvalid
from jaxcoll.schedule import (
    Chunk,
    ChunkGraph,
    Collective,
    Edge,
    Kind,
    Op,
    Schedule,
    Table,
    bit_equal,
    build,
    check,
    interpret,
    valid,
    verify,
)

from .cases import all_schedules, expected, inputs_for


def _with_edges(schedule: Schedule, graph: int, edges: list[Edge]) -> Schedule:
    graphs = list(schedule.graphs)
    graphs[graph] = ChunkGraph(tuple(edges), graphs[graph].name)
    return replace(schedule, graphs=tuple(graphs))


def _codes(schedule: Schedule, table: Table | None = None) -> set[str]:
    found = verify(schedule, table)
    assert valid(schedule, table) == (not found)
    return {f.code for f in found}


def test_a_lost_edge_is_missing_with_its_place() -> None:
    ring = build("ring", "all_reduce", 4)
    broken = _with_edges(ring, 2, list(ring.graphs[2].edges[:-1]))
    (finding,) = verify(broken)
    assert (finding.code, finding.chunk, finding.rank) == ("missing", 2, 1)
    assert "ranks 0, 1, 3" not in finding.message
    assert "contributions of ranks 0, 2, 3" in finding.message or "contribution" in finding.message


def test_an_addition_made_twice_is_a_duplicate() -> None:
    # bit vectors would accept this: every contribution is there, one of them twice
    tree = build("binomial", "reduce", 4)
    edges = [*tree.edges, Edge(1, 1, 0, Op.REDUCE, (0,))]
    (finding,) = verify(_with_edges(tree, 0, edges))
    assert (finding.code, finding.rank) == ("duplicate", 0)
    assert "rank 1" in finding.message


def test_a_copy_over_a_partial_sum_loses_it() -> None:
    tree = build("binomial", "reduce", 4)
    edges = [replace(e, op=Op.COPY) if e.src == 1 else e for e in tree.edges]
    assert _codes(_with_edges(tree, 0, edges)) == {"missing"}


def test_a_copy_that_replaces_what_is_not_needed_is_fine() -> None:
    # rank 2 gets a partial sum that nobody asked for, and the right result afterwards
    collective = Collective(Kind.ALL_REDUCE, 3)
    edges = (
        Edge(0, 0, 1, Op.REDUCE, (0,)),
        Edge(0, 0, 2, Op.COPY, (0,)),
        Edge(0, 2, 1, Op.REDUCE, (0,)),
        Edge(1, 1, 0, Op.COPY, (0,)),
        Edge(1, 1, 2, Op.COPY, (0,)),
    )
    assert _codes(Schedule("x", collective, 2, (Chunk(None, None),), (ChunkGraph(edges),))) == set()


def test_sending_what_is_not_held() -> None:
    gather = build("ring", "all_gather", 3)
    first = gather.graphs[0].edges
    swapped = [replace(first[0], step=1), replace(first[1], step=0)]
    found = verify(_with_edges(gather, 0, swapped))
    held = [f for f in found if f.code == "not-held"]
    assert [(f.step, f.chunk, f.rank) for f in held] == [(0, 0, 1)]
    assert "missing" in {f.code for f in found}


def test_conflicting_writes() -> None:
    tree = build("direct", "reduce", 3)
    edges = list(tree.edges)
    two_copies = [replace(e, op=Op.COPY) for e in edges]
    mixed = [replace(edges[0], op=Op.COPY), edges[1]]
    for broken in (two_copies, mixed):
        found = [f for f in verify(_with_edges(tree, 0, broken)) if f.code == "write-conflict"]
        assert [(f.step, f.edge) for f in found] == [(0, 0), (0, 1)]


def test_graphs_must_not_share_a_chunk() -> None:
    tree = build("dual_tree", "all_reduce", 4)
    edges = list(tree.graphs[1].edges)
    edges[0] = replace(edges[0], chunks=(0,))
    found = [f for f in verify(_with_edges(tree, 1, edges)) if f.code == "shared-chunk"]
    assert [(f.graph, f.chunk) for f in found] == [(1, 0)]


def test_reductions_do_not_belong_in_copies() -> None:
    gather = build("ring", "all_gather", 3)
    edges = [replace(e, op=Op.REDUCE) for e in gather.graphs[1].edges]
    assert "reduce-in-copy" in _codes(_with_edges(gather, 1, edges))


def test_self_edges_by_pattern_and_by_table() -> None:
    tree = build("dual_tree", "all_reduce", 4)
    edges = [*tree.graphs[0].edges, Edge(0, 1, 1, Op.REDUCE, (0,))]
    assert "self-edge" in _codes(_with_edges(tree, 0, edges))
    edge = tree.graphs[0].edges[0]
    table = Table.identity(tree).swap_vertex(0, edge.step + 1, edge.src, edge.dst)
    found = [f for f in verify(tree, table) if f.code == "self-edge"]
    assert edge.src in {f.rank for f in found}


def test_uncovered_blocks() -> None:
    gather = build("direct", "all_gather", 3)
    chunks = (*gather.chunks[:2], Chunk(1, None))
    broken = Schedule("x", gather.collective, 1, chunks, gather.graphs[:2])
    assert "uncovered" in _codes(broken)
    weightless = replace(gather, chunks=(*gather.chunks[:2], Chunk(2, None, 0)))
    assert _codes(weightless) == {"uncovered"}


def test_two_sources_for_one_output() -> None:
    two = Schedule("x", Collective(Kind.PERMUTE, 3), 1, (Chunk(0, 2), Chunk(1, 2)), (
        ChunkGraph((Edge(0, 0, 2, Op.COPY, (0,)), Edge(0, 1, 2, Op.COPY, (1,)))),))  # fmt: skip
    assert "overlap" in _codes(two)


def test_tables_of_another_schedule_and_moved_roots() -> None:
    tree = build("binomial", "broadcast", 4, root=1)
    assert _codes(tree, Table.identity(build("ring", "all_reduce", 4))) == {"table"}
    assert _codes(tree, Table.identity(tree).swap_global(0, 3)) == set()
    assert "home" in _codes(tree, Table.identity(tree).swap_global(1, 3))
    assert "not-held" in _codes(tree, Table.identity(tree).swap_graph(0, 1, 3))
    shift = build("permute", "permute", 4, perm=[(0, 1), (2, 3)])
    assert "home" in _codes(shift, Table.identity(shift).swap_global(0, 1))
    both = Table.identity(shift).swap_global(0, 2).swap_global(1, 3)  # the pairs change places: the same permutation
    assert _codes(shift, both) == set()


def test_weightless_chunks_are_not_asked_for() -> None:
    direct = build("direct", "all_reduce", 3, shares=[1, 0, 1])
    assert len(direct.chunks) == 3
    assert _codes(direct) == set()


def test_check_raises_with_all_findings() -> None:
    ring = build("ring", "all_reduce", 6)
    broken = _with_edges(ring, 0, [])
    with pytest.raises(ScheduleInvalid, match=r"schedule 'ring' doesn't compute all_reduce over 6 ranks") as caught:
        check(broken)
    assert len(caught.value.findings) == 6
    check(ring)


def test_counts_do_not_overflow() -> None:
    # every step doubles every count: 2**80 would wrap around to a count that looks right
    both = [Edge(t, p, 1 - p, Op.REDUCE, (0,)) for t in range(80) for p in (0, 1)]
    doubling = Schedule("x", Collective(Kind.ALL_REDUCE, 2), 80, (Chunk(None, None),), (ChunkGraph(tuple(both)),))
    assert _codes(doubling) == {"duplicate"}


def test_bit_equality_is_seen() -> None:
    chain = build("one_shot", "all_reduce", 3)
    assert bit_equal(chain)
    assert not bit_equal(replace(chain, canonical=False))
    assert bit_equal(build("one_shot", "all_reduce", 2))


def _verdict_by_running(schedule: Schedule, table: Table | None) -> bool:
    """Validity as the interpreter shows it: tokens so sparse that a wrong sum can't look right."""
    blocks = schedule.collective.input_blocks
    rng = np.random.default_rng(5)
    inputs = [rng.integers(0, 2**62, 12 * blocks, dtype=np.uint64) for _ in range(schedule.nranks)]
    try:
        outputs = interpret(schedule, inputs, table=table)
    except ScheduleInvalid:
        return False
    return all(np.array_equal(a, b) for a, b in zip(outputs, expected(schedule, inputs)))


@settings(max_examples=300)
@given(st.integers(0, 2**32))
def test_verdict_is_the_interpreters(seed: int) -> None:
    """Schedules changed at random: the verifier accepts exactly what computes the right result."""
    rng = random.Random(seed)
    schedule = rng.choice(_SMALL)
    g = rng.randrange(len(schedule.graphs))
    edges = list(schedule.graphs[g].edges)
    table = Table.identity(schedule)
    for _ in range(rng.randint(0, 2)):
        i = rng.randrange(len(edges)) if edges else 0
        change = rng.choice(["drop", "copy", "turn", "later", "swap", "graph", "global", "twice"])
        n = schedule.nranks
        a, b = rng.sample(range(n), 2)
        if change == "swap":
            table = table.swap_vertex(g, rng.randrange(schedule.steps + 1), a, b)
        elif change == "graph":
            table = table.swap_graph(g, a, b)
        elif change == "global":
            table = table.swap_global(a, b)
        elif not edges:
            continue
        elif change == "drop":
            edges.pop(i)
        elif change == "copy":
            edges[i] = replace(edges[i], op=Op(1 - edges[i].op))
        elif change == "turn":
            edges[i] = replace(edges[i], src=a, dst=b)
        elif change == "later":
            edges[i] = replace(edges[i], step=rng.randrange(schedule.steps))
        else:
            edges.append(replace(edges[i], step=rng.randrange(schedule.steps)))
    changed = _with_edges(schedule, g, edges)
    findings = {f.code for f in verify(changed, table)}
    # These make a schedule invalid for the executor, or by the rules of its kind, though numbers may come out right.
    findings -= {"self-edge"} if _verdict_by_running(changed, table) else set()
    if findings - {"reduce-in-copy", "home"}:
        assert not _verdict_by_running(changed, table), findings
    elif not findings:
        assert _verdict_by_running(changed, table)


_SMALL = [s for s in all_schedules([2, 3, 4, 5]) if s.graphs]


def test_sixty_four_ranks_take_well_under_a_second() -> None:
    for name in ("ring", "direct", "dual_tree", "halving_doubling"):
        schedule = build(name, "all_reduce", 64)
        check(schedule)
        table = Table.identity(schedule).swap_graph(0, 3, 9)
        begin = time.process_time()
        assert valid(schedule, table)
        assert time.process_time() - begin < 0.5, name


def test_inputs_helper_shows_the_order_of_sums() -> None:
    # the float tests prove nothing if their data sums alike in every order
    schedule = build("ring", "all_reduce", 4)
    a = inputs_for(schedule, 64, seed=0)
    assert ((a[0] + a[1] + a[2] + a[3]) != (a[3] + a[2] + a[1] + a[0])).any()
