"""THE table: operation x transformation x mesh x check_vma x dtype, jaxcoll against jax.lax, equal to the last bit.

The arrays hold small whole numbers, so that every order of additions gives the same sum, and equality is what is asked.
By default the cases are a covering in which every pair of values meets; `--full` runs the whole product.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from . import cases, covering

FACTORS = {
    "op": list(cases.OPS),
    "transform": list(cases.TRANSFORMS),
    "mesh": list(cases.MESHES),
    "vma": ["vma", "novma"],
    "dtype": ["float32", "int32", "bfloat16"],
}


def valid(case: covering.Case) -> bool:
    """Whether jax.lax itself can do it."""
    op = cases.OPS[case["op"]]
    sizes, axes = cases.MESHES[case["mesh"]]
    if case["transform"] in cases.DERIVATIVES and (case["dtype"] == "int32" or not op.differentiable):
        return False
    if case["op"] == "pmean" and case["dtype"] == "int32":
        return False  # the mean of ints is a float32, which the loops' carries don't take
    if case["transform"] == "pmap" and (len(sizes) > 1 or case["vma"] == "vma"):
        return False
    if case["op"] == "psum_scatter" and case["transform"] == "vmap_inside":
        return False  # jax.lax gets the batch dimension wrong; ours is in test_transforms.py
    return op.any_axis_order or list(axes) == sorted(axes)


PAIRS = covering.pairwise(FACTORS, valid, seed=7)
REST = [c for c in covering.product(FACTORS, valid) if c not in PAIRS]


def name(case: covering.Case) -> str:
    return "-".join(case[factor] for factor in FACTORS)


def outcome(module: Any, case: covering.Case) -> tuple[Any, list[str]]:
    """(what all ranks have at the end, the types that the operation's results had while tracing)."""
    op = cases.OPS[case["op"]]
    sizes, axes = cases.MESHES[case["mesh"]]
    place = cases.Place(cases.mesh_of(**sizes), case["vma"] == "vma")
    n = cases.group_size(case["mesh"])
    x = cases.whole_numbers((math.prod(sizes.values()), *op.shape(n)), jnp.dtype(case["dtype"]), seed=n)
    types: list[str] = []

    def f(t: Any) -> Any:
        y = op.fun(module, t, axes, n)
        types.append(str(jax.typeof(y)))
        return y

    return jax.device_get(cases.TRANSFORMS[case["transform"]](place, f, x)), types


def check(case: covering.Case) -> None:
    (expected, expected_types), (got, got_types) = (outcome(module, case) for module in cases.MODULES)
    assert got_types == expected_types
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("case", PAIRS, ids=name)
def test_pairs(case: covering.Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=name)
def test_rest_of_the_product(case: covering.Case) -> None:
    check(case)


def test_covering_holds_every_pair() -> None:
    factors = {"a": ["1", "2"], "b": ["1", "2", "3"], "c": ["1", "2"]}
    chosen = covering.pairwise(factors, lambda c: c["a"] != c["b"], seed=0)
    held = {(j, v, k, w) for c in chosen for j, v in c.items() for k, w in c.items() if j < k}
    assert held >= {("a", x, "b", y) for x in "12" for y in "123" if x != y}
    assert held >= {("b", x, "c", y) for x in "123" for y in "12"}
    assert len(chosen) < 10
