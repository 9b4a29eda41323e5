"""Bad input: each is an error that says how to mend it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import config
from jaxcoll.errors import ScheduleError, UsageError
from jaxcoll.runtime import probe
from jaxcoll.schedule import Kind, build, save_file

from . import cases, helpers

X = jnp.zeros((4, 4, 3))


def run(f: Any, check_vma: bool = True) -> Any:
    return helpers.on_ranks(cases.mesh_of(a=4), f, X, check_vma=check_vma)


BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("unbound axis", lambda t: jaxcoll.psum(t, "zz"), NameError, r"unbound axis name: zz.*Axes bound here: 'a'"),
    ("one axis of two", lambda t: jaxcoll.all_gather(t, ("a", "q")), NameError, r"unbound axis name: q"),
    ("schedule type", lambda t: jaxcoll.psum(t, "a", schedule=3), UsageError, r"name of a schedule \(a str\) or None"),
    ("deterministic", lambda t: jaxcoll.psum(t, "a", deterministic=1), UsageError, r"must be True or False"),
    ("groups and vma", lambda t: jaxcoll.psum(t, "a", axis_index_groups=[[0, 1], [2, 3]]), UsageError, "check_vma=Fal"),
    ("pmax, groups", lambda t: jaxcoll.pmax(t, "a", axis_index_groups=[[0, 1], [2, 3]]), UsageError, "check_vma=Fal"),
    ("pmean, groups", lambda t: jaxcoll.pmean(t, "a", axis_index_groups=[[0, 1], [2, 3]]), UsageError, "pmean.*_vma=F"),
    ("perm type", lambda t: jaxcoll.ppermute(t, "a", {0: 1}), TypeError, r"must be a list or a tuple"),
    ("perm twice", lambda t: jaxcoll.ppermute(t, "a", [(0, 1), (0, 2)]), UsageError, r"must be unique, got"),
    ("perm range", lambda t: jaxcoll.ppermute(t, "a", [(0, 4)]), UsageError, r"destination of `perm` 4 .* 0\.\.3"),
    ("source type", lambda t: jaxcoll.pbroadcast(t, "a", 1.5), UsageError, r"`source` must be an int"),
    (
        "source shape",
        lambda t: jaxcoll.pbroadcast(t, "a", jnp.array([0, 1])),
        UsageError,
        r"`source` must be.*int32\[2\]",
    ),
    (
        "source dtype",
        lambda t: jaxcoll.pbroadcast(t, "a", t[0, 0]),
        UsageError,
        r"`source` must be an int.*float32\[\]",
    ),
    (
        "source bool",
        lambda t: jaxcoll.pbroadcast(t, "a", jnp.bool_(True)),
        UsageError,
        r"`source` must be an int.*bool\[\]",
    ),
    ("source range", lambda t: jaxcoll.pbroadcast(t, "a", 4), UsageError, r"`source` of pbroadcast 4 .* 0\.\.3"),
    (
        "source range, gradient",
        lambda t: jax.grad(lambda s: jnp.sum(jaxcoll.pbroadcast(s, "a", -5)))(t),
        UsageError,
        r"`source` of pbroadcast -5 .* 0\.\.3",
    ),
    ("scatter, tiled", lambda t: jaxcoll.psum_scatter(t[:3], "a", tiled=True), ValueError, "must be divisible by"),
    ("scatter", lambda t: jaxcoll.psum_scatter(t[:3], "a"), ValueError, r"size 3 must match shard count 4"),
    ("scatter dim", lambda t: jaxcoll.psum_scatter(t, "a", scatter_dimension=2), UsageError, "not a dimension of an"),
    ("all_to_all", lambda t: jaxcoll.all_to_all(t, "a", 1, 0), ValueError, "4 and 3 respectively"),
    ("all_to_all, tiled", lambda t: jaxcoll.all_to_all(t, "a", 1, 0, tiled=True), ValueError, "has to be divisible by"),
    ("all_to_all axis", lambda t: jaxcoll.all_to_all(t, "a", 5, 0), UsageError, "split_axis 5 is not a dimension"),
    ("to", lambda t: jaxcoll.all_gather(t, "a", to="nowhere"), ValueError, "unexpected `to` value"),
    (
        "pmax grad",
        lambda t: jax.grad(lambda s: jnp.sum(jaxcoll.pmax(s, "a")))(t),
        NotImplementedError,
        "for 'pmax' not",
    ),
]


@pytest.mark.parametrize(("f", "kind", "text"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_calls(f: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.compile(text, re.DOTALL)):
        run(f)


def test_groups() -> None:
    for f in (
        lambda t: jaxcoll.psum(t, "a", axis_index_groups=[[0, 1], [2]]),
        lambda t: jaxcoll.pmax(t, "a", axis_index_groups=[[0, 1]]),
        lambda t: jaxcoll.all_gather(t, "a", axis_index_groups=[[0, 1], [1, 2]]),
        lambda t: jaxcoll.pmean(t, "a", axis_index_groups=[[0, 1], [2]]),
        lambda t: t + jaxcoll.psum(1, "a", axis_index_groups=[[0, 1], [2]]),
    ):
        with pytest.raises(ValueError, match="must cover all indices exactly once"):
            run(f, check_vma=False)
    with pytest.raises(UsageError, match="of the same size"):
        run(lambda t: jaxcoll.all_gather(t, "a", axis_index_groups=[[0, 1, 2], [3]]), check_vma=False)


def test_outside_of_a_mesh() -> None:
    with pytest.raises(NameError, match=r"inside of\s+jax.shard_map.*Axes bound here: none"):
        jaxcoll.psum(jnp.zeros(3), "a")


def test_unknown_schedule_lists_the_known() -> None:
    with pytest.raises(ScheduleError, match=r"(?s)no_such.*ring"):
        run(lambda t: jaxcoll.psum(t, "a", schedule="no_such"))


def test_schedule_of_another_collective() -> None:
    with pytest.raises(ScheduleError, match="permute"):
        run(lambda t: jaxcoll.psum(t, "a", schedule="permute"))


def test_a_file_made_for_another_root_or_permutation_is_refused(tmp_path: Path) -> None:
    broadcast, permute = str(tmp_path / "broadcast.json"), str(tmp_path / "permute.json")
    save_file(build("binomial", Kind.BROADCAST, 4, root=2), broadcast)
    save_file(build("permute", Kind.PERMUTE, 4, perm=[(0, 1), (1, 0)]), permute)
    with pytest.raises(ScheduleError, match="a schedule with root 2; this call's is 1.*root=1"):
        run(lambda t: jaxcoll.pbroadcast(t, "a", 1, schedule=broadcast))
    run(lambda t: jaxcoll.pbroadcast(t, "a", 2, schedule=broadcast))
    with pytest.raises(ScheduleError, match=r"for the pairs \[\(0, 1\), \(1, 0\)\]; this call's are \[\(2, 3\)\]"):
        run(lambda t: jaxcoll.ppermute(t, "a", [(2, 3)], schedule=permute))
    run(lambda t: jaxcoll.ppermute(t, "a", [(1, 0), (0, 1)], schedule=permute))


def test_a_file_whose_ranks_add_in_different_orders_is_refused(tmp_path: Path) -> None:
    file, cured = str(tmp_path / "apart.json"), str(tmp_path / "cured.json")
    one_shot = build("one_shot", Kind.ALL_REDUCE, 4)
    save_file(dataclasses.replace(one_shot, canonical=False), file)
    save_file(one_shot, cured)
    with pytest.raises(ScheduleError, match='add in different orders.*write "canonical": true into it'):
        run(lambda t: jaxcoll.psum(t, "a", schedule=file))
    run(lambda t: jaxcoll.psum(t, "a", schedule=cured))


def test_deterministic_does_not_choose_by_what_was_measured() -> None:
    fast, slow = (probe.Speed(alpha, beta, 1e-10, 4, 2, False) for alpha, beta in ((1e-6, 1e-10), (1e-3, 3e-9)))
    assert fast != slow
    assert probe.nominal(fast) == probe.nominal(slow)
    far = dataclasses.replace(fast, remote=True, local_ranks=1)
    assert probe.nominal(far) != probe.nominal(fast), "the layout counts"


def test_a_file_for_every_kind_says_how_to_use_it_for_its_own(tmp_path: Path) -> None:
    file = str(tmp_path / "ring.json")
    save_file(build("ring", Kind.ALL_REDUCE, 4), file)
    with config.override(schedule=file):
        run(lambda t: jaxcoll.psum(t, "a"))
        with pytest.raises(ScheduleError, match="holds a schedule for all_reduce.*JAXCOLL_SCHEDULE=kind=file"):
            run(lambda t: jaxcoll.all_gather(t, "a"))


def test_explain_counts_a_name_for_every_kind_where_it_can() -> None:
    with config.override(schedule="dual_tree"):
        assert "JAXCOLL_SCHEDULE asks for dual_tree" in jaxcoll.explain("psum", "4M")
        assert "asks for" not in jaxcoll.explain("all_to_all", "4M")
    with pytest.raises(UsageError, match=r"devices=\[99\]: name different devices of this job"):
        jaxcoll.explain("psum", "4M", devices=[99])


def test_explain_refuses_what_a_program_would(tmp_path: Path) -> None:
    good = build("ring", Kind.ALL_REDUCE, len(jax.devices()))
    cut = str(tmp_path / "cut.json")
    save_file(dataclasses.replace(good, graphs=good.graphs[:-1]), cut)
    for schedule, says in (("bogus", "unknown schedule 'bogus'"), (cut, "missing")):
        with config.override(schedule=schedule):
            message = rf"{says}[^@]*\(JAXCOLL_SCHEDULE asks for it\)"
            with pytest.raises(ScheduleError, match=message):
                jaxcoll.explain("psum", "4M")
            assert "bogus" not in jaxcoll.explain("psum", "4M", devices=[0])
    with config.override(schedule="bogus"), pytest.raises(ScheduleError, match=r"'bogus'.*\(JAXCOLL_SCHEDULE asks"):
        run(lambda t: jaxcoll.psum(t, "a"))


@pytest.mark.parametrize("size", ["4Q", -1])
def test_explain_refuses_a_size_that_is_none(size: int | str) -> None:
    with pytest.raises(UsageError, match="is not a size|can't be negative"):
        jaxcoll.explain("psum", size)


def test_gradient_of_a_call_with_a_schedule() -> None:
    """The gradient of an all_gather is a reduce-scatter, for which a schedule of all_gather only isn't asked."""
    run(lambda t: jax.grad(lambda s: jnp.sum(jaxcoll.all_gather(s * s, "a", schedule="recursive_doubling")))(t))


def test_axes_in_another_order_than_the_mesh() -> None:
    mesh = cases.mesh_of(a=2, b=2)
    with pytest.raises(UsageError, match="in the order of the mesh"):
        helpers.on_ranks(mesh, lambda t: jaxcoll.ppermute(t, ("b", "a"), [(0, 1)]), jnp.zeros(4))


@pytest.mark.parametrize("axes", [("v", "a"), ("a", "v"), ("v", "w")])
@pytest.mark.parametrize("f", [lambda t, a: jaxcoll.ppermute(t, a, [(0, 1)]), lambda t, a: jaxcoll.pbroadcast(t, a, 1)])
def test_a_vmapped_axis_among_others(axes: Any, f: Any) -> None:
    with pytest.raises(UsageError, match=r"one of these axes is that of a jax\.vmap.*for each axis by itself"):
        run(
            lambda t: jax.vmap(jax.vmap(lambda s: f(s, axes), axis_name="w"), axis_name="v")(t),
            check_vma=False,
        )


@pytest.mark.parametrize(
    ("perm", "text"), [([(0, 1), (0, 2)], "must be unique"), ([(0, 3)], r"destination of `perm` 3 .* 0\.\.2")]
)
def test_permutations_that_a_vmapped_axis_has_not(perm: list[tuple[int, int]], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        jax.vmap(lambda s: jaxcoll.ppermute(s, "v", perm), axis_name="v")(jnp.zeros(3))


@pytest.mark.parametrize("source", [3, -4])
def test_a_source_that_a_vmapped_axis_has_not(source: int) -> None:
    with pytest.raises(UsageError, match=rf"`source` of pbroadcast {source} .* 0\.\.2"):
        jax.vmap(lambda s: jaxcoll.pbroadcast(s, "v", source), axis_name="v")(jnp.zeros(3))


def test_axes_left_to_the_compiler() -> None:
    mesh = cases.mesh_of(a=2, b=2)
    f = jax.shard_map(
        lambda t: jaxcoll.psum(t, "a"), mesh=mesh, in_specs=P("a"), out_specs=P(), axis_names=frozenset({"a"})
    )
    with pytest.raises(UsageError, match=r"leaves the mesh axes \('b',\) to the\s+compiler.*Make all axes manual"):
        jax.jit(f)(jnp.zeros(4))


def test_axes_of_one_may_be_left_to_the_compiler() -> None:
    mesh = cases.mesh_of(a=4, b=1)
    f = jax.shard_map(
        lambda t: jaxcoll.psum(t, "a"), mesh=mesh, in_specs=P("a"), out_specs=P(), axis_names=frozenset({"a"})
    )
    assert jax.jit(f)(jnp.arange(4.0)).tolist() == [6.0]
