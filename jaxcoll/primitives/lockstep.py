"""JAX's own code, with its collectives rerouted to ours, for many arrays at once.

`jax.lax.psum` and its kin know what a call means: which axes, which types, when a constant folds. So do JAX's rules for
`vmap` and transposition. All of them end in JAX's primitives, one array at a time. Here such code is traced, one trace
an
array, and the traces are run side by side: where several of them stand before the same collective, with the same
parameters and dtype, their operands go into one call of our primitive, which is one message. Nothing is concatenated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax

from jaxcoll import compat
from jaxcoll.errors import UsageError
from jaxcoll.schedule.ir import Kind


@dataclasses.dataclass(frozen=True)
class Options:
    """What a jaxcoll call can ask for beyond what `jax.lax` knows."""

    schedule: str | None = None
    deterministic: bool = False

    @classmethod
    def checked(cls, schedule: Any, deterministic: Any) -> Options:
        """Options from what a user passed. Raises UsageError on values of the wrong type."""
        if schedule is not None and not isinstance(schedule, str):
            raise UsageError(f"schedule must be the name of a schedule (a str) or None, not {schedule!r}")
        if not isinstance(deterministic, bool):
            raise UsageError(f"deterministic must be True or False, not {deterministic!r}")
        return cls(schedule, deterministic)

    def for_kind(self, asked: Kind, other: Kind) -> Options:
        """The options of a collective of kind `other` that stands in for one of kind `asked`.

        A gradient may be another collective (the one of an all_gather is a reduce_scatter), which a schedule named for
        the first can't do; then the choice is left to jaxcoll.
        """
        return self if asked == other else dataclasses.replace(self, schedule=None)


Bind = Callable[[Any, Sequence[Any], dict[str, Any]], Sequence[Any]]
Request = tuple[Any, dict[str, Any], Any]


def run(calls: Sequence[tuple[Callable[[Any], Any], Any]], reroute: frozenset[Any], bind: Bind) -> list[list[Any]]:
    """Runs `fun(operand)` for each of `calls`, its collectives rerouted.

    Args:
      calls: (function of one array, array) pairs; a function's result is a pytree of arrays.
      reroute: JAX's primitives that are to be replaced.
      bind: called as bind(primitive, operands, params), with operands of one dtype; returns as many results.

    Returns:
      for each call, the flat list of its results.
    """
    traces: list[Generator[Request, Any, list[Any]]] = []
    programs: dict[Any, Any] = {}
    for fun, operand in calls:
        key = (fun, jax.typeof(operand))
        if (traced := programs.get(key)) is None:
            traced = programs[key] = jax.make_jaxpr(fun)(operand)
        traces.append(compat.evaluate(traced.jaxpr, traced.consts, [operand], reroute))
    results: list[list[Any]] = [[] for _ in traces]
    waiting: dict[int, Request] = {}

    def advance(index: int, value: Any) -> None:
        try:
            waiting[index] = traces[index].send(value)
        except StopIteration as stop:
            results[index] = stop.value

    for index in range(len(traces)):
        advance(index, None)
    while waiting:
        first = next(iter(waiting.values()))
        together = [i for i, request in waiting.items() if _same(first, request)]
        operands = [waiting.pop(i)[2] for i in together]
        for index, value in zip(together, bind(first[0], operands, first[1]), strict=True):
            advance(index, value)
    return results


def _same(a: Request, b: Request) -> bool:
    return a[0] is b[0] and a[1] == b[1] and jax.typeof(a[2]).dtype == jax.typeof(b[2]).dtype
