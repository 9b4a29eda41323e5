"""From a collective primitive to one custom call: groups, blocks, attributes.

Everything that is not communication is plain HLO around the call: positional axes are reduced, the split dimension is
brought to the front, int4 is widened, groups of one are answered without a call. The call itself holds
only numbers that are the same in every process that lowers the same program (kind, reduction, call site, groups, the
key of the schedule set), so it can be cached on disk and never needs to change when a schedule does.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jaxcoll import compat
from jaxcoll.errors import UsageError
from jaxcoll.primitives import ROWS, Options, Row
from jaxcoll.primitives.define import OURS
from jaxcoll.primitives.table import carrier, convert, normalised, permutation
from jaxcoll.schedule.ir import Kind

PLATFORMS = ("cpu", "cuda")
REDUCE_CODES = {"sum": 0, "max": 1, "min": 2, "prod": 3, "none": 4}
MANY_BLOCKS = (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
NO_DEVICE = -1  # fills the rows of `devices` where groups are of unequal size

Groups = tuple[tuple[int, ...], ...]


class CannotLower(UsageError):
    """jaxcoll has no way to run this collective; the message says what to do instead."""


@dataclasses.dataclass(frozen=True)
class Message:
    """The static side of one custom call. Groups hold global device ids; a rank is an index into its group."""

    kind: Kind
    reduce: str
    groups: Groups
    root: int | None
    perm: tuple[tuple[int, int], ...] | None
    options: Options

    @property
    def group_size(self) -> int:
        return max(len(group) for group in self.groups)


# -------------------------------------------------------------------------------------------------- groups of ranks


def logical_groups(axes: Sequence[Any], view: compat.MeshView) -> np.ndarray:
    """Ranks of a collective over `axes` of the mesh: int array (groups, group size) of indices into the mesh's devices.

    A rank's index in its row is its index along `axes`, the last axis fastest.
    """
    unknown = [a for a in axes if a not in view.axes]
    if unknown or len(set(axes)) != len(axes):
        raise UsageError(f"the axes of a collective, {tuple(axes)}, must be different axes of the mesh {view.axes}")
    indices = np.arange(math.prod(view.sizes)).reshape(view.sizes)
    dims = [view.axes.index(a) for a in axes]
    ranks = math.prod(view.sizes[d] for d in dims)
    return np.moveaxis(indices, dims, range(len(dims))).reshape(ranks, -1).T


def split_groups(groups: np.ndarray, axis_index_groups: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """The rows of `groups`, each cut by `axis_index_groups`."""
    if axis_index_groups is None:
        return tuple(tuple(int(i) for i in row) for row in groups)
    size = groups.shape[1]
    if sorted(itertools.chain.from_iterable(axis_index_groups)) != list(range(size)):
        raise UsageError(
            f"axis_index_groups must cover all indices exactly once: the indices of this axis are 0..{size - 1}, "
            f"the groups are {[list(g) for g in axis_index_groups]}"
        )
    return tuple(tuple(int(row[i]) for i in group) for row in groups for group in axis_index_groups)


def _equal_sizes(kind: Kind, groups: Groups) -> None:
    if kind != Kind.ALL_REDUCE and len({len(g) for g in groups}) > 1:
        raise UsageError(
            f"all groups of axis_index_groups must be of the same size for {kind.name.lower()}, "
            f"they have {sorted({len(g) for g in groups})}; only psum, pmax and pmin take unequal ones"
        )


def plan(ctx: Any, row: Row, params: dict[str, Any], options: Options) -> Message:
    """What the call has to do. Raises UsageError on bad parameters, CannotLower where jaxcoll can't run it."""
    view = compat.mesh_view(ctx)
    axes = tuple(a for a in row.axes(params) if not isinstance(a, int))
    if view is None or not axes:
        raise CannotLower(f"{row.name} has no mesh axis to communicate over; call it inside of jax.shard_map")
    if view.auto:
        raise CannotLower(
            f"{row.name} over {axes}: jaxcoll can't run in a shard_map that leaves the mesh axes {view.auto} to the "
            "compiler, which would gather the array over them first. Make all axes manual (drop `axis_names=` from "
            "jax.shard_map, and give their sharding in its specs), or use jax.lax for this call."
        )
    if view.device_ids is None or len(view.device_ids) != math.prod(view.sizes):
        raise CannotLower(
            f"{row.name}: the devices of the mesh are not known while this program is lowered; lower it with "
            "arguments on devices, or inside of `with jax.set_mesh(mesh)`"
        )
    groups = logical_groups(axes, view)
    if row.kind == Kind.PERMUTE and not np.array_equal(groups, np.sort(groups, axis=1)):
        raise CannotLower(
            f"ppermute over {axes}: write the axes in the order of the mesh, {view.axes}; in another order jax.lax "
            "gives wrong answers or an error, depending on its version"
        )
    groups = split_groups(groups, params.get("axis_index_groups"))
    if params.get("axis_index_groups") is not None:
        _equal_sizes(row.kind, groups)
        refuse_groups_with_check_vma(row.name)
    device_groups = tuple(tuple(view.device_ids[i] for i in group) for group in groups)
    size = len(groups[0])
    return Message(
        kind=row.kind,
        reduce=row.reduce,
        groups=device_groups,
        root=normalised(params["source"], size, "`source` of pbroadcast") if row.kind == Kind.BROADCAST else None,
        perm=permutation(params["perm"], size) if row.kind == Kind.PERMUTE else None,
        options=options,
    )


def refuse_groups_with_check_vma(name: str) -> None:
    """JAX types a reduction over groups as equal on all ranks, which it isn't, or refuses without a word."""
    if name in ("psum", "psum_invariant", "pmean", "pmax", "pmin") and compat.check_vma():
        raise UsageError(
            f"{name} with axis_index_groups gives every group its own result, which jax.shard_map with check_vma=True "
            "would take for one result common to all. Pass check_vma=False to jax.shard_map, or make the groups an "
            "axis of the mesh and reduce over the other one."
        )


# ----------------------------------------------------------------------------------------------------- the message


message_p = Primitive("jaxcoll_message")
message_p.multiple_results = True


def _message_abstract_eval(*blocks: Any, message: Message) -> list[Any]:
    n = message.group_size
    out_blocks = {Kind.ALL_GATHER: n, Kind.REDUCE_SCATTER: 1}.get(message.kind)
    return [b.update(shape=(out_blocks or b.shape[0], b.shape[1])) for b in blocks]


message_p.def_abstract_eval(_message_abstract_eval)


def fnv1a32(text: str) -> int:
    """The 32-bit FNV-1a hash of `text` in UTF-8."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def site_id(module: str, index: int) -> int:
    """Id of the `index`-th collective of the module named `module`, as a signed 64-bit number."""
    value = (fnv1a32(module) << 32) | index
    return value - (1 << 64) if value >> 63 else value


def _lower_message(ctx: Any, *blocks: Any, message: Message) -> Any:
    from jaxcoll import runtime  # loads the native library: not before the first collective

    total_in, total_out = (
        sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals) for avals in (ctx.avals_in, ctx.avals_out)
    )
    set_key = runtime.prepare(
        kind=message.kind,
        groups=message.groups,
        nbytes=max(total_in, total_out),
        reduce=message.reduce,
        root=message.root,
        perm=message.perm,
        schedule=message.options.schedule,
        deterministic=message.options.deterministic,
    )
    devices = np.full((len(message.groups), message.group_size), NO_DEVICE, np.int64)
    for row, group in zip(devices, message.groups, strict=True):
        row[: len(group)] = group
    # XLA drops what has no elements, unless it does something besides.
    return jax.ffi.ffi_lowering(runtime.FFI_TARGET, has_side_effect=total_in == 0)(
        ctx,
        *blocks,
        kind=np.int32(message.kind),
        reduce=np.int32(REDUCE_CODES[message.reduce]),
        site=np.int64(site_id(compat.module_name(ctx), compat.module_sites(ctx).next())),
        set_key=np.int64(set_key),
        group_size=np.int32(message.group_size),
        devices=devices.reshape(-1),
    )


compat.register_lowering(message_p, _lower_message, PLATFORMS)


# -------------------------------------------------------------------------------------------------------- lowering


def _exchange(message: Message, blocks: list[jax.Array]) -> list[jax.Array]:
    """The blocks that arrive; a rank alone in its group keeps its own."""
    if message.group_size > 1:
        return message_p.bind(*blocks, message=message)
    if message.perm == ():
        return [jnp.zeros_like(b) for b in blocks]
    return blocks


def _positional(row: Row, params: dict[str, Any], x: jax.Array) -> jax.Array:
    axes = tuple(a for a in row.axes(params) if isinstance(a, int))
    return row.primitive.bind(x, **{**params, row.axes_param: axes}) if axes else x


def lower(ctx: Any, row: Row, params: dict[str, Any], options: Options, *operands: Any) -> Any:
    """Lowering of one operation on any number of operands (IR values), which travel in one message.

    Raises CannotLower before anything is emitted where jaxcoll can't do it.
    """
    message = plan(ctx, row, params, options)
    wide = carrier(ctx.avals_in[0].dtype, row.reduce)
    if wide is None:
        raise CannotLower(f"jaxcoll has no {row.reduce} of {ctx.avals_in[0].dtype}; use jax.lax for this call")
    outs = list(ctx.avals_out)
    n = message.group_size

    def program(*arrays: jax.Array) -> list[jax.Array]:
        results: dict[int, jax.Array] = {}
        packed: dict[int, jax.Array] = {}
        for i, x in enumerate(arrays):
            x = _positional(row, params, x)
            if math.prod(outs[i].shape) == 0:
                results[i] = jnp.zeros(outs[i].shape, outs[i].dtype)
            else:
                packed[i] = row.pack(convert(x, wide), params, n)
        if not packed:
            # Nothing to send, but something to hear: a rank that has more than nothing.
            _exchange(message, [jnp.zeros((n if row.kind in MANY_BLOCKS else 1, 0), wide)])
        else:
            arrived = _exchange(message, list(packed.values()))
            for i, blocks in zip(packed, arrived, strict=True):
                results[i] = convert(row.unpack(blocks, params, n, outs[i].shape), outs[i].dtype)
        return [results[i] for i in range(len(arrays))]

    return compat.lower_fun(program)(ctx, *operands)


def _lower_ours(row: Row) -> Any:
    def rule(ctx: Any, *operands: Any, schedule: str | None, deterministic: bool, **params: Any) -> Any:
        named = [a for a in row.axes(params) if not isinstance(a, int)]
        lowerable = carrier(ctx.avals_in[0].dtype, row.reduce) is not None
        if named and lowerable:
            return lower(ctx, row, params, Options(schedule, deterministic), *operands)
        # Nothing to send, or elements that only XLA can combine (the maximum of complex numbers): as jax.lax does it.
        return compat.lower_fun(lambda *xs: [row.primitive.bind(x, **params) for x in xs])(ctx, *operands)

    return rule


def _refuse_platform(row: Row) -> Any:
    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        raise CannotLower(
            f"jaxcoll runs on {' and '.join(PLATFORMS)}, and this program is compiled for "
            f"{', '.join(ctx.module_context.platforms)}; use jax.lax.{row.name} there"
        )

    return rule


def _register() -> None:
    for base, prim in OURS.items():
        compat.needs_devices(prim)
        compat.register_lowering(prim, _lower_ours(ROWS[base]), PLATFORMS)
        compat.register_default_lowering(prim, _refuse_platform(ROWS[base]))


_register()
