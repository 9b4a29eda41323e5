"""Makes our primitives out of JAX's: the same parameters and rules, any number of operands, another lowering.

Types (shapes, varying manual axes, effects, error texts), `vmap` and transposition come from JAX's rules, or where
those are wrong from the table's, operand by operand, the collectives in them rerouted to ours. The forward derivative
of a linear operation is the operation itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax

from jaxcoll import compat
from jaxcoll.primitives.lockstep import Options, run
from jaxcoll.primitives.table import ROWS, Row

REROUTED = frozenset(ROWS)


def _split(params: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    rest = dict(params)
    return Options(rest.pop("schedule"), rest.pop("deterministic")), rest


def bind(base: Any, operands: Sequence[Any], params: dict[str, Any], options: Options) -> list[Any]:
    """Our primitive for JAX's `base`, on operands of any shapes; returns as many results."""
    return OURS[base].bind(*operands, **params, schedule=options.schedule, deterministic=options.deterministic)


def _bind_for(row: Row, options: Options) -> Any:
    def bind_one(base: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        return bind(base, operands, params, options.for_kind(row.kind, ROWS[base].kind))

    return bind_one


def _abstract(row: Row, *avals: Any, **params: Any) -> tuple[list[Any], frozenset[Any]]:
    _, base_params = _split(params)
    outs, effects = zip(*(compat.abstract_eval(row.primitive, aval, base_params) for aval in avals), strict=True)
    return list(outs), frozenset().union(*effects)


def _jvp(row: Row, primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    ours = OURS[row.primitive]
    outs = ours.bind(*primals, **params)
    live = [i for i, t in enumerate(tangents) if type(t) is not compat.Zero]
    if live and not compat.is_differentiable(row.primitive):
        raise NotImplementedError(
            f"Differentiation rule for '{row.name}' not implemented: it has no derivative in jax.lax either. "
            "Put jax.lax.stop_gradient around its argument if no gradient is wanted."
        )
    out_tangents: list[Any] = [compat.zero_tangent(out) for out in outs]
    if live:
        for i, tangent in zip(live, ours.bind(*(tangents[i] for i in live), **params), strict=True):
            out_tangents[i] = tangent
    return outs, out_tangents


def _transpose(row: Row, cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
    options, base_params = _split(params)
    results: list[Any] = [
        compat.zero_cotangent(x.aval) if isinstance(x, compat.UndefinedPrimal) else None for x in operands
    ]
    live = [
        i
        for i, (ct, x) in enumerate(zip(cotangents, operands, strict=True))
        if isinstance(x, compat.UndefinedPrimal) and type(ct) is not compat.Zero
    ]

    def rule(index: int) -> Any:
        if (own := row.transpose) is not None:
            return lambda ct: own(ct, base_params)
        return lambda ct: compat.transpose(row.primitive, ct, operands[index].aval, base_params)

    outs = run([(rule(i), cotangents[i]) for i in live], REROUTED, _bind_for(row, options))
    for i, (out,) in zip(live, outs, strict=True):
        results[i] = out
    return results


def _batch(row: Row, axis_data: Any, values: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    options, base_params = _split(params)
    out_dims: list[Any] = [None] * len(values)
    name, size = compat.vmapped_axis(axis_data)
    own = row.batch if name in row.axes(base_params) else None

    def rule(index: int) -> Any:
        def batched(value: Any) -> Any:
            if own is not None:
                out, out_dims[index] = own(value, dims[index], size, base_params)
            else:
                out, out_dims[index] = compat.batch(row.primitive, axis_data, value, dims[index], base_params)
            return out

        return batched

    outs = run([(rule(i), value) for i, value in enumerate(values)], REROUTED, _bind_for(row, options))
    return [out for (out,) in outs], out_dims


def _define(row: Row) -> Any:
    return compat.make_primitive(
        f"jaxcoll_{row.name}",
        abstract=functools.partial(_abstract, row),
        jvp=functools.partial(_jvp, row),
        transpose_rule=functools.partial(_transpose, row),
        batcher=functools.partial(_batch, row),
    )


OURS: dict[Any, Any] = {base: _define(row) for base, row in ROWS.items()}
"""JAX's primitive -> ours."""


def call(fun: Any, leaves: Sequence[Any], options: Options) -> list[jax.Array]:
    """`fun(leaf)` for every leaf, where `fun` is a function of `jax.lax` with one array argument and one result."""

    def bind_one(base: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        return bind(base, operands, params, options)

    return [out for (out,) in run([(fun, leaf) for leaf in leaves], REROUTED, bind_one)]
