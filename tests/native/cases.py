"""What the conformance suite runs: every builder and kind, with counts, lanes, dtypes and reductions drawn by seed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from jaxcoll.schedule import Kind, Schedule, build, builders, interpret

from .harness import Array, numpy_dtype

SIZES = range(2, 18)
COUNTS = (1, 7, 1000, 65537)
TYPES = (
    ("float32", "sum"), ("bfloat16", "sum"), ("float16", "sum"), ("float8_e4m3fn", "sum"), ("float8_e5m2", "sum"),
    ("int8", "sum"), ("int64", "prod"), ("bool", "max"), ("complex64", "sum"), ("float32", "min"), ("float64", "prod"),
    ("bfloat16", "prod"), ("float8_e4m3b11fnuz", "sum"), ("uint16", "max"), ("int32", "sum"), ("float8_e3m4", "max"),
)  # fmt: skip
LANES = (1, 3, 1, 5)


@dataclass(frozen=True)
class Case:
    """One execution: a schedule, elements a block, the type and the reduction."""

    schedule: Schedule
    count: int
    dtype: str
    reduce: str

    def __str__(self) -> str:
        s = self.schedule
        return f"{s.name} {s.kind.label} over {s.nranks}, {self.reduce} {self.dtype}[{self.count}], {s.pipeline} lanes"


def params_for(name: str, n: int) -> list[dict[str, Any]]:
    """Parameters worth building with, for every builder."""
    if name == "permute":
        return [{"perm": [(i, (i + 1) % n) for i in range(n)]}, {"perm": [(n - 1, 0)]}, {"perm": []}]
    if name == "hierarchical":
        return [{"groups": [list(range(i, min(i + 2, n))) for i in range(0, n, 2)]}]
    if name == "direct":
        return [{}, {"shares": [(i * 7 + 1) % 3 for i in range(n - 1)] + [1]}]
    return [{}]


def schedules(n: int, pipeline: int = 1) -> Iterator[Schedule]:
    """Every builder, kind and parameter set over n ranks."""
    for name, builder in builders().items():
        for kind in builder.kinds:
            for params in params_for(name, n):
                if "shares" in params and kind is not Kind.ALL_REDUCE:
                    continue
                root = {"root": n // 2} if kind.rooted else {}
                yield build(name, kind, n, pipeline=pipeline, **params, **root)


def cases(n: int, most: int, each: int = 1) -> list[Case]:
    """`each` cases for every schedule over n ranks: counts up to `most`, lanes and types in turn."""
    made: list[Case] = []
    turn = n * 5
    for i in range(each):
        for index, schedule in enumerate(schedules(n, LANES[(n + i) % len(LANES)])):
            count = min(COUNTS[(index + n + i) % len(COUNTS)], most)
            if schedule.collective.input_blocks * schedule.collective.output_blocks > 64:
                count = min(count, 1000)
            dtype, reduce = TYPES[turn % len(TYPES)]
            turn += 3 if index % 2 else 1
            made.append(Case(schedule, count, dtype, reduce))
    return made


def seed_of(case: Case) -> int:
    return zlib.crc32(str(case).encode())


def inputs_for(case: Case) -> list[Array]:
    """Random operands over several orders of magnitude, so that the order of sums shows; they never overflow."""
    rng = np.random.default_rng(seed_of(case))
    dtype = numpy_dtype(case.dtype)
    size = case.count * case.schedule.collective.input_blocks

    def one() -> Array:
        if dtype.kind == "b":
            return rng.integers(0, 2, size).astype(dtype)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            return rng.integers(info.min, info.max, size, dtype=dtype, endpoint=True)
        if case.reduce == "prod":
            return rng.uniform(0.5, 1.9, size).astype(dtype)
        if dtype.itemsize == 1:
            return rng.uniform(-0.4, 0.4, size).astype(np.float32).astype(dtype)
        scaled = rng.standard_normal(size) * 10.0 ** rng.integers(-2, 3, size)
        return (scaled + 1j * rng.standard_normal(size) if dtype.kind == "c" else scaled).astype(dtype)

    return [one() for _ in range(case.schedule.nranks)]


@lru_cache(maxsize=128)
def expected(case: Case) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """The case's operands and, from the interpreter, its results."""
    inputs = inputs_for(case)
    with np.errstate(over="ignore"):  # integers wrap around, on purpose
        return tuple(inputs), tuple(interpret(case.schedule, inputs, case.reduce))


def receivers(schedule: Schedule) -> list[int]:
    """The ranks whose result means something."""
    if schedule.kind is Kind.REDUCE:
        assert schedule.collective.root is not None
        return [schedule.collective.root]
    return list(range(schedule.nranks))


def same(a: Array, b: Array) -> bool:
    """Equal to the bit."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a.view(np.uint8), b.view(np.uint8)))


def difference(case: Case, rank: int, got: Array, want: Array) -> str:
    wrong = np.flatnonzero((got.view(np.uint8) != want.view(np.uint8)).reshape(got.size, -1).any(axis=1))
    at = int(wrong[0])
    return (
        f"{case}: rank {rank} differs in {len(wrong)} of {got.size} elements, first at {at}: {got[at]} for {want[at]}"
    )


def compare(case: Case, results: list[Array], want: tuple[Array, ...]) -> list[str]:
    """What is wrong with an execution's results."""
    ranks = receivers(case.schedule)
    return [difference(case, r, results[r], want[r]) for r in ranks if not same(results[r], want[r])]
