"""The GPU executor over the stand-in gives what the interpreter gives, to the bit, in whatever order streams run."""

from __future__ import annotations

import numpy as np
import pytest
from native import cases
from native.harness import DTYPE

from jaxcoll.runtime.native import NativeError
from jaxcoll.schedule import Kind, Table, build

from .harness import Gpu

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("n", range(2, 9))
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "groups"])
def test_every_builder(n: int, pairs: bool, request: pytest.FixtureRequest):
    wrong: list[str] = []
    with Gpu(seed=n) as gpu:
        team = gpu.team(n, pairs=pairs, max_streams=32 if n % 2 else 3)
        for case in cases.cases(n, 1000, each=4 if request.config.getoption("--full") else 1):
            inputs, want = cases.expected(case)
            wrong += cases.compare(case, team.run(case.schedule, list(inputs), case.reduce), want)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", sorted({dtype for dtype, _ in cases.TYPES}))
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "groups"])
def test_every_type(dtype: str, pairs: bool):
    reduce = next(r for d, r in cases.TYPES if d == dtype)
    with Gpu(seed=3) as gpu:
        team = gpu.team(5, pairs=pairs)
        for name in ("ring", "dual_tree", "one_shot", "recursive_doubling"):
            case = cases.Case(build(name, Kind.ALL_REDUCE, 5, pipeline=2), 777, dtype, reduce)
            inputs, want = cases.expected(case)
            assert not cases.compare(case, team.run(case.schedule, list(inputs), reduce), want)


@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "groups"])
@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_GATHER, Kind.ALL_TO_ALL])
def test_leaves(kind: Kind, pairs: bool):
    name = "pairwise" if kind is Kind.ALL_TO_ALL else "ring"
    case = cases.Case(build(name, kind, 4, pipeline=2), 1001, "float32", "sum")
    inputs, want = cases.expected(case)
    with Gpu() as gpu:
        team = gpu.team(4, pairs=pairs)
        program, _ = team.program(case.schedule)
        for leaves in ([0, 3, 0, 900, 98, 0], [1] * 5 + [996], [1001, 0]):
            results = team.run(case.schedule, list(inputs), program=program, leaves=leaves)
            assert not cases.compare(case, results, want), leaves


def test_nothing_to_move():
    with Gpu() as gpu:
        team = gpu.team(3)
        for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER):
            results = team.run(build("ring", kind, 3), [np.zeros(0, np.float32)] * 3)
            assert all(r.size == 0 for r in results)


def test_what_cannot_be_reduced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(DTYPE, "float64", 99)
    with Gpu() as gpu:
        team = gpu.team(2)
        program, _ = team.program(build("ring", Kind.ALL_REDUCE, 2))
        for dtype, why in (("complex64", "max of c64 is not supported"), ("float64", "a type that jaxcoll can't move")):
            with pytest.raises(NativeError, match=why):
                team.enqueue(0, program, Kind.ALL_REDUCE, np.ones(4, dtype), "max", 1)


def test_a_queue_of_executions():
    # Nothing waits between them: the second is enqueued while the first is under way, with events of its own.
    schedule = build("dual_tree", Kind.ALL_REDUCE, 4, pipeline=2)
    rng = np.random.default_rng(7)
    values = rng.integers(-1000, 1000, (12, 4, 300)).astype(np.int32)
    with Gpu(seed=9) as gpu:
        team = gpu.team(4)
        program, _ = team.program(schedule)
        runs = [
            [team.enqueue(r, program, Kind.ALL_REDUCE, values[i, r], "sum", i) for r in range(4)] for i in range(12)
        ]
        team.wait()
        for i, each in enumerate(runs):
            assert all(np.array_equal(run.result(), values[i].sum(axis=0, dtype=np.int32)) for run in each)


def test_every_scope_of_a_table():
    schedule = build("dual_tree", Kind.ALL_REDUCE, 8)
    case = cases.Case(schedule, 500, "int64", "sum")
    inputs, want = cases.expected(case)
    identity = Table.identity(schedule)
    with Gpu(seed=2) as gpu:
        team = gpu.team(8)
        for table in (identity, identity.swap_global(1, 6), identity.swap_graph(0, 2, 5)):
            program, _ = team.program(schedule, table)
            assert not cases.compare(case, team.run(case.schedule, list(inputs), program=program), want)
