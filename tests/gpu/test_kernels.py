"""The reduction kernel: its text gives the bits of the CPU's reductions, and compiles for every promised GPU."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import cffi
import ml_dtypes
import numpy as np
import pytest
from native.harness import DTYPE, REDUCE, numpy_dtype
from needs import need

from jaxcoll.runtime.native import load

pytestmark = pytest.mark.timeout(280)

NARROW = [name for name in DTYPE if name.startswith(("float8", "bfloat16", "float16"))]
COMPLEX = ("complex64", "complex128")
PAIRS = [
    (t, r)
    for t, r in itertools.product(DTYPE, ("sum", "max", "min", "prod"))
    if t not in COMPLEX or r in ("sum", "prod")
]
SOME_PAIRS = [
    ("bfloat16", "sum"), ("float8_e4m3fn", "prod"), ("int16", "sum"), ("complex128", "prod"), ("float32", "max"),
]  # fmt: skip
ARCHITECTURES = ("75", "80", "86", "89", "90", "100")

# What CUDA brings by itself, for one thread on the host.
HOST = """
#include <cmath>
#define __device__
#define __global__
#define __align__(n) alignas(n)
static struct { unsigned x; } blockIdx, blockDim = {1}, gridDim = {1}, threadIdx;
"""
ARGS = """
typedef struct { void* dst; const void* src[128]; uint64_t wide[2]; uint64_t n; uint32_t count, dst_wide; } JcArgs;
"""


def source() -> str:
    native = load()
    return native.text(native.lib.jc_gpu_combine_source())


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernel's text compiled for the host: run(type, reduction, arguments, threads)."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    need(compiler is not None, "C++ compiler", "NATIVE")
    folder: Path = tmp_path_factory.mktemp("kernel")
    rows = "".join(
        f"  if (type == {DTYPE[t]} && op == {REDUCE[r]}) for (unsigned i = 0; i < threads; ++i)"
        f" JcKernel<JcType<{DTYPE[t]}>, {REDUCE[r]}>::Run(*a, i, threads);\n"
        for t, r in PAIRS
    )
    text = (
        HOST + source() + f'\nextern "C" void run(int type, int op, const JcArgs* a, unsigned threads) {{\n{rows}}}\n'
    )
    (folder / "kernel.cc").write_text(text)
    library = folder / "kernel.so"
    command = [str(compiler), "-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", library, folder / "kernel.cc"], check=True)
    ffi = cffi.FFI()
    ffi.cdef(ARGS + "void run(int type, int op, const JcArgs* a, unsigned threads);")
    return ffi, ffi.dlopen(str(library))


def operands(dtype: str, count: int, n: int, seed: int, wide: list[bool]) -> list[np.ndarray[Any, Any]]:
    """Every bit pattern comes up for small types, NaNs and infinities included; wide ones are f32."""
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(dtype)
    made = []
    for k in range(count):
        if wide[k]:
            made.append((rng.standard_normal(n) * 10.0 ** rng.integers(-8, 6, n)).astype(np.float32))
        elif kind == np.bool_:
            made.append(rng.integers(0, 2, n).astype(np.bool_))
        elif kind.kind in "fc" and kind.itemsize >= 4:
            value = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 3, n)
            value[rng.integers(0, 4, n) == 0] *= 0.0  # of either sign
            made.append((value + 1j * rng.standard_normal(n)).astype(kind) if kind.kind == "c" else value.astype(kind))
        else:
            made.append(rng.integers(0, 256, n * kind.itemsize, dtype=np.uint8).view(kind))
    return made


def same_but_nan(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Equal to the bit, but for the sign and payload of NaNs, which no standard fixes."""
    if a.dtype.kind in "biu":
        return bool(np.array_equal(a, b))
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(a.dtype.itemsize, np.uint64)
    number = np.float32 if a.dtype.itemsize < 4 else a.dtype
    nan = np.isnan(a.astype(number)) & np.isnan(b.astype(number))
    if a.dtype.kind == "c":
        return bool(np.array_equal(a, b, equal_nan=True))
    return bool(((a.view(width) == b.view(width)) | nan).all())


@pytest.mark.parametrize(("dtype", "reduce"), PAIRS)
def test_bits_of_the_cpu(kernel: Any, dtype: str, reduce: str):
    ffi, lib = kernel
    native = load()
    kind = numpy_dtype(dtype)
    narrow = dtype in NARROW and reduce in ("sum", "prod")
    for seed, (count, n, offset) in enumerate([(1, 700, 0), (2, 4096, 0), (3, 257, 1), (9, 1000, 0)]):
        for dst_wide in (False, True) if narrow else (False,):
            wide = [narrow and (k + seed) % 2 == 1 for k in range(count)]
            sources = operands(dtype, count, n, seed, wide)
            held = []  # `offset` elements into an allocation: not on 16 bytes
            for s in sources:
                room = np.zeros(n + offset + 16, s.dtype)
                room[offset : offset + n] = s
                held.append(room[offset : offset + n])
            target = np.float32 if dst_wide else kind
            got, want = np.zeros(n, target), np.zeros(n, target)
            args = ffi.new("JcArgs*")
            args.dst, args.n, args.count, args.dst_wide = ffi.cast("void*", got.ctypes.data), n, count, int(dst_wide)
            for k, s in enumerate(held):
                args.src[k] = ffi.cast("void*", s.ctypes.data)
                args.wide[0] |= int(wide[k]) << k
            lib.run(DTYPE[dtype], REDUCE[reduce], args, 64)
            pointers = native.ffi.new("void*[]", [native.ffi.cast("void*", s.ctypes.data) for s in held])
            flags = native.ffi.new("int[]", [int(w) for w in wide])
            assert native.lib.jc_combine(
                DTYPE[dtype], REDUCE[reduce], native.ffi.cast("void*", want.ctypes.data), int(dst_wide), pointers,
                flags, count, n,
            ) == 0  # fmt: skip
            assert same_but_nan(got, want), (count, n, dst_wide)


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_of_every_pattern(kernel: Any, dtype: str):
    # All values, all midpoints between neighbours and what lies just beside them: rounded as ml_dtypes does.
    ffi, lib = kernel
    kind = numpy_dtype(dtype)
    bits = np.uint8 if kind.itemsize == 1 else np.uint16
    every = np.arange(np.iinfo(bits).max + 1, dtype=bits).view(kind)
    loaded = np.zeros(every.size, np.float32)
    args = ffi.new("JcArgs*", {"n": every.size, "count": 1, "dst_wide": 1})
    args.dst, args.src[0] = ffi.cast("void*", loaded.ctypes.data), ffi.cast("void*", every.ctypes.data)
    lib.run(DTYPE[dtype], 0, args, 1)
    assert np.array_equal(loaded, every.astype(np.float32), equal_nan=True)
    finite = np.unique(loaded[np.isfinite(loaded)])
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(-np.inf)), np.nextafter(middle, np.float32(np.inf))]
    values = np.concatenate(
        [finite, middle, *beside, np.array([1e30, -1e30, 0.0, np.inf, -np.inf, np.nan], np.float32)]
    )
    stored = np.zeros(values.size, kind)
    args = ffi.new("JcArgs*", {"n": values.size, "count": 1, "dst_wide": 0})
    args.wide[0] = 1
    args.dst, args.src[0] = ffi.cast("void*", stored.ctypes.data), ffi.cast("void*", values.ctypes.data)
    lib.run(DTYPE[dtype], 0, args, 1)
    with np.errstate(over="ignore"):
        want = values.astype(getattr(ml_dtypes, dtype, kind))
    assert same_but_nan(stored, want)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles(architecture: str, tmp_path: Path, request: pytest.FixtureRequest):
    nvcc = shutil.which("nvcc")
    need(nvcc is not None, "nvcc", "NVCC")
    # Each compiler run takes seconds: by default a type of each sort, all pairs with --full.
    pairs = PAIRS if request.config.getoption("--full") else SOME_PAIRS
    kernels = "".join(
        f'extern "C" __global__ void jc_{t}_{r}(const JcArgs a) {{ JcKernel<JcType<{DTYPE[t]}>, {REDUCE[r]}>::Run(a, '
        "(u64)blockIdx.x * blockDim.x + threadIdx.x, (u64)gridDim.x * blockDim.x); }\n"
        for t, r in pairs
    )
    (tmp_path / "kernel.cu").write_text(source() + kernels)
    command = [str(nvcc), "-cubin", f"-arch=sm_{architecture}", "--fmad=false", "-std=c++14", "-Werror", "all-warnings"]
    subprocess.run([*command, "-o", tmp_path / "kernel.cubin", tmp_path / "kernel.cu"], check=True)
    assert (tmp_path / "kernel.cubin").stat().st_size > 1000
