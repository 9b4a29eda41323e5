"""One suite over all transports: the executor gives what the interpreter gives, to the bit, on every rank."""

from __future__ import annotations

import numpy as np
import pytest

from jaxcoll.schedule import Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule, build

from . import cases
from .harness import TRANSPORTS, Cluster

pytestmark = pytest.mark.timeout(120)

FULL_SIZES = ("inproc", "fake")  # the others run on a part of the sizes, or on all with --full
PART = (2, 3, 5, 8, 17)


def _products() -> list[object]:
    return [
        pytest.param(n, t, marks=[] if t in FULL_SIZES or n in PART else [pytest.mark.full])
        for n in cases.SIZES
        for t in TRANSPORTS
    ]


@pytest.mark.parametrize(("n", "transport"), _products())
def test_every_builder(n: int, transport: str, request: pytest.FixtureRequest):
    full = request.config.getoption("--full")
    most = 1000 if transport.startswith("fake") else 65537
    lane_bytes = 0 if n % 2 else 4096  # small lanes: many of one chunk are under way at once
    wrong: list[str] = []
    with Cluster(transport, n, seed=n, lane_bytes=lane_bytes, landing_bytes=1 << 16) as cluster:
        for case in cases.cases(n, most, each=4 if full else 1):
            inputs, want = cases.expected(case)
            wrong += cases.compare(case, cluster.run(case.schedule, list(inputs), case.reduce), want)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_TO_ALL])
def test_leaves(transport: str, kind: Kind):
    # A pytree is one message: its leaves hold the same blocks, cut alike, and some of them are empty.
    name = "pairwise" if kind is Kind.ALL_TO_ALL else "ring"
    case = cases.Case(build(name, kind, 4, pipeline=2), 1001, "float32", "sum")
    inputs, want = cases.expected(case)
    with Cluster(transport, 4, lane_bytes=512) as cluster:
        for leaves in ([0, 3, 0, 900, 98, 0], [1] * 5 + [996], [1001, 0]):
            results = cluster.run(case.schedule, list(inputs), leaves=leaves)
            assert not cases.compare(case, results, want), leaves


def test_an_offer_larger_than_the_ring():
    # One lane, too large for the slab, in so many pieces that their addresses fill more than the ring between the two.
    leaves = [2] * 34_000
    case = cases.Case(build("one_shot", Kind.ALL_REDUCE, 2), sum(leaves), "float32", "sum")
    inputs, want = cases.expected(case)
    with Cluster("shm", 2) as cluster:
        assert not cases.compare(case, cluster.run(case.schedule, list(inputs), leaves=leaves), want)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_nothing_to_move(transport: str):
    with Cluster(transport, 3) as cluster:
        for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER):
            results = cluster.run(build("ring", kind, 3), [np.zeros(0, np.float32)] * 3)
            assert all(r.size == 0 for r in results)


@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_a_permute_without_pairs(transport: str):
    """It only clears its results, and its schedule has no chunk: several lanes of that, which helpers take too."""
    schedule = build("permute", Kind.PERMUTE, 2, perm=[], pipeline=5)
    with Cluster(transport, 2, helpers=1) as cluster:
        for _ in range(20):
            results = cluster.run(schedule, [np.ones(200_003, np.float32)] * 2, "none")
            assert all((r == 0).all() for r in results)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_rank(transport: str):
    value = np.arange(10, dtype=np.int32)
    with Cluster(transport, 1) as cluster:
        for name, kind in (("ring", Kind.ALL_REDUCE), ("ring", Kind.ALL_GATHER), ("pairwise", Kind.ALL_TO_ALL)):
            assert np.array_equal(cluster.run(build(name, kind, 1), [value])[0], value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "int64"])
@pytest.mark.parametrize("transport", ["inproc", "fake-push", "shm", "tcp"])
def test_all_ranks_get_the_same_bits(transport: str, dtype: str):
    with Cluster(transport, 6, lane_bytes=1024) as cluster:
        for name in ("ring", "dual_tree", "halving_doubling", "recursive_doubling", "one_shot", "direct"):
            case = cases.Case(build(name, Kind.ALL_REDUCE, 6, pipeline=3), 999, dtype, "sum")
            inputs, want = cases.expected(case)
            results = cluster.run(case.schedule, list(inputs))
            assert all(cases.same(results[0], r) for r in results), name
            assert not cases.compare(case, results, want)


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_all_ranks_get_the_same_zero(reduce: str):
    values = [np.zeros(999, np.float32) * sign for sign in (1, -1, -1, 1)]
    with Cluster("inproc", 4) as cluster:
        for name in ("recursive_doubling", "halving_doubling", "ring", "one_shot"):
            results = cluster.run(build(name, Kind.ALL_REDUCE, 4), values, reduce)
            assert all((np.signbit(r) == (reduce == "min")).all() for r in results), name


@pytest.mark.parametrize("transport", ["inproc", "shm", "shm-ring", "tcp", "mixed"])
def test_driven_by_the_callers(transport: str):
    # Handlers poll and work for a while themselves, each on its own thread, and helpers take tasks.
    case = cases.Case(build("ring", Kind.ALL_REDUCE, 4, pipeline=4), 65537, "float32", "sum")
    inputs, want = cases.expected(case)
    with Cluster(transport, 4, spin=0.002, helpers=1, lane_bytes=8192) as cluster:
        key = cluster.define([case.schedule])
        for _ in range(10):
            results = cluster.run(case.schedule, list(inputs), key=key, threads=True)
            assert not cases.compare(case, results, want)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_operations_at_once(transport: str):
    # Independent collectives of one program begin in another order on every rank, as XLA does it.
    sites, n = 24, 4
    schedule = build("recursive_doubling", Kind.ALL_REDUCE, n)
    with Cluster(transport, n, seed=3) as cluster:
        key = cluster.define([schedule])
        rng, ops = np.random.default_rng(5), []
        values = rng.integers(-1000, 1000, (sites, n, 40)).astype(np.int32)
        for launch in (101, 102, 103):
            for rank in rng.permutation(n).tolist():
                for site in rng.permutation(sites).tolist():
                    op = cluster.start(rank, Kind.ALL_REDUCE, values[site, rank], key, launch=launch, site=site)
                    ops.append((site, op))
        cluster.finish([op for _, op in ops])
        for site, op in ops:
            assert np.array_equal(op.result(), values[site].sum(axis=0, dtype=np.int32))
            op.free()


def test_one_sided_permission_to_read():
    # Where only one of two processes may read the other's memory (ptrace rules), both still agree on how data moves.
    case = cases.Case(build("ring", Kind.ALL_REDUCE, 3), 65537, "int32", "sum")
    inputs, want = cases.expected(case)
    with Cluster("shm", 3, read=lambda a, b: a < b) as cluster:
        assert not cases.compare(case, cluster.run(case.schedule, list(inputs)), want)


def _gathered(n: int, centre: int) -> Schedule:
    """A canonical all_reduce: one rank first, then all others into `centre`, whose value lies in its result by then."""
    first, *others = [r for r in range(n) if r != centre]
    edges = [
        Edge(0, first, centre, Op.REDUCE, (0,)),
        *(Edge(1, r, centre, Op.REDUCE, (0,)) for r in others),
        *(Edge(2, centre, r, Op.COPY, (0,)) for r in (first, *others)),
    ]
    return Schedule(
        "gathered", Collective(Kind.ALL_REDUCE, n), 3, (Chunk(None, None),), (ChunkGraph(tuple(edges)),), canonical=True
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_own_value_behind_many(transport: str):
    wrong: list[str] = []
    for n, centres in ((10, (9,)), (19, (8, 9, 17))):
        with Cluster(transport, n) as cluster:
            for centre in centres:
                for dtype in ("float32", "int8", "bfloat16"):
                    case = cases.Case(_gathered(n, centre), 1001, dtype, "sum")
                    inputs, want = cases.expected(case)
                    wrong += cases.compare(case, cluster.run(case.schedule, list(inputs)), want)
    assert not wrong, "\n".join(wrong)
