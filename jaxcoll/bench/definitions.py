"""What the benchmark measures: collectives, sizes, bandwidths and the data that a result is checked against.

Definitions are those of nccl-tests. S is the size of the whole collective: count * ranks * itemsize for all_gather,
psum_scatter and all_to_all, else count * itemsize. algbw = S / time. busbw = algbw * factor, where the factor makes it
comparable with the speed of a link whatever the number of ranks. GB is 1e9 bytes, sizes (K, M, G) are powers of 1024.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcoll import config
from jaxcoll.errors import UsageError

Array = npt.NDArray[Any]

# The data repeats after this many elements: cheap to make and to check at any size. It is a prime, so that a block put
# in the wrong place (blocks are multiples of 16 elements or N-ths of the whole) doesn't fall on equal values.
PERIOD = 4099

# Results are checked this many elements at a time, which bounds the memory that checking takes.
_PIECE = PERIOD * 64

_TYPE_NAMES = {"float32": "float", "float16": "half", "float64": "double"}
_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One collective as the benchmark knows it.

    redop, root: the columns of the table.
    blocks: (input, output) blocks of `count` elements a rank, as functions of the number of ranks.
    busbw: the factor of the bus bandwidth, a function of the number of ranks.
    mixes: whether K of them can be chained in one program (same shape in and out).
    """

    name: str
    redop: str
    root: int
    blocks: Callable[[int], tuple[int, int]]
    busbw: Callable[[int], float]
    mixes: bool


def _one(n: int) -> tuple[int, int]:
    return (1, 1)


def _unit(n: int) -> float:
    return 1.0


def _twice(n: int) -> float:
    return 2 * (n - 1) / n


def _once(n: int) -> float:
    return (n - 1) / n


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("psum", "sum", -1, _one, _twice, True),
        Operation("pmean", "avg", -1, _one, _twice, True),
        Operation("pmax", "max", -1, _one, _twice, True),
        Operation("pmin", "min", -1, _one, _twice, True),
        Operation("all_gather", "none", -1, lambda n: (1, n), _once, False),
        Operation("psum_scatter", "sum", -1, lambda n: (n, 1), _once, False),
        Operation("all_to_all", "none", -1, lambda n: (n, n), _once, False),
        Operation("ppermute", "none", -1, _one, _unit, True),
        Operation("pbroadcast", "none", 0, _one, _unit, True),
    )
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One row to measure. count: elements of one block a rank; chain: collectives in one program."""

    collective: str
    ranks: int
    count: int
    dtype: str
    chain: int = 1

    @property
    def operation(self) -> Operation:
        """The row of the table of collectives."""
        return OPERATIONS[self.collective]

    @property
    def size(self) -> int:
        """S in bytes."""
        return self.count * max(self.operation.blocks(self.ranks)) * dtype_of(self.dtype).itemsize


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name, bfloat16 and the 8-bit floats included. Raises `UsageError` on an unknown name."""
    try:
        if name in _NARROW:
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, name))
        dtype = np.dtype(name)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biufc":
        raise UsageError(f"--dtype={name} is no numeric dtype; examples: float32, bfloat16, int32, bool, complex64.")
    return dtype


def make_case(collective: str, ranks: int, size: int, dtype: str, chain: int = 1) -> Case:
    """The case nearest to `size` bytes, rounded down to whole elements a block, at least one element.

    Raises `UsageError` for an unknown collective, and for a chain that this collective or dtype can't form.
    """
    if collective not in OPERATIONS:
        raise UsageError(f"--collective={collective} is unknown. Known: {', '.join(OPERATIONS)}.")
    operation, kind = OPERATIONS[collective], dtype_of(dtype)
    if chain < 1 or (chain > 1 and not (operation.mixes and np.issubdtype(kind, np.inexact))):
        able = ", ".join(name for name, other in OPERATIONS.items() if other.mixes)
        raise UsageError(f"--chain={chain} needs a collective of {able}, and a float or complex dtype.")
    count = max(1, size // (max(operation.blocks(ranks)) * kind.itemsize))
    return Case(collective, ranks, count, dtype, chain)


def parse_sizes(text: str, factor: int = 2) -> list[int]:
    """Sizes of "4K:64M" (from, to, each `factor` times the last) or "4K,1M,20M". Raises `UsageError`."""
    try:
        if ":" not in text:
            sizes = [config.parse_size(part) for part in text.split(",")]
        else:
            low, high = (config.parse_size(part) for part in text.split(":"))
            if factor < 2 or not 0 < low <= high:
                raise ValueError("a range needs 0 < from <= to, and a factor of 2 or more")
            sizes = [low * factor**i for i in range(int(math.log(high / low, factor) + 1e-9) + 1)]
        if min(sizes) < 1:
            raise ValueError("a size must be at least one byte")
    except ValueError as error:
        raise UsageError(f"--sizes={text!r}: {error}. Accepted: a range 4K:64M, or a list 4K,1M.") from None
    return sizes


def type_name(dtype: str) -> str:
    """The type column of the table, as nccl-tests spells it."""
    return _TYPE_NAMES.get(dtype, dtype)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of one program call (of all `chain` collectives in it), and bandwidths at the median."""

    min: float
    median: float
    p99: float
    algbw: float
    busbw: float


def timing(case: Case, seconds: Sequence[Sequence[float]]) -> Timing:
    """Sum up the times [process][iteration] in seconds.

    As nccl-tests by default, an iteration's time is the average over the ranks: each measures its own call, without a
    barrier in between. Spread (min, p99) is then over iterations.
    """
    calls = np.mean(np.asarray(seconds, dtype=np.float64), axis=0) * 1e6
    median = float(np.median(calls))
    algbw = case.size * case.chain / (median * 1e3)
    return Timing(
        float(calls.min()), median, float(np.percentile(calls, 99)), algbw, algbw * case.operation.busbw(case.ranks)
    )


def _pattern(rank: int, dtype: np.dtype[Any]) -> Array:
    # Small whole numbers: their sums are exact in what they are added in, and rounded (or wrapped) once for the dtype,
    # so that results are compared exactly.
    values = np.random.default_rng(rank).integers(-2, 3, PERIOD)
    if dtype.kind == "b":
        return values > 0
    return (values + 2 if dtype.kind == "u" else values).astype(dtype)


def _at(period: Array, start: int, count: int) -> Array:
    return np.resize(np.roll(period, -(start % PERIOD)), count) if count else period[:0]


def make_input(case: Case, rank: int) -> Array:
    """The input of one rank, 1-D: its input blocks one after the other."""
    count = case.count * case.operation.blocks(case.ranks)[0]
    return _at(_pattern(rank, dtype_of(case.dtype)), 0, count)


def _reduced(case: Case) -> Array:
    dtype = dtype_of(case.dtype)
    patterns = np.stack([_pattern(rank, dtype) for rank in range(case.ranks)])
    if case.collective in ("pmax", "pmin"):
        return patterns.max(axis=0) if case.collective == "pmax" else patterns.min(axis=0)
    wide = np.complex128 if dtype.kind == "c" else np.int64 if dtype.kind in "biu" else np.float64
    total = patterns.astype(wide).sum(axis=0)
    if dtype.kind != "b":  # bools are counted in a wider dtype
        total = total.astype(dtype).astype(wide)
    return total / case.ranks if case.collective == "pmean" else total


def _expected(case: Case, rank: int) -> list[tuple[Array, int]]:
    # What `rank` must hold: blocks of `count` elements, each as (repeating pattern, where in it the block starts).
    dtype, n = dtype_of(case.dtype), case.ranks
    if case.collective in ("psum", "pmean", "pmax", "pmin"):
        return [(_reduced(case), 0)]
    if case.collective == "psum_scatter":
        return [(_reduced(case), rank * case.count)]
    if case.collective == "all_gather":
        return [(_pattern(source, dtype), 0) for source in range(n)]
    if case.collective == "all_to_all":
        return [(_pattern(source, dtype), rank * case.count) for source in range(n)]
    source = 0 if case.collective == "pbroadcast" else (rank - case.chain) % n
    return [(_pattern(source, dtype), 0)]


def make_expected(case: Case, rank: int) -> Array:
    """What `rank` must hold after the case, 1-D: the exact values as the dtype has them, in a wider one."""
    return np.concatenate([_at(pattern, start, case.count) for pattern, start in _expected(case, rank)])


def _slack(case: Case, dtype: np.dtype[Any]) -> float:
    if (case.collective != "pmean" and case.chain == 1) or np.issubdtype(dtype, np.integer):
        return 0.0
    import ml_dtypes

    return 4.0 * case.chain * float(ml_dtypes.finfo(dtype).eps)


def count_wrong(case: Case, rank: int, result: Array) -> int:
    """The number of elements of a rank's result that are wrong; a result of the wrong length is wrong altogether.

    Exact, but for what rounds by nature (an average, and the mixing between chained collectives): a few units of the
    dtype's precision there.
    """
    blocks, flat = _expected(case, rank), np.asarray(result).reshape(-1)
    if flat.size != case.count * len(blocks):
        return max(flat.size, case.count * len(blocks))
    wide = np.complex128 if flat.dtype.kind == "c" else np.float64
    slack, wrong = _slack(case, flat.dtype), 0
    for block, (pattern, start) in enumerate(blocks):
        for first in range(0, case.count, _PIECE):
            size = min(_PIECE, case.count - first)
            exact = _at(pattern, start + first, size).astype(wide)
            got = flat[block * case.count + first :][:size].astype(wide)
            wrong += size - int(np.count_nonzero(np.abs(got - exact) <= slack * np.maximum(1.0, np.abs(exact))))
    return wrong
