"""The kernels by themselves, through the C interface: the result may lie in any of the sources."""

from __future__ import annotations

import itertools
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np
import pytest
from needs import need

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


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16", "float8_e5m2", "float8_e3m4"])
@pytest.mark.parametrize(("reduce", "wins"), [("max", 0.0), ("min", -0.0)])
def test_zeros_have_an_order(dtype: str, reduce: str, wins: float):
    """Ranks combine in orders of their own, and must get the same bits: -0 is less than +0."""
    zeros, far = np.array([0.0, -0.0]), -1.0 if reduce == "max" else 1.0
    for first, second in itertools.product(zeros, repeat=2):
        for count in (2, 3, 8, 9, MOST):
            for at in {0, 1, count // 2, count - 1}:  # all sources but this one lose, or are `second`
                for other in (second, far):
                    rows = [np.full(ELEMENTS, first if k == at else other) for k in range(count)]
                    got = combine(dtype, reduce, [r.astype(numpy_dtype(dtype)) for r in rows], None)
                    want = first if other == far or np.signbit(other) == np.signbit(first) else wins
                    assert (got == 0).all(), (first, other, count, at)
                    assert (np.signbit(got) == np.signbit(want)).all(), (first, other, count, at)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_a_nan_anywhere_wins(dtype: str, reduce: str):
    for count in (2, 8, 9):
        for at in range(count):
            for nan in (np.nan, -np.nan):
                rows = [np.full(ELEMENTS, nan if k == at else k - 4.0) for k in range(count)]
                got = combine(dtype, reduce, [r.astype(numpy_dtype(dtype)) for r in rows], None)
                assert np.isnan(got.astype(np.float64)).all(), (count, at)


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


def test_no_instruction_set_fuses():
    """A machine with AVX-512 gives the bits of one without, in products of complex numbers too."""
    if platform.machine() != "x86_64":  # one set of instructions
        return
    objdump = shutil.which("objdump")
    need(objdump is not None, "objdump", "NATIVE")
    listing = [str(objdump), "--disassemble", "--no-show-raw-insn", str(load().path)]
    text = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    assert re.search(r"\tvadd[ps]s", text), "kernels of AVX, vectorised or, under a sanitizer, not"
    assert not set(re.findall(r"\tv(?:fn?m(?:add|sub)\w+)", text))
