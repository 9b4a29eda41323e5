"""The kernels by themselves, through the C interface: the result may lie in any of the sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from jaxcoll.runtime.native import load

from . import cases
from .harness import DTYPE, REDUCE, Array, numpy_dtype

ELEMENTS = 2500  # two blocks of the kernels and a part of one
MOST = 18  # sources: three passes of eight
FOLDS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


def combine(dtype: str, reduce: str, sources: Sequence[Array], into: int | None) -> Array:
    """The sources in their order, combined into a buffer apart (None) or into that of source `into`."""
    native = load()
    ffi, buffers = native.ffi, [s.copy() for s in sources]
    dst = np.empty_like(sources[0]) if into is None else buffers[into]
    pointers = [ffi.cast("void*", b.ctypes.data) for b in (dst, *buffers)]
    native.check(
        native.lib.jc_combine(
            DTYPE[dtype], REDUCE[reduce], pointers[0], 0, ffi.new("void*[]", pointers[1:]),
            ffi.new("int[]", len(buffers)), len(buffers), dst.size,
        )
    )  # fmt: skip
    assert all(cases.same(b, s) for i, (b, s) in enumerate(zip(buffers, sources, strict=True)) if i != into)
    return dst


@pytest.mark.parametrize(("dtype", "reduce"), cases.TYPES)
def test_into_any_of_the_sources(dtype: str, reduce: str):
    rng = np.random.default_rng(3)
    numbers = rng.integers(0, 2 if dtype == "bool" else 100, (MOST, ELEMENTS))
    if not dtype.startswith(("bool", "int", "uint")):
        numbers = numbers / 50 - 1
    sources = list(numbers.astype(numpy_dtype(dtype)))
    for count in (1, 2, 7, 8, 9, 10, 15, 16, MOST):
        want = combine(dtype, reduce, sources[:count], None)
        if not dtype.startswith(("bfloat", "float8", "float16")):  # which are added in f32
            with np.errstate(over="ignore"):
                assert cases.same(want, FOLDS[reduce].reduce(sources[:count], axis=0, dtype=want.dtype)), count
        for into in range(count):
            assert cases.same(combine(dtype, reduce, sources[:count], into), want), (count, into)
