"""Every dtype through every operation, against jax.lax; and how exact the sums of real numbers are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxcoll

from . import cases, helpers

INTS = ["int4", "uint4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
NARROW = [
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e3m4", "float8_e4m3"),
]
COMPLEX = ["complex64", "complex128"]
N = 4


OPS = ["psum", "pmax", "pmin", "all_gather", "psum_scatter_tiled", "all_to_all_tiled", "ppermute", "pbroadcast"]


def program(module: Any, names: list[str]) -> Any:
    return lambda t: {name: cases.OPS[name].fun(module, t[name], "b", N) for name in names}


def arguments(dtype: str, names: list[str]) -> dict[str, Any]:
    shapes = {name: (8, *cases.OPS[name].shape(N)) for name in names}
    unsigned = dtype == "bool" or dtype.startswith("u")
    xs = {name: np.random.default_rng(3).integers(0 if unsigned else -1, 2, shapes[name]) for name in names}
    return {name: jnp.asarray(x).astype(dtype) for name, x in xs.items()}


@pytest.fixture(scope="module")
def by_lax() -> Any:
    """sign -> the results of jax.lax in float32; they are small whole numbers, so every dtype has to give the same."""
    mesh = cases.mesh_of(a=2, b=N)
    args = {unsigned: arguments("uint8" if unsigned else "float32", OPS) for unsigned in (True, False)}
    floats = jax.tree.map(lambda x: x.astype(jnp.float32), args)
    return helpers.on_ranks(mesh, lambda t: {sign: program(lax, OPS)(x) for sign, x in t.items()}, floats)


@pytest.mark.parametrize("dtype", ["bool", *INTS, *FLOATS, *NARROW, *COMPLEX])
def test_every_operation_equals_lax(dtype: str, by_lax: Any) -> None:
    without = {"complex64": ("pmax", "pmin"), "complex128": ("pmax", "pmin"), "bool": ("psum_scatter_tiled",)}
    names = [name for name in OPS if name not in without.get(dtype, ())]
    with jax.enable_x64(True):
        mesh = cases.mesh_of(a=2, b=N)
        xs = arguments(dtype, names)
        got = helpers.on_ranks(mesh, program(jaxcoll, names), xs)
        types, lax_types = (
            jax.eval_shape(cases.Place(mesh, True).sharded(program(module, names)), xs) for module in (jaxcoll, lax)
        )
    assert types == lax_types
    for name in names:
        assert got[name].dtype == types[name].dtype
        expected = by_lax[dtype == "bool" or dtype.startswith("u")][name]
        np.testing.assert_array_equal(got[name], expected.astype(got[name].dtype), err_msg=name)


def test_maximum_of_complex_numbers_is_left_to_xla() -> None:
    """XLA orders them; jaxcoll doesn't, and says so by giving the same answer or the same failure."""
    mesh = cases.mesh_of(a=4)
    x = jnp.asarray([1 + 2j, 3 + 0j, -1j, 2 + 2j], jnp.complex64)

    def attempt(module: Any) -> Any:
        try:
            return helpers.on_ranks(mesh, lambda t: module.pmax(t, "a"), x).tolist()
        except Exception as error:
            return type(error)

    assert attempt(jaxcoll) == attempt(lax)


def test_scaling_factors_move() -> None:
    """float8_e8m0fnu, of which there is no zero and no sign, moves as it is and is reduced in float32."""
    mesh = cases.mesh_of(a=4)
    x = jnp.asarray([1, 2, 4, 8], jnp.float8_e8m0fnu)
    assert helpers.on_ranks(mesh, lambda t: jaxcoll.all_gather(t, "a"), x)[3].astype(float).tolist() == [1, 2, 4, 8]
    assert helpers.on_ranks(mesh, lambda t: jaxcoll.pmax(t, "a"), x).astype(float).tolist() == [8] * 4


def random_bits(dtype: str, count: int) -> Any:
    """Any numbers of `dtype`: NaNs, infinities, subnormals; the first two are zeros, 0.0 and -0.0 in every part."""
    if dtype == "bool":
        return np.random.default_rng(5).integers(0, 2, count) > 0
    size = np.dtype(dtype).itemsize
    numbers = np.random.default_rng(5).integers(0, 256, count * size, np.uint8).view(dtype)
    numbers[:2] = [0, complex(-0.0, -0.0) if dtype in COMPLEX else -0.0]
    return numbers


@pytest.mark.filterwarnings("ignore:invalid value")  # of ml_dtypes, which compares signalling NaNs
@pytest.mark.parametrize("dtype", ["bool", *INTS[2:], *FLOATS, *NARROW, "float8_e8m0fnu", *COMPLEX])
def test_broadcast_from_a_traced_source_keeps_every_bit(dtype: str) -> None:
    """But a NaN stays any NaN, and a subnormal number itself or a zero."""
    mesh = cases.mesh_of(a=4)
    with jax.enable_x64(True):
        x = random_bits(dtype, 4000).reshape(4, 1000)
        x[2] = random_bits(dtype, 1000)
        got = helpers.on_ranks(mesh, lambda t, s: jaxcoll.pbroadcast(t, "a", s), x, jnp.full(4, 2))
    assert got.dtype == x.dtype
    part = {"complex64": np.float32, "complex128": np.float64}.get(dtype, x.dtype)
    wanted, parts = np.tile(x[2], (4, 1)).view(part), got.view(part)
    nan = wanted != wanted
    np.testing.assert_array_equal(parts != parts, nan)
    flushed = np.zeros(nan.shape, bool)
    if dtype in ("bfloat16", "float32", "float64", *COMPLEX):  # float32 holds the subnormal ones of the others
        flushed = (abs(wanted) < ml_dtypes.finfo(part).smallest_normal) & (parts == 0)
        np.testing.assert_array_equal(np.signbit(parts[~nan]), np.signbit(wanted[~nan]))
    same = ~nan & (~flushed | (wanted == 0))
    assert parts[same].tobytes() == wanted[same].tobytes()


def test_four_bits_of_float() -> None:
    """float4 moves in float8, which holds it exactly, and is summed in float32: 0.5 + 1.5 + 1 + 3 = 6."""
    mesh = cases.mesh_of(a=4)
    x = jnp.asarray([[0.5, -6], [1.5, 0.5], [1, 0.5], [3, 0.5]], jnp.float4_e2m1fn)
    for f, wanted in ((jaxcoll.psum, [6, -4]), (jaxcoll.pmax, [3, 0.5]), (jaxcoll.pmin, [0.5, -6])):
        got = helpers.on_ranks(mesh, lambda t, f=f: f(t, "a").astype(jnp.float32), x)
        assert got.tolist() == [wanted] * 4
    gathered = helpers.on_ranks(mesh, lambda t: jaxcoll.all_gather(t, "a").astype(jnp.float32), x)
    assert gathered[1].tolist() == x.astype(jnp.float32).tolist()


@pytest.mark.parametrize("dtype", [*FLOATS, "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_of_real_numbers(dtype: str, ranks: int) -> None:
    """Within (N-1) eps sum|x| of the sum in float64; narrow types: of the float32 sum, and one rounding."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(ranks)
        x = jnp.asarray(rng.normal(size=(ranks, 777)) / 4).astype(dtype)
        exact = np.asarray(x).astype(np.float64).sum(axis=0)
        size = np.abs(np.asarray(x).astype(np.float64)).sum(axis=0)
        mesh = cases.mesh_of(a=ranks)
        got = helpers.on_ranks(mesh, lambda t: jaxcoll.psum(t, "a"), x)
        helpers.assert_same_on_all(got)
        parts = helpers.on_ranks(
            mesh, lambda t: jaxcoll.psum_scatter(jnp.resize(t, (ranks, 777)), "a", tiled=True)[0], x
        )
    narrow = jnp.finfo(dtype).bits < 32
    inner = np.finfo(np.float32).eps if narrow else np.finfo(dtype).eps
    info = ml_dtypes.finfo(dtype)
    bound = (ranks - 1) * float(inner) * size
    if narrow:
        bound += np.maximum(float(info.eps) * (np.abs(exact) + bound), float(info.smallest_subnormal))
    for result in (got[0], *parts):
        assert np.all(np.abs(result.astype(np.float64) - exact) <= bound)


@pytest.mark.parametrize("ranks", [2, 8])
def test_numbers_below_the_normal_ones_are_kept(ranks: int) -> None:
    """Whichever thread reduces: XLA's own flush them to zero."""
    mesh = cases.mesh_of(a=ranks)
    x = jnp.asarray(np.full((ranks, 1 << 20), 1e-40, np.float32))
    for f, times in ((jaxcoll.psum, ranks), (jaxcoll.pmax, 1)):
        wanted = np.full_like(x, np.float32(1e-40)) * np.float32(times)
        for _ in range(3):
            assert helpers.on_ranks(mesh, lambda t, f=f: f(t, "a"), x).tobytes() == wanted.tobytes()
