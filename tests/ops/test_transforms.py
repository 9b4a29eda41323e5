"""What the table can't hold: where jaxcoll goes further than jax.lax, and what is particular to one operation."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll

from . import cases, helpers


def both(mesh: Any, f: Any, *xs: Any, check_vma: bool = True) -> list[Any]:
    return [helpers.on_ranks(mesh, functools.partial(f, m), *xs, check_vma=check_vma) for m in cases.MODULES]


def test_constants_fold() -> None:
    def sizes(t: Any) -> Any:
        size = jaxcoll.psum(1, ("a", "b"))
        assert type(size) is int  # a Python int: it can be a shape
        assert size == 8
        assert jaxcoll.psum(1, "b", axis_index_groups=None) == 4
        assert jaxcoll.pmean(3.0, "a") == 3.0
        return t + jnp.ones(size), jnp.asarray(jaxcoll.psum((t, 2), "a")[1])

    mesh = cases.mesh_of(a=2, b=4)
    total, folded = helpers.on_ranks(mesh, sizes, jnp.zeros(8))
    assert total.shape == (8, 8)
    assert folded.tolist() == [4] * 8


UNEQUAL = [[0, 4, 2], [3], [1, 5, 7, 6]]
MEMBERS = np.array([3, 4, 3, 1, 3, 4, 4, 4])


@pytest.mark.parametrize("axes", ["a", ("a", "b")])
def test_means_over_groups_of_unequal_size(axes: Any) -> None:
    """Each group's sum is divided by its own size; so is the gradient, and a constant's mean is the constant."""
    mesh = cases.mesh_of(a=8) if axes == "a" else cases.mesh_of(a=2, b=4)
    x = cases.whole_numbers((8, 3), jnp.float32, seed=11)

    def f(t: Any) -> Any:
        mean, pull = jax.vjp(lambda s: jaxcoll.pmean(s, axes, axis_index_groups=UNEQUAL), t)
        return mean, pull(t)[0], jnp.asarray(jaxcoll.pmean(3.0, axes, axis_index_groups=UNEQUAL))

    mean, gradient, constant = helpers.on_ranks(mesh, f, x, check_vma=False)
    for group in UNEQUAL:
        np.testing.assert_allclose(mean[group], np.tile(x[jnp.array(group)].mean(0), (len(group), 1)), rtol=1e-6)
    np.testing.assert_allclose(gradient, mean, rtol=1e-6)
    assert constant.tolist() == [3.0] * 8


def test_constants_fold_to_the_size_of_the_own_group() -> None:
    """In the dtypes of the same sums over equal groups."""
    constants = (1, 2.0, True, np.int8(3), np.ones(2, np.float16))

    def f(t: Any, groups: Any) -> Any:
        return jax.tree.map(jnp.asarray, jaxcoll.psum(constants, "a", axis_index_groups=groups))

    mesh = cases.mesh_of(a=8)
    got = helpers.on_ranks(mesh, functools.partial(f, groups=UNEQUAL), jnp.zeros(8), check_vma=False)
    equal = helpers.on_ranks(mesh, functools.partial(f, groups=[[*range(8)]]), jnp.zeros(8), check_vma=False)
    for ours, like, constant in zip(got, equal, constants, strict=True):
        assert ours.dtype == like.dtype
        np.testing.assert_array_equal(ours, np.multiply.outer(MEMBERS, constant))
    text = helpers.lowered(
        cases.Place(mesh, False).sharded(lambda t: jaxcoll.psum(1, "a", axis_index_groups=UNEQUAL)), jnp.zeros(8)
    )
    assert helpers.messages(text) == 0


def test_arrays_that_no_rank_computes() -> None:
    """A NumPy array is no tracer; jax.lax takes it for the same on all ranks."""
    mesh = cases.mesh_of(a=4)
    constant = np.arange(8.0, dtype=np.float32)
    for f in (
        lambda m, t: t + m.all_gather(constant, "a")[2, 1],
        lambda m, t: t + m.psum_scatter(constant, "a", tiled=True)[0],
        lambda m, t: t + m.ppermute(constant, "a", [(0, 1)])[3],
        lambda m, t: t + m.psum(constant, "a")[3],
        lambda m, t: t + m.pmax(constant, "a")[3],
    ):
        expected, got = both(mesh, f, jnp.zeros(4))
        np.testing.assert_array_equal(got, expected)


def test_positional_axes() -> None:
    mesh = cases.mesh_of(a=4)
    x = cases.whole_numbers((4, 3, 5), jnp.float32, seed=1)
    for name in ("psum", "pmax", "pmin"):
        for axes in (("a", 0), (1, "a"), (0, 1, "a"), (0,)):
            f = lambda m, t, name=name, axes=axes: getattr(m, name)(t, axes)  # noqa: E731
            expected, got = both(mesh, f, x, check_vma=False)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_second_derivative(check_vma: bool) -> None:
    """Forward over reverse, which a custom_vjp can't do."""
    mesh = cases.mesh_of(a=4)
    x = cases.whole_numbers((4, 3), jnp.float32, seed=2)

    def f(module: Any, t: Any) -> Any:
        g = jax.grad(lambda s: jnp.sum(module.psum(s * s, "a") ** 2))
        return jax.jvp(g, (t,), (jnp.ones_like(t),))[1]

    expected, got = both(mesh, f, x, check_vma=check_vma)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_remat_in_scan(check_vma: bool) -> None:
    mesh = cases.mesh_of(a=2, b=4)
    x = cases.whole_numbers((8, 4), jnp.float32, seed=3, high=1)

    def loss(module: Any, t: Any) -> Any:
        layer = jax.checkpoint(lambda c, w: (module.psum_scatter(module.all_gather(c * w, "b"), "b"), None))
        return jnp.sum(lax.scan(layer, t, jnp.stack([t, t]))[0])

    expected, got = both(mesh, lambda m, t: jax.grad(lambda s: loss(m, s))(t), x, check_vma=check_vma)
    np.testing.assert_array_equal(got, expected)


def test_vmap_with_an_axis_name() -> None:
    """Over a vmapped axis alone nothing is sent; over it and a mesh axis, only the mesh axis is left."""
    mesh = cases.mesh_of(a=4)
    x = cases.whole_numbers((4, 3, 5), jnp.float32, seed=4)
    for f in (
        lambda m, t: jax.vmap(lambda s: m.psum(s, "v"), axis_name="v")(t),
        lambda m, t: jax.vmap(lambda s: m.psum(s, ("a", "v")), axis_name="v")(t),
        lambda m, t: jax.vmap(lambda s: m.all_gather(s, "v"), axis_name="v")(t),
        lambda m, t: jax.vmap(lambda s: m.pmax(s, ("v", "a")), axis_name="v")(t),
        lambda m, t: jax.vmap(lambda s: m.ppermute(s, "v", [(0, 1), (1, 2), (2, 0)]), axis_name="v")(t),
    ):
        expected, got = both(mesh, f, x, check_vma=False)
        np.testing.assert_array_equal(got, expected)
    alone = jax.vmap(lambda s: jaxcoll.psum(s, "v"), axis_name="v")
    assert helpers.messages(helpers.lowered(alone, x)) == 0


@pytest.mark.parametrize("perm", [[(0, 1)], [(2, 0), (0, 2)], [(-1, 1), (0, 0), (1, -1)], []])
@pytest.mark.parametrize("dim", [0, 1])
def test_permutation_of_a_vmapped_axis(perm: list[tuple[int, int]], dim: int) -> None:
    """Who is no destination gets zeros, as over a mesh axis; and sends his gradient nowhere."""
    x = cases.whole_numbers((3, 2), jnp.float32, seed=12)
    y = cases.whole_numbers((3, 2), jnp.float32, seed=13)

    def over_mesh(t: Any, ct: Any) -> Any:
        value, pull = jax.vjp(lambda s: jaxcoll.ppermute(s, "a", perm), t)
        return value, pull(ct)[0], jaxcoll.ppermute(1, "a", perm)

    def over_vmap(*xs: Any) -> Any:
        f = jax.vmap(lambda s: jaxcoll.ppermute(s, "v", perm), axis_name="v", in_axes=dim)
        value, pull = jax.vjp(f, jnp.moveaxis(xs[0], 0, dim))
        constant = jax.vmap(lambda _: jaxcoll.ppermute(1, "v", perm), axis_name="v")(xs[0])
        return value, jnp.moveaxis(pull(xs[1])[0], dim, 0), constant

    expected = helpers.on_ranks(cases.mesh_of(a=3), over_mesh, x, y, check_vma=False)
    for got in (over_vmap(x, y), jax.jit(over_vmap)(x, y)):
        for ours, wanted in zip(got, expected, strict=True):
            np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("source", [0, 2, -1, np.int64(1)])
def test_broadcast_over_a_vmapped_axis(source: Any) -> None:
    x = cases.whole_numbers((3, 2), jnp.float32, seed=14)

    def f(t: Any, index: Any) -> Any:
        return jax.vmap(lambda s: jaxcoll.pbroadcast(s, "v", index), axis_name="v", in_axes=1)(t.T)

    def weighted(t: Any, index: Any) -> Any:
        return jnp.sum(f(t, index) * jnp.arange(1.0, 4.0)[:, None])

    for index in (source, jnp.asarray(source)):
        np.testing.assert_array_equal(f(x, index), np.tile(x[source], (3, 1)))
        gradient = np.where(np.arange(3)[:, None] == source % 3, 6.0, np.zeros((3, 2)))
        np.testing.assert_array_equal(jax.grad(weighted)(x, index), gradient)
    np.testing.assert_array_equal(jax.vmap(lambda t: jaxcoll.pbroadcast(1, "v", source) + t, axis_name="v")(x), x + 1)


def test_vmap_outside_of_any_mesh() -> None:
    x = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(jax.vmap(lambda t: jaxcoll.psum(t, "v"), axis_name="v")(x), np.tile(x.sum(0), (3, 1)))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_of_untiled_psum_scatter(dim: int) -> None:
    """jax.lax misplaces a batch dimension that stands behind the scattered one."""
    mesh = cases.mesh_of(a=4)
    x = cases.whole_numbers((4, 4, 3, 2), jnp.float32, seed=5)
    got = helpers.on_ranks(
        mesh,
        lambda t: jax.vmap(lambda s: jaxcoll.psum_scatter(s, "a"), in_axes=dim, out_axes=0)(jnp.moveaxis(t, -1, dim)),
        x,
    )
    np.testing.assert_array_equal(got, np.moveaxis(np.asarray(x).sum(0), -1, 1))


@pytest.mark.parametrize(("split", "concat"), [(0, 2), (2, 0), (1, 1), (-1, 0), (0, -1)])
def test_gradient_of_untiled_all_to_all(split: int, concat: int) -> None:
    """jax.lax fails where the two axes differ. The operation is its own inverse with the axes exchanged."""
    mesh = cases.mesh_of(a=4)
    x = cases.whole_numbers((4, 4, 4, 4), jnp.float32, seed=6)
    y = cases.whole_numbers((4, 4, 4, 4), jnp.float32, seed=7)
    expected, got = both(mesh, lambda m, t: m.all_to_all(t, "a", split % 3, concat % 3), x)
    np.testing.assert_array_equal(got, expected)

    def pulled_back(t: Any, ct: Any) -> Any:
        return jax.vjp(lambda s: jaxcoll.all_to_all(s, "a", split, concat), t)[1](ct)[0]

    back = helpers.on_ranks(mesh, pulled_back, x, y)
    forth = helpers.on_ranks(mesh, lambda t: jaxcoll.all_to_all(t, "a", split, concat), x)
    assert np.vdot(back, x) == np.vdot(y, forth)
    np.testing.assert_array_equal(back, helpers.on_ranks(mesh, lambda t: jaxcoll.all_to_all(t, "a", concat, split), y))


def test_pytree_with_some_leaves_differentiated() -> None:
    """Cotangents of leaves that nobody asks for are not sent."""
    mesh = cases.mesh_of(a=4)
    x = cases.whole_numbers((4, 3), jnp.float32, seed=8)

    def f(module: Any, t: Any) -> Any:
        def loss(s: Any) -> Any:
            one, two, three = module.psum((s * s, t, jnp.arange(3)), "a")
            return jnp.sum(one * two) + three[0]

        return jax.grad(loss)(t)

    for check_vma in (True, False):
        expected, got = both(mesh, f, x, check_vma=check_vma)
        np.testing.assert_array_equal(got, expected)


def test_linear_transpose_with_a_constant_operand() -> None:
    mesh = cases.mesh_of(a=4)
    x = cases.whole_numbers((4, 3), jnp.float32, seed=9)

    def f(module: Any, t: Any) -> Any:
        transposed = jax.linear_transpose(lambda s: module.psum((s, t), "a")[0], t)
        return transposed(t)[0]

    expected, got = both(mesh, f, x, check_vma=False)
    np.testing.assert_array_equal(got, expected)


def test_gradients_of_a_shared_weight_are_summed() -> None:
    """The usual data-parallel step: loss averaged by us, gradient summed by autodiff, equal to the whole batch's."""
    mesh = cases.mesh_of(a=8)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 4)), jnp.float32)
    y = jnp.asarray(np.random.default_rng(2).normal(size=(16,)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(3).normal(size=(4,)), jnp.float32)

    def step(w: Any, x: Any, y: Any) -> Any:
        return jax.grad(lambda w: jaxcoll.pmean(jnp.mean((x @ w - y) ** 2), "a"))(w)

    got = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("a"), P("a")), out_specs=P()))(w, x, y)
    expected = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_broadcast_from_a_traced_source(check_vma: bool) -> None:
    """Bit for bit, the sign of zero included, and with the gradient of a broadcast from a known source."""
    mesh = cases.mesh_of(a=4)
    x = jnp.asarray([[0.0, 1.0], [2.0, 3.0], [-0.0, jnp.inf], [4.0, 5.0]])
    sources = jnp.full(4, 2)

    def f(t: Any, s: Any) -> Any:
        value, pull = jax.vjp(lambda t: jaxcoll.pbroadcast(t, "a", s), t)
        return value, pull(jnp.ones_like(value) * (lax.axis_index("a") + 1))[0], jaxcoll.pbroadcast(t > 0, "a", s)

    def known(t: Any) -> Any:
        value, pull = jax.vjp(lambda t: jaxcoll.pbroadcast(t, "a", 2), t)
        return value, pull(jnp.ones_like(value) * (lax.axis_index("a") + 1))[0], jaxcoll.pbroadcast(t > 0, "a", 2)

    got = helpers.on_ranks(mesh, f, x, sources, check_vma=check_vma)
    expected = helpers.on_ranks(mesh, known, x, check_vma=check_vma)
    for ours, wanted in zip(got, expected, strict=True):
        assert ours.tobytes() == wanted.tobytes()
    np.testing.assert_array_equal(got[1], [[0, 0], [0, 0], [10, 10], [0, 0]])


@pytest.mark.parametrize("source", [-1, -4, np.int8(2)])
def test_broadcast_from_a_source_counted_from_the_end(source: Any) -> None:
    """Known or not while tracing; and the gradient arrives at the rank that was the source."""
    mesh = cases.mesh_of(a=4)
    x = cases.whole_numbers((4, 3), jnp.float32, seed=10)

    def f(t: Any, index: Any) -> Any:
        value, pull = jax.vjp(lambda s: jaxcoll.pbroadcast(s, "a", index), t)
        return value, pull(jnp.ones_like(value))[0]

    traced = jnp.full(4, source, jnp.int8)
    for value, gradient in (
        helpers.on_ranks(mesh, lambda t: f(t, source), x),
        helpers.on_ranks(mesh, f, x, traced),
    ):
        np.testing.assert_array_equal(value, np.tile(x[source], (4, 1)))
        np.testing.assert_array_equal(gradient, np.where(np.arange(4)[:, None] == source % 4, 4.0, np.zeros((4, 3))))


@pytest.mark.parametrize("source", [4, -5, 127, -128])
def test_broadcast_from_a_traced_source_outside_of_the_axis(source: int) -> None:
    got = helpers.on_ranks(
        cases.mesh_of(a=4), lambda t, s: jaxcoll.pbroadcast(t, "a", s), jnp.ones(4), jnp.full(4, source, jnp.int8)
    )
    np.testing.assert_array_equal(got, np.zeros(4))


def test_pmap_in_two_programs_at_once() -> None:
    """pmap over some of the devices, while others run another program."""
    x = jnp.arange(4.0)
    first = jax.pmap(lambda t: jaxcoll.psum(t, "i"), axis_name="i", devices=jax.devices()[:4])(x)
    second = jax.pmap(lambda t: jaxcoll.psum(t, "i"), axis_name="i", devices=jax.devices()[4:])(2 * x)
    np.testing.assert_array_equal(first, [6] * 4)
    np.testing.assert_array_equal(second, [12] * 4)


@pytest.mark.parametrize("routed", [False, True])
def test_meshes_of_one_shape_are_told_apart(routed: bool) -> None:
    """A function under one jax.set_mesh and then another: of other devices, or of the same in another order."""
    devices = np.array(jax.devices())
    module = lax if routed else jaxcoll
    cycle = [(i, (i + 1) % 4) for i in range(4)]

    def body(t: Any) -> Any:
        return module.ppermute(t, "a", cycle), jax.grad(lambda u: (module.psum(u * t, "a") ** 2).sum())(t)

    f = jax.jit(lambda x: jax.shard_map(body, in_specs=P("a"), out_specs=P("a"))(x))
    with jaxcoll.enable() if routed else contextlib.nullcontext():
        for order in ([0, 1, 2, 3], [3, 1, 0, 2], [4, 5, 6, 7], [0, 1, 2, 3]):
            with jax.set_mesh(Mesh(devices[order], ("a",))):
                moved, gradient = f(jnp.arange(4.0))
            np.testing.assert_array_equal(moved, [3, 0, 1, 2], err_msg=str(order))
            np.testing.assert_array_equal(gradient, [0, 28, 56, 84], err_msg=str(order))


def test_devices_of_a_shard_map_inside_another() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

    def inner(t: Any) -> Any:
        return jax.shard_map(lambda u: jaxcoll.psum(u, "b"), in_specs=P("b"), out_specs=P(), axis_names={"b"})(t)

    outer = jax.shard_map(inner, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    np.testing.assert_array_equal(jax.jit(outer)(jnp.arange(8.0)), [6, 22])


def test_devices_of_the_arguments() -> None:
    mesh = Mesh(np.array(jax.devices())[[3, 1, 0, 2]], ("a",))
    x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("a")))
    body = lambda t: jaxcoll.ppermute(t, "a", [(i, (i + 1) % 4) for i in range(4)])  # noqa: E731
    f = jax.jit(jax.shard_map(body, mesh=mesh.abstract_mesh, in_specs=P("a"), out_specs=P("a")))
    np.testing.assert_array_equal(f(x), [3, 0, 1, 2])


def test_mesh_from_the_context() -> None:
    """A shard_map that names no mesh gets it, and the devices, from jax.set_mesh."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jnp.arange(8.0)
    f = jax.jit(lambda x: jax.shard_map(lambda t: jaxcoll.psum(t, "b"), in_specs=P(("a", "b")), out_specs=P("a"))(x))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(f(x), [6, 22])


@pytest.mark.parametrize("source", [2, -1])
def test_broadcast_of_what_is_the_same_everywhere(source: int) -> None:
    mesh = cases.mesh_of(a=4)
    f = jax.shard_map(
        lambda w, t: (
            jax.grad(lambda v: (jaxcoll.pbroadcast(v, "a", source) * t).sum())(w),
            jaxcoll.pbroadcast(w, (), 0),
        ),
        mesh=mesh,
        in_specs=(P(), P("a")),
        out_specs=(P(), P()),
    )
    gradient, same = jax.jit(f)(jnp.asarray(3.0), jnp.arange(1.0, 9.0))
    assert float(gradient) == 36.0
    assert float(same) == 3.0
