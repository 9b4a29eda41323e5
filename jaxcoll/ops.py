"""The public operations: `jax.lax`'s collectives, over jaxcoll's schedules.

Each function has the name, arguments, defaults, result and gradient of its `jax.lax` namesake, and two keyword-only
arguments more:

  schedule: name of the schedule to run, or None: jaxcoll chooses by size, rank count and transport. A name that is not
    known, or can't do this collective over this many ranks, raises `jaxcoll.errors.ScheduleError`, which lists those
    that can.
  deterministic: True forbids what changes the order of additions between two runs of a program, such as swapping ranks,
    or choosing a schedule by the speeds that were measured at the start.

All take pytrees; the leaves of one dtype travel in one message. All must be called where the axis names are bound:
inside of `jax.shard_map` (every mesh axis manual), `jax.pmap`, or `jax.vmap` with an `axis_name`.

Errors, raised while the program is traced and lowered: UnboundAxisError (a NameError) for an axis that nothing binds;
UsageError (a ValueError) for another argument that can't be used; `jaxcoll.lowering.CannotLower` (a UsageError) for
what jaxcoll can't run, such as the maximum of complex numbers; ScheduleError, see `schedule`; TypeError for a `perm`
that is no list or tuple; what `jax.lax` itself raises. While it runs, of a lost rank or a deadline:
jax.errors.JaxRuntimeError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcoll import compat
from jaxcoll import lowering as _lowering
from jaxcoll.errors import UsageError
from jaxcoll.primitives import Options
from jaxcoll.primitives.define import call
from jaxcoll.primitives.table import convert, normalised
from jaxcoll.schedule.ir import Kind

T = TypeVar("T")
AxisName = Any  # a hashable name, an int for a positional axis (reductions only), or a tuple of them
Groups = Sequence[Sequence[int]] | None


class UnboundAxisError(UsageError, NameError):
    """A collective over an axis name that nothing around it binds. A NameError, as in `jax.lax`."""


def _axes(axis_name: AxisName, function: str) -> AxisName:
    """`axis_name` as jax.lax takes it everywhere (a name, or a tuple), its names known to be bound."""
    axis_name = tuple(axis_name) if isinstance(axis_name, list) else axis_name
    for name in axis_name if isinstance(axis_name, tuple) else (axis_name,):
        if not isinstance(name, int) and compat.axis_size(name) is None:
            bound = ", ".join(repr(a) for a in compat.bound_axes()) or "none"
            raise UnboundAxisError(
                f"unbound axis name: {name}. jaxcoll.{function} must be called where this axis is bound: inside of "
                f"jax.shard_map over a mesh with an axis {name!r}, or of jax.vmap or jax.pmap with axis_name={name!r}. "
                f"Axes bound here: {bound}."
            )
    return axis_name


def _map(fun: Callable[[Any], Any], x: T, options: Options) -> T:
    leaves, tree = jax.tree.flatten(x)
    return jax.tree.unflatten(tree, call(fun, leaves, options))


def _sum(x: T, axes: AxisName, groups: Groups, options: Options) -> T:
    """Like `_map`, for the sums, which fold over a constant: psum(1, axis) is the axis' size."""
    leaves, tree = jax.tree.flatten(x)
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
    sent = call(lambda leaf: lax.psum(leaf, axes, axis_index_groups=groups), [leaves[i] for i in traced], options)
    sums = dict(zip(traced, sent, strict=True))
    return jax.tree.unflatten(
        tree, [sums[i] if i in sums else _constant_sum(leaf, axes, groups) for i, leaf in enumerate(leaves)]
    )


def _unequal(groups: Groups) -> bool:
    return groups is not None and len({len(group) for group in groups}) > 1


def _own_group_size(axes: AxisName, groups: Groups) -> jax.Array:
    """Number of ranks in the group that this rank is in, an int32 scalar."""
    sizes = np.zeros(lax.axis_size(axes), np.int32)
    for group in _lowering.split_groups(np.arange(len(sizes))[None], groups):
        sizes[list(group)] = len(group)
    return jnp.asarray(sizes)[lax.axis_index(axes)]


def _constant_sum(leaf: Any, axes: AxisName, groups: Groups) -> Any:
    """The sum of what is the same on all ranks. (`jax.lax` takes all groups to be of the first one's size.)"""
    if not _unequal(groups):
        return lax.psum(leaf, axes, axis_index_groups=groups)
    leaf = jnp.asarray(leaf, jnp.int32 if jnp.result_type(leaf) == jnp.bool_ else None)
    return leaf * convert(_own_group_size(axes, groups), leaf.dtype)


def _check_groups(name: str, groups: Groups) -> None:
    if groups is not None:
        _lowering.refuse_groups_with_check_vma(name)


def _dimension(function: str, argument: str, value: int, leaf: Any) -> int:
    """`value` as a dimension of `leaf`, counted from the front."""
    rank = len(leaf.shape)
    if not -rank <= value < rank:
        raise UsageError(f"{function}: {argument} {value} is not a dimension of an array of shape {leaf.shape}")
    return value % rank


def psum(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    schedule: str | None = None,
    deterministic: bool = False,
) -> T:
    """Sum over the ranks along `axis_name`, the same on all of them, to the bit.

    Args:
      x: pytree of arrays of any shape; bools are summed as int32. Constants fold: `psum(1, axis)` is the axis' size, or
        that of the rank's own group: an int, or where the groups differ in size an array, which no shape can depend on.
      axis_name: an axis, or a tuple of axes; ints are positional axes (only with check_vma=False).
      axis_index_groups: lists of axis indices, which must hold every index once; each group gets its own sum. The
        groups may be of different sizes. Needs check_vma=False.
      schedule, deterministic: see the module's docstring.

    Returns:
      the pytree, each leaf with the shape and dtype of its argument (int32 for bools). float16, bfloat16 and float8 are
      summed in float32 and rounded once. Denormal numbers are kept (`jax.lax` on CPUs takes them for zeros).
    """
    _check_groups("psum", axis_index_groups)
    axes = _axes(axis_name, "psum")
    options = Options.checked(schedule, deterministic)
    return _sum(x, axes, axis_index_groups, options)


def pmean(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    schedule: str | None = None,
    deterministic: bool = False,
) -> T:
    """Mean over the ranks along `axis_name`: `psum`, divided by the number of ranks. Arguments as for `psum`.

    Where groups differ in size it divides by that of the rank's own one, and `jax.lax.pmean` by that of the first.

    Returns:
      the pytree, each leaf with the shape and dtype of its argument (float32 for bools and for integers of up to 32
      bits).
    """
    _check_groups("pmean", axis_index_groups)
    axes = _axes(axis_name, "pmean")
    options = Options.checked(schedule, deterministic)
    total = _sum(x, axes, axis_index_groups, options)
    size = _constant_sum(1, axes, axis_index_groups)
    return jax.tree.map(lambda leaf: leaf / size, total)


def pmax(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    schedule: str | None = None,
    deterministic: bool = False,
) -> T:
    """Maximum over the ranks along `axis_name`. Arguments as for `psum`; like `jax.lax.pmax`, it has no derivative.

    A NaN of any rank makes the result NaN, on every platform. (XLA on the CPU leaves NaNs out: there `jax.lax.pmax`
    gives the maximum of the others, and -inf where all are NaN.)

    With axis_index_groups and check_vma=True it raises, where `jax.lax.pmax` hands the first group's result to all.

    Returns:
      the pytree, each leaf with the shape and dtype of its argument.
    """
    _check_groups("pmax", axis_index_groups)
    axes = _axes(axis_name, "pmax")
    options = Options.checked(schedule, deterministic)
    return _map(lambda leaf: lax.pmax(leaf, axes, axis_index_groups=axis_index_groups), x, options)


def pmin(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    schedule: str | None = None,
    deterministic: bool = False,
) -> T:
    """Minimum over the ranks along `axis_name`. Arguments, result and errors as for `pmax`."""
    _check_groups("pmin", axis_index_groups)
    axes = _axes(axis_name, "pmin")
    options = Options.checked(schedule, deterministic)
    return _map(lambda leaf: lax.pmin(leaf, axes, axis_index_groups=axis_index_groups), x, options)


def all_gather(
    x: T,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    schedule: str | None = None,
    deterministic: bool = False,
) -> T:
    """The arrays of all ranks along `axis_name`, in the order of their indices.

    Args:
      x: pytree of arrays.
      axis_name: an axis, or a tuple of axes (the last one fastest).
      axis_index_groups: lists of axis indices, all of one size, which must hold every index once.
      axis: where the ranks' arrays are put: stacked along a new dimension, or, tiled, one behind the other along this
      one.
      tiled: see `axis`.
      to: "varying", or "invarying" for a result that check_vma takes to be the same on all ranks, or "reduced".
      schedule, deterministic: see the module's docstring.

    Returns:
      the pytree, each leaf with its dtype and, of n ranks, a new dimension of size n at `axis`; tiled, with the size of
      that dimension multiplied by n.
    """
    axes = _axes(axis_name, "all_gather")
    options = Options.checked(schedule, deterministic)
    return _map(
        lambda leaf: lax.all_gather(leaf, axes, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, to=to),
        x,
        options,
    )


def psum_scatter(
    x: T,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    schedule: str | None = None,
    deterministic: bool = False,
) -> T:
    """The sum over the ranks along `axis_name`, of which each rank keeps its own part of `scatter_dimension`.

    Untiled, that dimension's size must be the number of ranks, and it is removed; tiled, its size must be a multiple
    of it, and is divided. Other arguments as for `all_gather`.

    Returns:
      the pytree, each leaf with its dtype, and its shape but for that dimension.
    """
    axes = _axes(axis_name, "psum_scatter")
    options = Options.checked(schedule, deterministic)
    if axes == ():
        return x

    def one(leaf: Any) -> Any:
        dim = _dimension("psum_scatter", "scatter_dimension", scatter_dimension, leaf)
        size = lax.psum(1, axes, axis_index_groups=axis_index_groups)
        if not tiled and leaf.shape[dim] != size:
            raise UsageError(
                f"reduce_scatter operand scatter dimension size {leaf.shape[dim]} must match shard count {size}"
            )
        # Untiled by way of tiled: JAX's rule for vmap misplaces a batch dimension that stands behind `dim`.
        out = lax.psum_scatter(leaf, axes, scatter_dimension=dim, axis_index_groups=axis_index_groups, tiled=True)
        return out if tiled else lax.squeeze(out, (dim,))

    return _map(one, x, options)


def all_to_all(
    x: T,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    schedule: str | None = None,
    deterministic: bool = False,
) -> T:
    """Cuts `split_axis` into one part for each rank along `axis_name`, and joins what arrives along `concat_axis`.

    Untiled, split_axis' size must be the number of ranks; it is removed, and a dimension of that size is put in at
    concat_axis. Tiled, split_axis is divided by the number of ranks and concat_axis multiplied by it. Other arguments
    as for `all_gather`.

    Returns:
      the pytree, each leaf with its dtype, and its shape but for those two dimensions.
    """
    axes = _axes(axis_name, "all_to_all")
    options = Options.checked(schedule, deterministic)

    def tiled_one(leaf: Any, split: int, concat: int) -> Any:
        return lax.all_to_all(leaf, axes, split, concat, axis_index_groups=axis_index_groups, tiled=True)

    def one(leaf: Any) -> Any:
        split = _dimension("all_to_all", "split_axis", split_axis, leaf)
        concat = _dimension("all_to_all", "concat_axis", concat_axis, leaf)
        if tiled:
            return tiled_one(leaf, split, concat)
        size = lax.psum(1, axes, axis_index_groups=axis_index_groups)
        if leaf.shape[split] != size:
            raise UsageError(
                "all_to_all requires the size of the mapped axis axis_name to equal x.shape[split_axis], but they are "
                f"{size} and {leaf.shape[split]} respectively."
            )
        if split == concat:
            return tiled_one(leaf, split, concat)
        # By way of the tiled form: JAX's transpose of the untiled one fails where the two axes differ.
        concat += split < concat
        split += concat <= split
        return lax.squeeze(tiled_one(lax.expand_dims(leaf, (concat,)), split, concat), (split,))

    return _map(one, x, options)


def ppermute(
    x: T,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    schedule: str | None = None,
    deterministic: bool = False,
) -> T:
    """Sends the arrays of the ranks along `axis_name` by the (source, destination) pairs in `perm`.

    No index may be twice a source, or twice a destination. Ranks that are no destination get zeros. The axis of a
    jax.vmap can't stand in a tuple with others: then it raises UsageError.

    Returns:
      the pytree, each leaf with the shape and dtype of its argument.
    """
    if not isinstance(perm, (list, tuple)):
        raise TypeError(f"`perm` passed to `jaxcoll.ppermute` must be a list or a tuple. Got perm of type {type(perm)}")
    axes = _axes(axis_name, "ppermute")
    options = Options.checked(schedule, deterministic)
    return _map(lambda leaf: lax.ppermute(leaf, axes, perm), x, options)


def pbroadcast(
    x: T,
    axis_name: AxisName,
    source: int | jax.Array,
    *,
    schedule: str | None = None,
    deterministic: bool = False,
) -> T:
    """The arrays of the rank with index `source` along `axis_name`, on all ranks.

    Unlike `jax.lax.pbroadcast` it works on the CPU too. `source` is an int, or an int scalar known only when the
    program runs, and is the same on all ranks; then a sum does the work, which moves twice the data, and which takes
    subnormal numbers for zeros where XLA does. A negative `source` counts from the end. One outside of the axis raises
    UsageError, or, if it is known only when the program runs, makes all results zero. With a known `source` the axis of
    a jax.vmap can't stand in a tuple with others.

    Returns:
      the pytree, each leaf with the shape and dtype of its argument.
    """
    axes = _axes(axis_name, "pbroadcast")
    options = Options.checked(schedule, deterministic)
    _check_source(source)
    if isinstance(source, jax.Array):
        options = options.for_kind(Kind.BROADCAST, Kind.ALL_REDUCE)
        return _map(lambda leaf: _broadcast_by_sum(leaf, axes, source), x, options)
    # A tuple always: JAX takes a name apart into its letters here.
    named = axes if isinstance(axes, tuple) else (axes,)
    if not named:
        return x
    index = normalised(source, lax.axis_size(axes), "`source` of pbroadcast")
    return _map(lambda leaf: lax.pbroadcast(_varying(leaf, named), named, index), x, options)


def _varying(leaf: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """The leaf, typed as what may differ along `axes`: JAX's rule takes no other, and speaks of ppermute."""
    same = tuple(a for a in axes if a not in compat.varying_axes(leaf)) if compat.check_vma() else ()
    return lax.pcast(leaf, same, to="varying") if same else leaf


def _check_source(source: Any) -> None:
    if isinstance(source, jax.Array):
        valid, given = source.shape == () and jnp.issubdtype(source.dtype, jnp.integer), str(jax.typeof(source))
    else:
        valid, given = isinstance(source, (int, np.integer)) and not isinstance(source, bool), repr(source)
    if not valid:
        raise UsageError(f"pbroadcast: `source` must be an int or an int scalar, the index of a rank, not {given}")


def _broadcast_by_sum(leaf: jax.Array, axes: AxisName, source: jax.Array) -> jax.Array:
    if leaf.dtype == jnp.float8_e8m0fnu:  # no zero to add; its bits have one
        bits = _broadcast_by_sum(lax.bitcast_convert_type(leaf, jnp.uint8), axes, source)
        return lax.bitcast_convert_type(bits, leaf.dtype)
    rank, size = lax.axis_index(axes), lax.axis_size(axes)
    is_source = (source == rank) | (source == rank - size)
    total = lax.psum(jnp.where(is_source, leaf, _nothing(leaf)), axes).astype(leaf.dtype)
    return lax.pcast(total, axes, to="varying") if compat.check_vma() else total


def _nothing(x: jax.Array) -> jax.Array:
    """What can be added to any x: it stays x, the sign of zero included.

    But NaNs stay NaNs only, and XLA's threads take subnormal numbers for zeros.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.full_like(x, complex(-0.0, -0.0))
    return jnp.full_like(x, -0.0 if jnp.issubdtype(x.dtype, jnp.floating) else 0)
