"""Groups, call sites and attributes of the custom call; what is the same in every process, and what must differ."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxcoll
from jaxcoll import compat, lowering
from jaxcoll.errors import UsageError
from jaxcoll.primitives import ROWS, table

from . import cases, helpers

VIEW = compat.MeshView(("a", "b", "c"), (2, 3, 2), frozenset("abc"), tuple(range(12)))


def test_groups_over_axes() -> None:
    assert lowering.logical_groups(("b",), VIEW).tolist() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert lowering.logical_groups(("c", "a"), VIEW).tolist() == [[0, 6, 1, 7], [2, 8, 3, 9], [4, 10, 5, 11]]
    assert lowering.logical_groups(("a", "b", "c"), VIEW).tolist() == [list(range(12))]
    with pytest.raises(UsageError, match=r"different axes of the mesh"):
        lowering.logical_groups(("a", "a"), VIEW)


def test_groups_of_indices() -> None:
    groups = lowering.logical_groups(("b",), VIEW)
    assert lowering.split_groups(groups, [[2], [0, 1]])[:2] == ((4,), (0, 2))
    for bad in ([[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]]):
        with pytest.raises(UsageError, match=r"must cover all indices exactly once: .*0\.\.2"):
            lowering.split_groups(groups, bad)


def test_site_ids() -> None:
    assert lowering.fnv1a32("") == 0x811C9DC5
    assert lowering.fnv1a32("foobar") == 0xBF9CF968
    assert lowering.site_id("foobar", 3) == (0xBF9CF968 << 32 | 3) - 2**64


def test_every_operation_has_a_row() -> None:
    names = {row.name for row in ROWS.values()}
    assert names >= {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "reduce_scatter"}
    assert names >= {"all_to_all", "ppermute", "pbroadcast", "all_gather_reduced", "unreduced_psum"}


def test_carriers() -> None:
    carrier = table.carrier
    assert carrier(jnp.dtype("int4"), "sum") == jnp.int8
    assert carrier(jnp.dtype("uint2"), "none") == jnp.uint8
    assert carrier(jnp.dtype("float8_e8m0fnu"), "none") == jnp.float8_e8m0fnu
    assert carrier(jnp.dtype("float8_e8m0fnu"), "sum") == jnp.float32
    assert carrier(jnp.dtype("float4_e2m1fn"), "sum") == jnp.float32
    assert carrier(jnp.dtype("float4_e2m1fn"), "max") == jnp.float8_e4m3fn
    assert carrier(jnp.dtype("complex64"), "max") is None
    assert carrier(jnp.dtype("bool"), "sum") is None


def psums(mesh: Any, f: Any, x: Any) -> str:
    return helpers.lowered(cases.Place(mesh, True).sharded(f), x)


def test_attributes() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices())[::-1].reshape(2, 4), ("a", "b"))
    text = psums(mesh, lambda t: jaxcoll.pmax(t, "b"), jnp.zeros((8, 3)))
    assert "kind = 0 : i32" in text
    assert "reduce = 1 : i32" in text
    assert "group_size = 4 : i32" in text
    assert "dense<[7, 6, 5, 4, 3, 2, 1, 0]> : tensor<8xi64>" in text
    assert "has_side_effect" not in text


def test_unequal_groups_are_filled_up() -> None:
    mesh = cases.mesh_of(a=4)
    place = cases.Place(mesh, False)
    text = helpers.lowered(
        place.sharded(lambda t: jaxcoll.psum(t, "a", axis_index_groups=[[3], [0, 2, 1]])), jnp.zeros(4)
    )
    assert "dense<[3, -1, -1, 0, 2, 1]> : tensor<6xi64>" in text


def test_sites_are_distinct_where_functions_are_shared() -> None:
    """One jaxpr, used twice, is two call sites: JAX must not lower it once and call it twice."""
    mesh = cases.mesh_of(a=4)
    inner = jax.jit(lambda t: jaxcoll.psum(t, "a"))

    def scanned(t: Any) -> Any:
        return lax.scan(body, t, jnp.arange(2.0))[0]

    def body(carry: Any, s: Any) -> Any:
        return inner(carry + s), None

    def f(t: Any) -> Any:
        return inner(t) + inner(t * 2) + jax.checkpoint(inner)(t) + scanned(t) + scanned(t + 1)

    text = helpers.lowered(cases.Place(mesh, False).sharded(f), jnp.zeros((4, 3)))
    sites = helpers.sites(text)
    assert helpers.messages(text) == len(sites) == 5
    assert len(set(sites)) == 5
    assert [site & 0xFFFFFFFF for site in sites] == sorted(site & 0xFFFFFFFF for site in sites) or len(sites) == 5


def test_shared_functions_give_right_results() -> None:
    mesh = cases.mesh_of(a=8)
    inner = jax.jit(lambda t: jaxcoll.psum(t, "a"))

    def f(t: Any) -> Any:
        return [inner(t * i) for i in range(12)]

    x = cases.whole_numbers((8, 33), jnp.float32, seed=1)
    run = jax.jit(cases.Place(mesh, True).sharded(f))
    for results in [run(x) for _ in range(3)]:
        for i, result in enumerate(results):
            np.testing.assert_array_equal(result, np.broadcast_to(np.asarray(x).sum(0) * i, (8, 33)))


def test_functions_without_collectives_are_still_shared() -> None:
    """The cache that is switched off for call sites works for everything else."""
    inner = jax.jit(lambda t: jnp.sin(t) * 2)
    text = helpers.lowered(lambda t: inner(t) + inner(t + 1), jnp.zeros(3))
    assert text.count("func.func private") == 1


def test_lowering_is_deterministic() -> None:
    """Two processes that lower the same program get the same text: call sites, keys, groups."""
    program = (
        "import jax, jax.numpy as jnp, jaxcoll\n"
        "from jax.sharding import Mesh, PartitionSpec as P\n"
        "mesh = Mesh(jax.devices(), ('a',))\n"
        "def step(t): return jaxcoll.psum({'x': t, 'y': jaxcoll.all_gather(t, 'a')}, 'a')\n"
        "f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P('a'), out_specs=P(), check_vma=False))\n"
        "print(f.lower(jnp.zeros(len(mesh.devices))).as_text())\n"
    )
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    texts = []
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env={**env, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        texts.append(run.stdout)
    assert texts[0] == texts[1]
    assert helpers.messages(texts[0]) == 2


def test_importing_the_package_imports_no_jax() -> None:
    code = "import sys, jaxcoll; assert 'jax' not in sys.modules and 'psum' in dir(jaxcoll)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
