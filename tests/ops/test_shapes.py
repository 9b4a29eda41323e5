"""Pytrees, empty arrays, scalars, groups of one, groups of indices: how arrays become messages."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxcoll

from . import cases, helpers

EVERY = [name for name in cases.OPS if name != "pbroadcast"]


def both(mesh: Any, f: Any, *xs: Any, check_vma: bool = False) -> list[Any]:
    return [helpers.on_ranks(mesh, functools.partial(f, m), *xs, check_vma=check_vma) for m in cases.MODULES]


def assert_trees_equal(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


TREE = {
    "w": np.arange(8 * 12, dtype=np.float32).reshape(8, 4, 3),
    "b": (np.arange(8 * 4, dtype=np.float32).reshape(8, 4), np.arange(8 * 4, dtype=np.int32).reshape(8, 4)),
    "none": None,
    "list": [np.arange(8 * 4, dtype=np.int32).reshape(8, 4)],
}


@pytest.mark.parametrize(
    "op",
    [
        lambda m, t: m.psum(t, "a"),
        lambda m, t: m.all_gather(t, "a", tiled=True),
        lambda m, t: m.psum_scatter(t, "a", tiled=True),
        lambda m, t: m.all_to_all(t, "a", 0, 0, tiled=True),
        lambda m, t: m.ppermute(t, "a", [(0, 1), (2, 0)]),
    ],
)
def test_a_pytree_is_one_message_per_dtype(op: Any) -> None:
    mesh = cases.mesh_of(a=4, b=2)
    expected, got = both(mesh, op, TREE)
    assert_trees_equal(got, expected)
    text = helpers.lowered(cases.Place(mesh, True).sharded(lambda t: op(jaxcoll, t)), TREE)
    assert helpers.messages(text) == 2
    assert "concatenate" not in text


def test_one_message_survives_vmap_and_differentiation() -> None:
    mesh = cases.mesh_of(a=4, b=2)

    def loss(module: Any, t: Any) -> Any:
        w, b = jax.vmap(lambda w, b: module.psum((w, b), "a"))(t["w"], t["b"][0])
        return jnp.sum(w * w) + jnp.sum(b)

    expected, got = both(mesh, lambda m, t: jax.grad(lambda w: loss(m, {**t, "w": w}))(t["w"]), TREE)
    np.testing.assert_array_equal(got, expected)

    def gradient(t: Any) -> Any:
        return jax.grad(lambda w, b: loss(jaxcoll, {"w": w, "b": (b,)}), (0, 1))(t["w"], t["b"][0])

    text = helpers.lowered(cases.Place(mesh, False).sharded(gradient), TREE)
    assert helpers.messages(text) == 2  # the sum, and (without check_vma) the sum of the cotangents


@pytest.mark.parametrize("name", EVERY)
def test_an_empty_array_has_a_message_that_stays(name: str) -> None:
    # A rank with more than nothing hears of it that the ranks disagree. XLA would drop it, side effects apart.
    op = cases.OPS[name]
    shape = tuple(0 if i == len(op.shape(4)) - 1 else s for i, s in enumerate(op.shape(4)))
    if shape == () or (name == "psum_scatter_tiled" and shape[1] == 0):
        shape = (0,)
        op = cases.OPS["psum"]
    mesh = cases.mesh_of(a=4)
    x = jnp.zeros((4, *shape))
    expected, got = both(mesh, lambda m, t: op.fun(m, t, "a", 4), x)
    assert got.shape == expected.shape
    place = cases.Place(mesh, True)
    text = helpers.lowered(place.sharded(lambda t: op.fun(jaxcoll, t, "a", 4)), x)
    assert helpers.messages(text) == 1
    with_result = place.sharded(lambda t: jnp.sum(op.fun(jaxcoll, t, "a", 4))[None])
    assert "jaxcoll_collective" in (jax.jit(with_result).lower(x).compile().as_text() or "")


def test_empty_leaves_do_not_stop_the_others() -> None:
    mesh = cases.mesh_of(a=4)
    x = {"empty": jnp.zeros((4, 0, 3)), "full": jnp.arange(4.0)}
    expected, got = both(mesh, lambda m, t: m.psum(t, "a"), x)
    assert_trees_equal(got, expected)


@pytest.mark.parametrize("name", EVERY)
def test_a_rank_alone_needs_no_message(name: str) -> None:
    op = cases.OPS[name]
    mesh = cases.mesh_of(a=1, b=4)
    x = cases.whole_numbers((4, *op.shape(1)), jnp.float32, seed=1)
    expected, got = both(mesh, lambda m, t: op.fun(m, t, "a", 1), x)
    np.testing.assert_array_equal(got, expected)
    text = helpers.lowered(cases.Place(mesh, True).sharded(lambda t: op.fun(jaxcoll, t, "a", 1)), x)
    assert helpers.messages(text) == 0


def test_permutation_of_nobody_gives_zeros() -> None:
    for ranks in (1, 4):
        got = helpers.on_ranks(cases.mesh_of(a=ranks), lambda t: jaxcoll.ppermute(t, "a", []), jnp.ones((ranks, 3)))
        np.testing.assert_array_equal(got, np.zeros((ranks, 3)))


def test_negative_indices_and_order_of_pairs() -> None:
    mesh = cases.mesh_of(a=4)
    expected, got = both(mesh, lambda m, t: m.ppermute(t, "a", [(-1, 0), (1, -2)]), jnp.arange(4.0))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(got, [3, 0, 1, 0])


GROUPS = [[0, 2], [3, 1]]


@pytest.mark.parametrize(
    "op",
    [
        lambda m, t: m.psum(t, "a", axis_index_groups=GROUPS),
        lambda m, t: m.pmean(t, "a", axis_index_groups=GROUPS),
        lambda m, t: m.pmax(t, "a", axis_index_groups=GROUPS),
        lambda m, t: m.pmin(t, "a", axis_index_groups=GROUPS),
        lambda m, t: m.all_gather(t, "a", axis_index_groups=GROUPS),
        lambda m, t: m.psum_scatter(t, "a", axis_index_groups=GROUPS),
        lambda m, t: m.all_to_all(t, "a", 0, 1, axis_index_groups=GROUPS, tiled=True),
        lambda m, t: jax.grad(lambda s: jnp.sum(m.psum_scatter(s * s, "a", axis_index_groups=GROUPS) ** 2))(t),
    ],
)
def test_axis_index_groups(op: Any) -> None:
    mesh = cases.mesh_of(a=4, b=2)
    expected, got = both(mesh, op, cases.whole_numbers((8, 2, 3), jnp.float32, seed=2))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", ["psum", "pmax", "pmin"])
def test_groups_of_unequal_size(name: str) -> None:
    mesh = cases.mesh_of(a=8)
    groups = [[0], [5, 1, 3], [2, 4, 6, 7]]
    expected, got = both(
        mesh,
        lambda m, t: getattr(m, name)(t, "a", axis_index_groups=groups),
        cases.whole_numbers((8, 5), jnp.float32, seed=4),
    )
    np.testing.assert_array_equal(got, expected)


def test_devices_of_the_mesh_in_any_order() -> None:
    """A rank is a place in the mesh, not a device number."""
    order = np.random.default_rng(5).permutation(8)
    mesh = jax.sharding.Mesh(np.array(jax.devices())[order].reshape(2, 4), ("a", "b"))
    x = jnp.arange(8.0)
    for axes in ("a", "b", ("a", "b"), ("b", "a")):
        expected, got = both(mesh, lambda m, t, axes=axes: m.all_gather(t, axes), x, check_vma=True)
        np.testing.assert_array_equal(got, expected)


def test_large_array() -> None:
    mesh = cases.mesh_of(a=8)
    x = cases.whole_numbers((8, 300_001), jnp.float32, seed=6)
    expected, got = both(mesh, lambda m, t: m.psum(t, "a"), x)
    np.testing.assert_array_equal(got, expected)


def test_many_calls_in_one_program() -> None:
    """Independent collectives of one program run at the same time, in different orders on different devices."""
    mesh = cases.mesh_of(a=8)
    x = cases.whole_numbers((8, 24, 257), jnp.float32, seed=8)

    def sums(t: Any) -> Any:
        return [jaxcoll.psum(row * (i + 1), "a") for i, row in enumerate(t)]

    program = jax.jit(cases.Place(mesh, True).sharded(sums))
    expected = [np.asarray(x).sum(0)[i] * (i + 1) for i in range(24)]
    for results in [program(x) for _ in range(5)]:
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, np.broadcast_to(wanted, (8, 257)))


def test_result_may_be_claimed_replicated() -> None:
    """psum's result has the type that lets out_specs say that all ranks hold the same."""
    mesh = cases.mesh_of(a=2, b=4)
    total = helpers.one_result(mesh, lambda t: jaxcoll.psum(t, ("a", "b")), jnp.arange(8.0))
    np.testing.assert_array_equal(total, [28])
    gathered = helpers.one_result(
        mesh, lambda t: jaxcoll.all_gather(t, ("a", "b"), tiled=True, to="invarying"), jnp.arange(8.0)
    )
    np.testing.assert_array_equal(gathered, np.arange(8.0))
    with pytest.raises(ValueError, match="out_specs"):
        helpers.one_result(mesh, lambda t: jaxcoll.all_gather(t, ("a", "b"), tiled=True), jnp.arange(8.0))


def test_reduced_type() -> None:
    """all_gather(to="reduced"), and the reduce-scatter that is its gradient."""
    mesh = cases.mesh_of(a=8)

    def gradient(module: Any) -> Any:
        def loss(t: Any) -> Any:
            whole = module.all_gather(t, "a", tiled=True, to="reduced")
            return lax.psum(jnp.sum(whole * lax.axis_index("a")), "a")

        body = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
        return jax.device_get(jax.jit(body)(jnp.arange(16.0)))

    np.testing.assert_array_equal(gradient(jaxcoll), gradient(lax))
