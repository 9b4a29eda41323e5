"""enable(): programs that say jax.lax and know nothing of jaxcoll."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import compat
from jaxcoll.errors import UsageError
from jaxcoll.primitives import ROWS

from . import cases, helpers

XLA_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broad")


@pytest.fixture(autouse=True)
def _disabled_at_the_end() -> Iterator[None]:
    yield
    if jaxcoll.is_enabled():
        jaxcoll.disable()


def left_to_xla(text: str) -> list[str]:
    return [name for name in XLA_COLLECTIVES if f"stablehlo.{name}" in text]


def everything(t: Any) -> Any:
    """A program with every jax.lax collective, and sums that only differentiation writes."""

    def loss(w: Any) -> Any:
        y = lax.all_gather(w * t, "a", tiled=True)
        z = lax.psum_scatter(y, "a", tiled=True)
        q = lax.all_to_all(y, "a", 0, 0, tiled=True)
        p = lax.ppermute(z, "a", [(0, 1), (1, 2), (2, 3), (3, 0)])
        m = lax.stop_gradient(lax.pmax(t, "a") - lax.pmin(t, "a"))
        return lax.pmean(jnp.sum(z * p) + jnp.sum(q) + jnp.sum(m), "a")

    return jax.value_and_grad(loss)(jnp.ones_like(t) * 2)


def test_an_unmodified_program() -> None:
    mesh = cases.mesh_of(a=4)
    x = cases.whole_numbers((4, 4), jnp.float32, seed=1)
    program = cases.Place(mesh, True).sharded(everything)
    expected = jax.device_get(jax.jit(program)(x))
    with jaxcoll.enable():
        text = helpers.lowered(program, x)
        got = jax.device_get(jax.jit(program)(x))
    assert left_to_xla(text) == []
    assert helpers.messages(text) >= 7
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_sum_that_autodiff_inserts() -> None:
    """The gradient of a weight common to all ranks: no psum in the source, one in the program."""
    mesh = cases.mesh_of(a=4)

    def gradient(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(x * w))(w)

    f = jax.shard_map(gradient, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    w, x = jnp.float32(1), jnp.arange(8.0)
    with jaxcoll.enable():
        text = helpers.lowered(f, w, x)
        assert jax.jit(f)(w, x) == 28
    assert helpers.messages(text) == 1
    assert left_to_xla(text) == []


@pytest.mark.parametrize("transform", ["vmap_inside", "grad_outside", "remat", "scan", "eager", "pmap"])
def test_transformations(transform: str) -> None:
    place = cases.Place(cases.mesh_of(a=4), transform != "pmap")
    x = cases.whole_numbers((4, 8, 2), jnp.float32, seed=2)

    def op(t: Any) -> Any:
        return lax.psum_scatter(lax.psum(t, "a"), "a", tiled=True)

    expected = jax.device_get(cases.TRANSFORMS[transform](place, op, x))
    with jaxcoll.enable():
        got = jax.device_get(cases.TRANSFORMS[transform](place, op, x))
    np.testing.assert_array_equal(got, expected)


def test_broadcast_which_lax_lacks_on_the_cpu() -> None:
    mesh = cases.mesh_of(a=4)
    run = functools.partial(helpers.on_ranks, mesh, lambda t: lax.pbroadcast(t, "a", 2), jnp.arange(4.0))
    with jaxcoll.enable():
        np.testing.assert_array_equal(run(), [2.0] * 4)
    with pytest.raises(NotImplementedError):
        run()


def rules() -> dict[Any, Any]:
    return {
        (base, platform): compat.lowering_rule(base, platform) for base in ROWS for platform in ("cpu", "cuda", "tpu")
    }


def test_rules_are_restored_exactly() -> None:
    before = rules()
    with jaxcoll.enable():
        assert {key for key, rule in rules().items() if rule is not before[key]} == {
            key for key in before if key[1] != "tpu"
        }
    assert rules() == before


def test_switching_back_and_forth_compiles_nothing_twice() -> None:
    mesh = cases.mesh_of(a=4)
    f = jax.jit(cases.Place(mesh, True).sharded(lambda t: lax.psum(t, "a") + 1))
    x = jnp.arange(4.0)

    def kinds() -> str:
        text = f.lower(x).as_text()
        return "ours" if helpers.messages(text) else "xla"

    jax.block_until_ready(f(x))
    assert kinds() == "xla"
    with jaxcoll.enable():
        assert f(x).tolist() == [7.0] * 4
        assert kinds() == "ours"
    with helpers.Compilations().counting() as compilations:
        assert f(x).tolist() == [7.0] * 4
        assert kinds() == "xla"
        with jaxcoll.enable():
            assert f(x).tolist() == [7.0] * 4
            assert kinds() == "ours"
    assert compilations.count == 0


def test_what_jaxcoll_cannot_do_stays_with_xla() -> None:
    mesh = cases.mesh_of(a=2, b=2)
    partly = jax.shard_map(
        lambda t: lax.psum(t, "a"), mesh=mesh, in_specs=P("a"), out_specs=P(), axis_names=frozenset({"a"})
    )
    with jaxcoll.enable():
        assert jax.jit(partly)(jnp.arange(4.0)).tolist() == [2.0, 4.0]
        text = helpers.lowered(partly, jnp.arange(4.0))
    assert helpers.messages(text) == 0


def test_groups_that_lax_types_wrongly_are_refused() -> None:
    mesh = cases.mesh_of(a=4)
    f = lambda t: lax.pmax(t, "a", axis_index_groups=[[0, 1], [2, 3]])  # noqa: E731
    with jaxcoll.enable():
        with pytest.raises(UsageError, match="check_vma=False"):
            helpers.on_ranks(mesh, f, jnp.arange(4.0))
        got = helpers.on_ranks(mesh, f, jnp.arange(4.0), check_vma=False)
    np.testing.assert_array_equal(got, [1, 1, 3, 3])


def test_our_own_operations_are_not_disturbed() -> None:
    mesh = cases.mesh_of(a=4)
    with jaxcoll.enable():
        got = helpers.on_ranks(mesh, lambda t: jaxcoll.psum(t, "a") + lax.psum(t, "a"), jnp.arange(4.0))
    np.testing.assert_array_equal(got, [12.0] * 4)


def test_misuse() -> None:
    with pytest.raises(UsageError, match=r"not enabled; call jaxcoll\.enable\(\)"):
        jaxcoll.disable()
    jaxcoll.enable()
    with pytest.raises(UsageError, match=r"enabled already; call jaxcoll\.disable\(\) first"):
        jaxcoll.enable()
    jaxcoll.disable()
    with pytest.raises(UsageError, match="name of a schedule"):
        jaxcoll.enable(schedule=3)  # type: ignore[arg-type]
    assert not jaxcoll.is_enabled()


def test_leaves_when_the_block_fails() -> None:
    with pytest.raises(ZeroDivisionError), jaxcoll.enable():
        raise ZeroDivisionError
    assert not jaxcoll.is_enabled()


def test_nothing_else_is_touched() -> None:
    """Rules of primitives that aren't collectives, and of platforms that we don't run on, stay what they were."""
    with jaxcoll.enable():
        assert mlir.lower_fun is not None
        text = helpers.lowered(lambda t: jnp.sin(t) + 1, jnp.zeros(3))
    assert helpers.TARGET not in text
