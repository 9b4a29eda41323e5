from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxcoll import config
from jaxcoll.bench import definitions as d
from jaxcoll.bench import table
from jaxcoll.errors import UsageError


def reference(case: d.Case) -> list[np.ndarray]:
    """What every rank must hold, written down once more, block by block, from the operations' own definitions."""
    n, c = case.ranks, case.count
    inputs = [d.make_input(case, rank).astype(np.complex128) for rank in range(n)]
    block = [[x[i * c : (i + 1) * c] for i in range(len(x) // c)] for x in inputs]
    total = sum(inputs)
    return {
        "psum": lambda: [total] * n,
        "pmean": lambda: [total / n] * n,
        "pmax": lambda: [np.max(np.real(inputs), axis=0)] * n,
        "pmin": lambda: [np.min(np.real(inputs), axis=0)] * n,
        "all_gather": lambda: [np.concatenate(inputs)] * n,
        "psum_scatter": lambda: [sum(b[r] for b in block) for r in range(n)],
        "all_to_all": lambda: [np.concatenate([b[r] for b in block]) for r in range(n)],
        "ppermute": lambda: [inputs[(r - case.chain) % n] for r in range(n)],
        "pbroadcast": lambda: [inputs[0]] * n,
    }[case.collective]()


CASES = st.builds(
    d.Case,
    collective=st.sampled_from(list(d.OPERATIONS)),
    ranks=st.integers(1, 9),
    count=st.sampled_from([1, 2, 7, 100, d.PERIOD - 1, d.PERIOD, d.PERIOD + 1, 3 * d.PERIOD + 5]),
    dtype=st.sampled_from(["float32", "int32", "uint8", "bfloat16"]),
)


@given(CASES)
def test_expected_values_are_the_operations_definition(case: d.Case):
    for rank, right in enumerate(reference(case)):
        np.testing.assert_allclose(d.make_expected(case, rank).astype(np.complex128), right, rtol=1e-12)


@given(CASES, st.data())
def test_every_wrong_element_is_counted(case: d.Case, data: st.DataObject):
    rank = data.draw(st.integers(0, case.ranks - 1))
    right = d.make_expected(case, rank).astype(np.float64)
    assert d.count_wrong(case, rank, right) == 0
    places = data.draw(st.lists(st.integers(0, right.size - 1), unique=True, max_size=5))
    wrong = right.copy()
    wrong[places] += 1
    assert d.count_wrong(case, rank, wrong) == len(places)


def test_a_result_of_the_wrong_length_is_wrong_altogether():
    case = d.make_case("psum", 4, 4096, "float32")
    assert d.count_wrong(case, 0, np.zeros(5)) == 1024


def test_wrong_beyond_the_first_piece_is_counted():
    case = d.Case("psum", 2, d.PERIOD * 64 + 10, "float32")
    result = d.make_expected(case, 0)
    result[-1] += 1
    assert d.count_wrong(case, 0, result) == 1


@pytest.mark.parametrize("collective", ["psum", "psum_scatter"])
@pytest.mark.parametrize(("dtype", "ranks"), [("float8_e5m2", 8), ("float8_e4m3fn", 16), ("uint8", 128)])
def test_a_sum_is_right_that_is_rounded_or_wrapped_once(dtype: str, ranks: int, collective: str):
    case = d.Case(collective, ranks, 200, dtype)
    exact = sum(d.make_input(case, rank).astype(np.int64) for rank in range(ranks))
    right = exact[: case.count].astype(d.dtype_of(dtype))
    assert np.any(right.astype(np.int64) != exact[: case.count])
    assert d.count_wrong(case, 0, right) == 0
    wrong = right.copy()
    wrong[0] = 100
    assert d.count_wrong(case, 0, wrong) == 1


def test_bools_are_counted():
    case = d.Case("psum", 9, 100, "bool")
    counted = sum(d.make_input(case, rank).astype(np.int32) for rank in range(9))
    assert counted.max() > 1
    assert d.count_wrong(case, 0, counted) == 0


@pytest.mark.parametrize("shift", [16, 1024, 4096, 1 << 16])
def test_a_misplaced_block_is_seen(shift: int):
    case = d.Case("psum", 8, 1 << 18, "float32")
    assert d.count_wrong(case, 0, np.roll(d.make_expected(case, 0), shift)) > case.count // 4


def test_ranks_differ():
    case = d.Case("all_gather", 16, 4096, "float32")
    inputs = [d.make_input(case, rank) for rank in range(16)]
    for a in range(16):
        for b in range(a):
            assert np.mean(inputs[a] == inputs[b]) < 0.5


@pytest.mark.parametrize(
    ("collective", "size", "count", "busbw"),
    [
        ("psum", 1 << 20, 1 << 18, 1.75),
        ("pmax", 1 << 20, 1 << 18, 1.75),
        ("all_gather", 1 << 20, 1 << 15, 0.875),
        ("psum_scatter", 1 << 20, 1 << 15, 0.875),
        ("all_to_all", 1 << 20, 1 << 15, 0.875),
        ("ppermute", 1 << 20, 1 << 18, 1.0),
        ("pbroadcast", 1 << 20, 1 << 18, 1.0),
    ],
)
def test_sizes_and_factors_are_those_of_nccl_tests(collective: str, size: int, count: int, busbw: float):
    case = d.make_case(collective, 8, size, "float32")
    assert (case.count, case.size) == (count, size)
    timing = d.timing(case, [[2e-3, 1e-3, 3e-3], [2e-3, 3e-3, 5e-3]])
    # The mean over processes of each call: 2, 2, 4 ms.
    assert (timing.min, timing.median) == (2000.0, 2000.0)
    assert 3900 < timing.p99 <= 4000
    assert timing.algbw == pytest.approx(size / 2e-3 / 1e9)
    assert timing.busbw == pytest.approx(timing.algbw * busbw)


def test_a_chain_counts_every_collective_in_it():
    case = d.make_case("psum", 2, 4096, "float32", chain=16)
    assert d.timing(case, [[16e-6]]).algbw == pytest.approx(4096 / 1e-6 / 1e9)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4K:64K", [4096 << i for i in range(5)]),
        ("4K:5K", [4096]),
        ("1:9", [1, 2, 4, 8]),
        ("4K,1M,20M", [4096, 1 << 20, 20 << 20]),
        ("100", [100]),
        ("4KiB, 2kb", [4096, 2048]),
        ("1.5K", [1536]),
    ],
)
def test_sizes(text: str, sizes: list[int]):
    assert d.parse_sizes(text) == sizes


def test_a_range_takes_the_factor():
    assert d.parse_sizes("1K:1G", 4) == [1024 * 4**i for i in range(11)]


@pytest.mark.parametrize("text", ["", "4X", "8K:4K", "4K:", "0", "-4K", "1:2:3", "4K,,8K", "1.0001K"])
def test_bad_sizes_say_what_is_accepted(text: str):
    with pytest.raises(UsageError, match="--sizes=.*Accepted: a range 4K:64M, or a list"):
        d.parse_sizes(text)


@given(st.integers(1, 1 << 40))
def test_a_size_is_printed_as_it_is_read(size: int):
    assert config.parse_size(config.format_size(size)) == size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("allreduce", 2, 4, "float32"), "Known: psum, pmean"),
        (("psum", 2, 4, "float99"), "no numeric dtype"),
        (("psum", 2, 4, "object"), "no numeric dtype"),
        (("all_gather", 2, 4, "float32", 2), "--chain=2 needs"),
        (("psum", 2, 4, "int32", 2), "--chain=2 needs"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple, message: str):
    with pytest.raises(UsageError, match=message):
        d.make_case(*arguments)


def test_at_least_one_element():
    assert d.make_case("all_to_all", 8, 1, "float32").size == 8 * 4


def test_the_table_lines_up_and_the_json_has_its_keys():
    case = d.make_case("psum", 8, 1 << 20, "float32")
    rows = [
        table.Row("jaxcoll", "procs", case, d.timing(case, [[1e-3]]), 0),
        table.Row("lax", "procs", case, d.timing(case, [[8e-3]]), 3),
    ]
    head = table.header("psum", 8, "procs", []).splitlines()
    line = table.format_row(rows[1], rows[0])
    assert line.split()[:10] == ["1048576", "262144", "float", "sum", "-1", "8000.0", "0.131", "0.229", "3", "8000.0"]
    assert "8.00x jaxcoll's time" in line
    # Each number ends below the end of its column's name.
    for name, value in (("#wrong", "      3"), ("busbw", "0.229")):
        assert head[-2].index(name) + len(name) == line.index(value) + len(value)
    assert "3 FAILED" in table.footer("psum", rows)
    assert "0 OK" in table.footer("psum", rows[:1])
    assert rows[0].as_json() == {
        "impl": "jaxcoll",
        "collective": "psum",
        "ranks": 8,
        "layout": "procs",
        "size_bytes": 1 << 20,
        "count": 1 << 18,
        "dtype": "float32",
        "chain": 1,
        "time_us": {"min": 1000.0, "median": 1000.0, "p99": 1000.0},
        "algbw_GBps": pytest.approx(1.048576),
        "busbw_GBps": pytest.approx(1.835008),
        "nwrong": 0,
        "extra_bytes": None,
    }
