"""The table of operations: one row for each of JAX's collective primitives.

A row says which collective the primitive is, how it reduces, and how an operand becomes **blocks**: a collective over N
ranks moves arrays of shape (blocks, n), with 1 or N blocks on either side. `pack` makes the blocks of the operand, and
`unpack` the result out of the blocks that arrived. A new operation is a new row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import compat
from jaxcoll.errors import UsageError
from jaxcoll.schedule.ir import Kind

Params = Mapping[str, Any]
Pack = Callable[[jax.Array, Params, int], jax.Array]
Unpack = Callable[[jax.Array, Params, int, tuple[int, ...]], jax.Array]
Batch = Callable[[jax.Array, int | None, int, Params], tuple[jax.Array, int | None]]


def normalised(index: Any, size: int, what: str) -> int:
    """`index` along an axis of `size` ranks, counted from the front. Raises UsageError on what is no index of it."""
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
        raise UsageError(f"{what} must be an int, not {index!r}")
    if not -size <= index < size:
        raise UsageError(f"{what} {index} is outside of the axis, whose indices are 0..{size - 1}")
    return int(index) % size


def permutation(perm: Sequence[tuple[int, int]], size: int) -> tuple[tuple[int, int], ...]:
    """The (source, destination) pairs over `size` ranks, sorted by destination, all indices counted from the front.

    Raises UsageError on what is no index, and on one that is twice a source or twice a destination.
    """
    pairs = tuple(
        (normalised(src, size, "a source of `perm`"), normalised(dst, size, "a destination of `perm`"))
        for src, dst in perm
    )
    sources, destinations = [s for s, _ in pairs], [d for _, d in pairs]
    if len(set(sources)) != len(sources) or len(set(destinations)) != len(destinations):
        raise UsageError(f"ppermute sources and destinations must be unique, got {tuple(perm)}.")
    return tuple(sorted(pairs, key=lambda pair: pair[1]))


def _whole(x: jax.Array, params: Params, n: int) -> jax.Array:
    return x.reshape(1, -1)


def _reshape(blocks: jax.Array, params: Params, n: int, shape: tuple[int, ...]) -> jax.Array:
    return blocks.reshape(shape)


def _split(x: jax.Array, dim: int, n: int) -> jax.Array:
    """Cuts dimension `dim` into n equal parts and brings the parts to the front: (n, ...)."""
    shape = x.shape
    parts = x.reshape(*shape[:dim], n, shape[dim] // n, *shape[dim + 1 :])
    return jnp.moveaxis(parts, dim, 0)


def _join(parts: jax.Array, dim: int, shape: tuple[int, ...]) -> jax.Array:
    """The inverse: puts the n parts one behind the other along dimension `dim` of a result of shape `shape`."""
    return jnp.moveaxis(parts, 0, dim).reshape(shape)


def _unpack_all_gather(blocks: jax.Array, params: Params, n: int, shape: tuple[int, ...]) -> jax.Array:
    dim = params["all_gather_dimension"]
    # Both forms end in the same bytes: a new dimension of n, or n parts along an old one.
    own = (*shape[:dim], shape[dim] // n, *shape[dim + 1 :]) if params["tiled"] else (*shape[:dim], *shape[dim + 1 :])
    return _join(blocks.reshape(n, *own), dim, shape)


def _pack_reduce_scatter(x: jax.Array, params: Params, n: int) -> jax.Array:
    return _split(x, params["scatter_dimension"], n).reshape(n, -1)


def _pack_all_to_all(x: jax.Array, params: Params, n: int) -> jax.Array:
    return _split(x, params["split_axis"], n).reshape(n, -1)


def _unpack_all_to_all(blocks: jax.Array, params: Params, n: int, shape: tuple[int, ...]) -> jax.Array:
    dim = params["concat_axis"]
    part = (*shape[:dim], shape[dim] // n, *shape[dim + 1 :])
    return _join(blocks.reshape(n, *part), dim, shape)


def _transpose_pbroadcast(cotangent: jax.Array, params: Params) -> jax.Array:
    """The sum of all ranks' cotangents, at the source. (JAX's own rule takes scalars only.)"""
    axes = params["axis_name"]
    total = lax.psum(cotangent, axes)
    return jnp.where(lax.axis_index(axes) == params["source"], total, jnp.zeros_like(total))


def _refuse_axes_besides(function: str, params: Params) -> None:
    """Raises UsageError where the axis of a vmap stands in a tuple with others."""
    axes = params["axis_name"]
    if len(axes) > 1:
        raise UsageError(
            f"{function} over {axes}: one of these axes is that of a jax.vmap, over which {function} must be alone. "
            f"Call {function} for each axis by itself, or make the vmapped axis one of the mesh."
        )


def _batch_ppermute(x: jax.Array, dim: int | None, n: int, params: Params) -> tuple[jax.Array, int | None]:
    """(JAX's own rule takes full permutations only, and forgets the vmapped one of several axes.)"""
    _refuse_axes_besides("ppermute", params)
    if dim is None:
        x, dim = jnp.broadcast_to(x, (n, *x.shape)), 0
    sources = np.full(n, n)  # nobody: an index outside of the axis
    for source, destination in permutation(params["perm"], n):
        sources[destination] = source
    return jnp.take(x, sources, axis=dim, mode="fill", fill_value=0), dim


def _batch_pbroadcast(x: jax.Array, dim: int | None, n: int, params: Params) -> tuple[jax.Array, int | None]:
    """(JAX's own rule fails.)"""
    _refuse_axes_besides("pbroadcast", params)
    return x if dim is None else lax.index_in_dim(x, params["source"], dim, keepdims=False), None


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation.

    Attributes:
      name: of JAX's primitive, without "_p".
      kind: the collective.
      reduce: "sum", "max", "min", or "none" for pure data movement.
      axes_param: the parameter that holds the axis names.
      pack, unpack: operand to blocks, blocks to result (see the module's docstring).
      transpose: (cotangent, params) -> cotangent of the operand, where JAX's rule is wrong; None: JAX's rule.
      batch: (operand, its batch dimension or None, size of that, params) -> result and its batch dimension: vmap over
        one of the axes, where JAX's rule is wrong; None: JAX's rule.
    """

    name: str
    kind: Kind
    reduce: str
    axes_param: str = "axis_name"
    pack: Pack = _whole
    unpack: Unpack = _reshape
    transpose: Callable[[jax.Array, Params], jax.Array] | None = None
    batch: Batch | None = None

    @property
    def primitive(self) -> Any:
        return compat.jax_primitive(self.name)

    def axes(self, params: Params) -> tuple[Any, ...]:
        """All axes, the positional ones (ints) among them."""
        axes = params[self.axes_param]
        return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _reduction(name: str, reduce: str) -> Row:
    return Row(name, Kind.ALL_REDUCE, reduce, axes_param="axes")


def _gather(name: str) -> Row:
    return Row(name, Kind.ALL_GATHER, "none", unpack=_unpack_all_gather)


def _scatter(name: str) -> Row:
    return Row(name, Kind.REDUCE_SCATTER, "sum", pack=_pack_reduce_scatter)


# The "unreduced" and "reduced" ones are the same collectives under other types of `jax.shard_map`'s type system.
_ROWS = (
    _reduction("psum", "sum"),
    _reduction("psum_invariant", "sum"),
    _reduction("unreduced_psum", "sum"),
    _reduction("pmax", "max"),
    _reduction("unreduced_pmax", "max"),
    _reduction("pmin", "min"),
    _reduction("unreduced_pmin", "min"),
    _gather("all_gather"),
    _gather("all_gather_invariant"),
    _gather("all_gather_reduced"),
    _scatter("reduce_scatter"),
    _scatter("unreduced_reduce_scatter"),
    Row("all_to_all", Kind.ALL_TO_ALL, "none", pack=_pack_all_to_all, unpack=_unpack_all_to_all),
    Row("ppermute", Kind.PERMUTE, "none", batch=_batch_ppermute),
    Row("pbroadcast", Kind.BROADCAST, "none", transpose=_transpose_pbroadcast, batch=_batch_pbroadcast),
)

ROWS: dict[Any, Row] = {row.primitive: row for row in _ROWS if row.primitive is not None}
"""JAX's primitive -> its row; a row whose primitive this JAX doesn't have is left out."""

# Elements that the native library doesn't take travel as a wider type that holds them exactly (or, summed, with one
# rounding at the end).
_NATIVE = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e3m4", "float8_e4m3", "float8_e8m0fnu"),
}
_WIDENED = {
    **{name: "int8" for name in ("int1", "int2", "int4")},
    **{name: "uint8" for name in ("uint1", "uint2", "uint4")},
    **{name: "float8_e4m3fn" for name in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")},
}


def carrier(dtype: Any, reduce: str) -> Any | None:
    """The dtype in which elements of `dtype` travel and are reduced, or None where jaxcoll can't."""
    name = str(dtype)
    if reduce in ("max", "min") and name.startswith("complex"):
        return None
    if reduce == "sum" and name == "bool":
        return None
    if reduce == "sum" and name in ("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"):
        return jnp.dtype("float32")
    if reduce != "none" and name == "float8_e8m0fnu":
        return jnp.dtype("float32")
    if name in _WIDENED:
        return jnp.dtype(_WIDENED[name])
    return jnp.dtype(dtype) if name in _NATIVE else None


def convert(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)
