"""`jaxcoll.enable()`: the `jax.lax` collectives of a program that doesn't know jaxcoll go through it.

While enabled, the lowering rules of JAX's own collective primitives on cpu and cuda are ours, those that have a row in
`jaxcoll.primitives`. So they are reached wherever they stand: in libraries, under `jax.pmap`, and as the sums that
differentiation inserts (the gradient of a weight that all ranks share). Types, `vmap` and gradients stay JAX's. Not
reached: collectives that the compiler inserts into a `jit` over sharded arrays, which exist only after lowering, and
`ragged_all_to_all`, `psend`, `precv` and the split `*_start` forms, which have no row.

What jaxcoll can't lower (see `jaxcoll.lowering.CannotLower`: the maximum of complex numbers, a shard_map that leaves
some mesh axes to the compiler) keeps JAX's rule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from jaxcoll import compat
from jaxcoll.errors import UsageError
from jaxcoll.lowering import PLATFORMS, CannotLower, lower
from jaxcoll.primitives import ROWS, Options, Row

# Part of the key of all of JAX's caches: functions traced and compiled while enabled are others than those before and
# after, and both are kept, so that switching back and forth compiles nothing twice.
_context = jax.make_user_context(None)

_lock = threading.Lock()
_active: Enabled | None = None


def _rule(row: Row, options: Options) -> Callable[[Callable[..., Any] | None], Callable[..., Any]]:
    def make(original: Callable[..., Any] | None) -> Callable[..., Any]:
        def rule(ctx: Any, operand: Any, **params: Any) -> Any:
            try:
                return lower(ctx, row, params, options, operand)
            except CannotLower:
                if original is None:
                    raise
                return original(ctx, operand, **params)

        return rule

    return make


class Enabled:
    """The state that `enable()` returns; as a context manager it calls `disable()` at the end of the block."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._override = compat.LoweringOverride()

    def install(self) -> None:
        """Use `enable()`, which keeps track of what is in force."""
        for base, row in ROWS.items():
            for platform in PLATFORMS:
                self._override.replace(base, platform, _rule(row, self.options))
        _context.set_global(("jaxcoll", self.options))

    def remove(self) -> None:
        """Use `disable()`."""
        self._override.restore()
        _context.set_global(None)

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _active is self:
            disable()


def enable(*, schedule: str | None = None, deterministic: bool = False) -> Enabled:
    """Routes the `jax.lax` collectives of this process through jaxcoll, until `disable()` or the end of a `with` block.

    Functions compiled before are compiled again under it on their next call, and the old ones come back after it;
    nobody need clear a cache. An executable that the program holds itself (`jax.jit(f).lower(...).compile()`) stays
    what it was.

    The first collective that a process lowers waits until every process of the job has come to one, or to
    `jaxcoll.init()`, also where it is for some of them only. A maximum with a NaN is NaN: see `jaxcoll.pmax`.

    Args:
      schedule, deterministic: for all collectives, as in `jaxcoll.psum`. A schedule that can't do all the collectives
        of the program raises ScheduleError at the first that it can't.

    Returns:
      a context manager; using it is optional.

    Raises:
      UsageError: when it is enabled already.
    """
    global _active
    options = Options.checked(schedule, deterministic)
    with _lock:
        if _active is not None:
            raise UsageError("jaxcoll is enabled already; call jaxcoll.disable() first, or drop this second enable()")
        enabled = Enabled(options)
        enabled.install()
        _active = enabled
    return enabled


def disable() -> None:
    """Gives `jax.lax`'s collectives back to XLA. Raises UsageError when `enable()` isn't in force."""
    global _active
    with _lock:
        if _active is None:
            raise UsageError("jaxcoll is not enabled; call jaxcoll.enable() before jaxcoll.disable()")
        _active.remove()
        _active = None


def is_enabled() -> bool:
    """Whether `enable` is in force in this process."""
    return _active is not None
