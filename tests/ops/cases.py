"""The operations, meshes and transformations of the table, each named once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxcoll

Array = jax.Array


def mesh_of(**axes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


# ------------------------------------------------------------------------------------------------------ operations


@dataclasses.dataclass(frozen=True)
class OpCase:
    """fun(module, x, axes, n): the operation on a rank's array x of shape `shape(n)` over n ranks."""

    fun: Callable[[Any, Array, Any, int], Array]
    shape: Callable[[int], tuple[int, ...]]
    reduces: bool = False
    same_everywhere: bool = False
    differentiable: bool = True
    any_axis_order: bool = True


def _shift(n: int) -> list[tuple[int, int]]:
    return [(i, (i + 1) % n) for i in range(n)]


def _reference_pbroadcast(x: Array, axes: Any, source: int) -> Array:
    """jax.lax.pbroadcast has no lowering for the CPU: what its docstring says it is."""
    kept = jnp.where(lax.axis_index(axes) == source, x, jnp.zeros_like(x))
    total = lax.psum(kept.astype(jnp.int32) if x.dtype == jnp.bool_ else kept, axes).astype(x.dtype)
    # Its result is typed as varying.
    return lax.pcast(total, axes, to="varying") if jax.typeof(x).manual_axis_type.varying else total


def _pbroadcast(m: Any, x: Array, axes: Any, n: int) -> Array:
    return _reference_pbroadcast(x, axes, n - 1) if m is lax else m.pbroadcast(x, axes, n - 1)


OPS: dict[str, OpCase] = {
    "psum": OpCase(lambda m, x, a, n: m.psum(x, a), lambda n: (3, 5), reduces=True, same_everywhere=True),
    "pmean": OpCase(lambda m, x, a, n: m.pmean(x, a), lambda n: (4,), reduces=True, same_everywhere=True),
    "pmax": OpCase(
        lambda m, x, a, n: m.pmax(x, a), lambda n: (3, 2), reduces=True, same_everywhere=True, differentiable=False
    ),
    "pmin": OpCase(
        lambda m, x, a, n: m.pmin(x, a), lambda n: (), reduces=True, same_everywhere=True, differentiable=False
    ),
    "all_gather": OpCase(lambda m, x, a, n: m.all_gather(x, a), lambda n: (3, 2), same_everywhere=True),
    "all_gather_axis": OpCase(lambda m, x, a, n: m.all_gather(x, a, axis=-1), lambda n: (2, 3), same_everywhere=True),
    "all_gather_tiled": OpCase(
        lambda m, x, a, n: m.all_gather(x, a, axis=1, tiled=True), lambda n: (2, 3, 2), same_everywhere=True
    ),
    "psum_scatter": OpCase(lambda m, x, a, n: m.psum_scatter(x, a), lambda n: (n, 3), reduces=True),
    "psum_scatter_tiled": OpCase(
        lambda m, x, a, n: m.psum_scatter(x, a, scatter_dimension=1, tiled=True),
        lambda n: (2, 2 * n, 3),
        reduces=True,
    ),
    "all_to_all": OpCase(lambda m, x, a, n: m.all_to_all(x, a, 1, 1), lambda n: (2, n, 3)),
    "all_to_all_tiled": OpCase(lambda m, x, a, n: m.all_to_all(x, a, 1, 0, tiled=True), lambda n: (3, 2 * n)),
    "ppermute": OpCase(lambda m, x, a, n: m.ppermute(x, a, _shift(n)), lambda n: (3, 2), any_axis_order=False),
    "ppermute_partial": OpCase(lambda m, x, a, n: m.ppermute(x, a, [(n - 1, 0)]), lambda n: (5,), any_axis_order=False),
    "pbroadcast": OpCase(_pbroadcast, lambda n: (2, 3), same_everywhere=True),
}

# ---------------------------------------------------------------------------------------------------------- meshes

MESHES: dict[str, tuple[dict[str, int], Any]] = {
    "a8:a": ({"a": 8}, "a"),
    "a3:a": ({"a": 3}, "a"),
    "a2b4:a": ({"a": 2, "b": 4}, "a"),
    "a2b4:b": ({"a": 2, "b": 4}, ("b",)),
    "a4b2:ab": ({"a": 4, "b": 2}, ("a", "b")),
    "a2b2c2:ac": ({"a": 2, "b": 2, "c": 2}, ("a", "c")),
    "a2b2c2:cb": ({"a": 2, "b": 2, "c": 2}, ("c", "b")),
    "a2b2c2:abc": ({"a": 2, "b": 2, "c": 2}, ("a", "b", "c")),
    "a1b8:a": ({"a": 1, "b": 8}, "a"),
}


def group_size(mesh: str) -> int:
    sizes, axes = MESHES[mesh]
    return math.prod(sizes[a] for a in (axes if isinstance(axes, tuple) else (axes,)))


# -------------------------------------------------------------------------------------------------- transformations
# Each gets f, the operation on a rank's array, and the ranks' arrays stacked: x of shape (ranks, ...); and returns what
# all ranks have at the end, stacked, as a pytree. `w` are weights of the results, so that gradients aren't constant.


@dataclasses.dataclass(frozen=True)
class Place:
    """A mesh and a mode of shard_map, in which to run a function on every rank."""

    mesh: Mesh
    check_vma: bool

    def sharded(self, f: Callable[..., Any]) -> Callable[..., Any]:
        spec = P(self.mesh.axis_names)

        def on_rank(*xs: Any) -> Any:
            out = f(*(jax.tree.map(lambda x: x[0], x) for x in xs))
            return jax.tree.map(lambda y: y[None], out)

        return jax.shard_map(on_rank, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=self.check_vma)


Op = Callable[[Array], Array]


def _loss(y: Array) -> Array:
    """A scalar that depends on every element of y in its own way, in small whole numbers."""
    weights = (jnp.arange(y.size) % 3 + 1).reshape(y.shape).astype(y.dtype)
    return jnp.sum(weights * y, dtype=y.dtype)


def _jit(p: Place, f: Op, x: Array) -> Any:
    return jax.jit(p.sharded(f))(x)


def _eager(p: Place, f: Op, x: Array) -> Any:
    return p.sharded(f)(x)


def _vmap_inside(p: Place, f: Op, x: Array) -> Any:
    return jax.jit(p.sharded(lambda t: jax.vmap(f, in_axes=-1, out_axes=-1)(jnp.stack([t, t + t], -1))))(x)


def _vmap_outside(p: Place, f: Op, x: Array) -> Any:
    return jax.jit(jax.vmap(p.sharded(f)))(jnp.stack([x, x + x]))


def _jvp(p: Place, f: Op, x: Array) -> Any:
    return jax.jit(lambda x: jax.jvp(p.sharded(f), (x,), (x + x,)))(x)


def _grad_inside(p: Place, f: Op, x: Array) -> Any:
    return jax.jit(p.sharded(jax.grad(lambda t: _loss(f(t * t)))))(x)


def _grad_outside(p: Place, f: Op, x: Array) -> Any:
    return jax.jit(jax.grad(lambda x: p.sharded(lambda t: _loss(f(t * t)))(x).sum()))(x)


def _grad_invariant(p: Place, f: Op, x: Array) -> Any:
    """The gradient of a weight that all ranks share: where check_vma is True, a sum that nobody wrote."""

    def loss(weight: Array, x: Array) -> Array:
        spec = P(p.mesh.axis_names)
        run = jax.shard_map(
            lambda w, t: _loss(f(w * t[0]))[None],
            mesh=p.mesh,
            in_specs=(P(), spec),
            out_specs=spec,
            check_vma=p.check_vma,
        )
        return run(weight, x).sum()

    return jax.jit(jax.grad(loss))(x[0], x)


def _remat(p: Place, f: Op, x: Array) -> Any:
    return jax.jit(p.sharded(jax.grad(jax.checkpoint(lambda t: _loss(f(t * t))))))(x)


def _scan(p: Place, f: Op, x: Array) -> Any:
    def loop(t: Array) -> Any:
        return lax.scan(lambda carry, s: (carry + 1, f(s)), 0, jnp.stack([t, t + t, t]))[1]

    return jax.jit(p.sharded(loop))(x)


def _while(p: Place, f: Op, x: Array) -> Any:
    def loop(t: Array) -> Any:
        start = f(t)

        def body(carry: tuple[Any, Array]) -> tuple[Any, Array]:
            return carry[0] + 1, (f(t + t) + start).astype(start.dtype)

        return lax.while_loop(lambda carry: carry[0] < 3, body, (0, start))[1]

    return jax.jit(p.sharded(loop))(x)


def _cond(p: Place, f: Op, x: Array) -> Any:
    def branch(t: Array) -> Any:
        return tuple(lax.cond(jnp.bool_(flag), f, lambda s: f(s + s), t) for flag in (True, False))

    return jax.jit(p.sharded(branch))(x)


def _pmap(p: Place, f: Op, x: Array) -> Any:
    (name,) = p.mesh.axis_names
    return jax.pmap(f, axis_name=name, devices=list(p.mesh.devices.flat))(x)


TRANSFORMS: dict[str, Callable[[Place, Op, Array], Any]] = {
    "jit": _jit,
    "eager": _eager,
    "vmap_inside": _vmap_inside,
    "vmap_outside": _vmap_outside,
    "jvp": _jvp,
    "grad_inside": _grad_inside,
    "grad_outside": _grad_outside,
    "grad_invariant": _grad_invariant,
    "remat": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "pmap": _pmap,
}
DERIVATIVES = frozenset({"jvp", "grad_inside", "grad_outside", "grad_invariant", "remat"})

MODULES: tuple[Any, ModuleType] = (lax, jaxcoll)


def whole_numbers(shape: tuple[int, ...], dtype: Any, seed: int, high: int = 2) -> Array:
    """Whole numbers in -high..high (0..high for unsigned, bool): sums of them are exact in every order and dtype."""
    low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) or dtype == jnp.bool_ else -high
    values = np.random.default_rng(seed).integers(low, high + 1, shape)
    return jnp.asarray(values > 0 if dtype == jnp.bool_ else values).astype(dtype)
