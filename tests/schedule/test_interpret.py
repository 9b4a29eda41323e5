"""The interpreter against plain NumPy, bit equality of all ranks, narrow types, tables."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from jaxcoll.errors import ScheduleError, ScheduleInvalid
from jaxcoll.schedule import Kind, Table, build, interpret, valid

from .cases import all_schedules, describe, expected, inputs_for


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_every_builder_computes_its_collective(n: int) -> None:
    for schedule in all_schedules([n]):
        for elements in (0, 1, 13):
            inputs = inputs_for(schedule, elements, seed=n, dtype=np.int32)
            for got, want in zip(interpret(schedule, inputs), expected(schedule, inputs)):
                assert got.dtype == np.int32
                np.testing.assert_array_equal(got, want, err_msg=describe(schedule))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_floats_are_near_and_equal_to_the_bit_on_all_ranks(n: int) -> None:
    for schedule in all_schedules([n]):
        inputs = inputs_for(schedule, 257, seed=n)
        outputs = interpret(schedule, inputs)
        for got, want in zip(outputs, expected(schedule, inputs)):
            bound = n * np.finfo(np.float32).eps * np.abs(np.stack(inputs)).sum(axis=0).max()
            assert np.abs(got - want).max() <= bound, describe(schedule)
        if schedule.kind is Kind.ALL_REDUCE:
            assert len({o.tobytes() for o in outputs}) == 1, describe(schedule)


def test_without_the_canonical_order_one_shot_differs_between_ranks() -> None:
    schedule = build("one_shot", "all_reduce", 5)
    inputs = inputs_for(schedule, 257, seed=1)
    assert len({o.tobytes() for o in interpret(schedule, inputs)}) == 1
    assert len({o.tobytes() for o in interpret(replace(schedule, canonical=False), inputs)}) > 1


def test_canonical_is_the_order_of_positions() -> None:
    schedule = build("one_shot", "all_reduce", 4)
    a = inputs_for(schedule, 300, seed=3)
    assert (interpret(schedule, a)[2] == ((a[0] + a[1]) + a[2]) + a[3]).all()


def test_order_is_own_first_then_edges() -> None:
    schedule = build("direct", "reduce", 4, root=1)
    a = inputs_for(schedule, 300, seed=4)
    assert (interpret(schedule, a)[1] == ((a[1] + a[2]) + a[3]) + a[0]).all()
    assert not interpret(schedule, a)[0].any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("name", ["ring", "dual_tree", "halving_doubling", "one_shot"])
def test_narrow_floats_round_once(dtype: type, name: str) -> None:
    schedule = build(name, "all_reduce", 6)
    inputs = [(np.random.default_rng(r).standard_normal(200)).astype(dtype) for r in range(6)]
    exact = np.stack([i.astype(np.float64) for i in inputs]).sum(axis=0)
    for out in interpret(schedule, inputs):
        assert out.dtype == np.dtype(dtype)
        # sums of a few 8- to 11-bit numbers are nearly exact in float32, so rounding once means correctly rounded
        agree = out.astype(np.float64) == exact.astype(dtype).astype(np.float64)
        assert agree.mean() > 0.98, f"{name}: {agree.mean()}"


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, np.int8, np.uint64])
def test_integers_wrap(dtype: type) -> None:
    schedule = build("dual_tree", "all_reduce", 5)
    bits = 4 if "4" in np.dtype(dtype).name and "64" not in np.dtype(dtype).name else np.dtype(dtype).itemsize * 8
    raw = [np.random.default_rng(r).integers(0, 8, 50) for r in range(5)]
    inputs = [(r.astype(dtype)) for r in raw]
    total = np.stack([i.astype(object) for i in inputs]).sum(axis=0)
    got = interpret(schedule, inputs)[3].astype(object)
    assert [int(g) % 2**bits for g in got] == [int(t) % 2**bits for t in total]


@pytest.mark.parametrize(("reduce", "fold"), [("max", np.max), ("min", np.min), ("prod", np.prod)])
def test_other_reductions(reduce: str, fold: object) -> None:
    for name in ("ring", "recursive_doubling", "direct"):
        schedule = build(name, "all_reduce", 5)
        inputs = [np.random.default_rng(r).integers(1, 4, 9) for r in range(5)]
        want = fold(np.stack(inputs), axis=0)  # type: ignore[operator]
        assert all((o == want).all() for o in interpret(schedule, inputs, reduce))


def test_float64_stays_float64() -> None:
    schedule = build("ring", "all_reduce", 3)
    inputs = [np.array([1.0 + 2.0**-40 * (r + 1)]) for r in range(3)]
    assert interpret(schedule, inputs)[0][0] == 3.0 + 6 * 2.0**-40


def test_complex_sums() -> None:
    schedule = build("halving_doubling", "all_reduce", 3)
    inputs = [np.array([1 + 2j, r * 1j], dtype=np.complex64) for r in range(3)]
    assert (interpret(schedule, inputs)[1] == np.array([3 + 6j, 3j])).all()


@pytest.mark.parametrize("name", ["ring", "direct", "recursive_doubling", "pairwise"])
def test_blocks_follow_ranks_under_a_global_swap(name: str) -> None:
    for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL):
        try:
            schedule = build(name, kind, 5)
        except ScheduleError:
            continue
        table = Table.identity(schedule).swap_global(0, 3).swap_global(3, 4)
        assert valid(schedule, table)
        inputs = inputs_for(schedule, 6, seed=2, dtype=np.int64)
        for got, want in zip(interpret(schedule, inputs, table=table), expected(schedule, inputs)):
            np.testing.assert_array_equal(got, want)


def test_graph_swaps_of_the_dual_tree_keep_the_sum() -> None:
    schedule = build("dual_tree", "all_reduce", 7)
    table = Table.identity(schedule).swap_graph(0, 2, 5).swap_graph(1, 0, 6)
    inputs = inputs_for(schedule, 40, seed=8, dtype=np.int64)
    for got in interpret(schedule, inputs, table=table):
        np.testing.assert_array_equal(got, np.stack(inputs).sum(axis=0))


def test_inputs_are_left_alone() -> None:
    schedule = build("direct", "all_reduce", 3)
    inputs = inputs_for(schedule, 9, seed=0)
    before = [i.copy() for i in inputs]
    interpret(schedule, inputs)
    assert all((a == b).all() for a, b in zip(inputs, before))


def test_bad_calls_say_what_is_wanted() -> None:
    schedule = build("ring", "reduce_scatter", 3)
    good = [np.zeros(6, dtype=np.float32)] * 3
    for inputs, reduce, what in (
        (good[:2], "sum", "2 inputs for 3 ranks"),
        ([np.zeros(7)] * 3, "sum", "7 elements a rank can't be cut into 3"),
        ([*good[:2], np.zeros(6)], "sum", "the input of rank 2 is float64"),
        (good, "mean", "unknown reduction 'mean'; known are sum"),
    ):
        with pytest.raises(ScheduleError, match=what):
            interpret(schedule, inputs, reduce)


def test_a_run_that_cannot_go_on_stops() -> None:
    schedule = build("ring", "all_gather", 3)
    late = replace(schedule, graphs=tuple(replace(g, edges=g.edges[1:]) for g in schedule.graphs))
    with pytest.raises(ScheduleInvalid, match="sends chunk 0, which it doesn't hold"):
        interpret(late, [np.zeros(2)] * 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
def test_zeros_have_an_order(dtype: type) -> None:
    """So that the order in which a rank combines makes no difference to the bits of a maximum or minimum."""
    plus, minus = np.zeros(9, dtype), -np.zeros(9, dtype)
    for name in ("recursive_doubling", "ring", "one_shot"):
        schedule = build(name, "all_reduce", 4)
        for order in ([plus, minus, minus, plus], [minus, plus, plus, minus], [minus, minus, minus, plus]):
            assert not any(np.signbit(got).any() for got in interpret(schedule, order, "max"))
            assert all(np.signbit(got).all() for got in interpret(schedule, order, "min"))
