"""Small tools of the tests: what a program was lowered to, how often JAX compiled, running on a mesh."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from . import cases

TARGET = "jaxcoll_collective"


def lowered(f: Callable[..., Any], *args: Any) -> str:
    """The StableHLO of jit(f)(*args)."""
    return jax.jit(f).lower(*args).as_text()


def messages(text: str) -> int:
    """Custom calls of ours in a lowered program: each is one message."""
    return text.count(f"@{TARGET}(")


def sites(text: str) -> list[int]:
    """The call-site ids in a lowered program, in order."""
    return [int(site) for site in re.findall(r"\bsite = (-?\d+) : i64", text)]


def on_ranks(mesh: Any, f: Callable[..., Any], *xs: Any, check_vma: bool = True) -> Any:
    """f on every rank, on its part of each array of `xs` (first dimension: ranks), the results stacked."""
    return jax.device_get(jax.jit(cases.Place(mesh, check_vma).sharded(f))(*xs))


def one_result(mesh: Any, f: Callable[..., Any], x: Any) -> Any:
    """f on every rank; its result must be typed as the same on all of them."""
    return jax.device_get(jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P()))(x))


class Compilations:
    """Counts how often JAX's backend compiled a program while `counting()`."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[Compilations]:
        def listen(event: str, duration: float, **_: Any) -> None:
            self.count += event == "/jax/core/compile/backend_compile_duration"

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield self
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)


def assert_same_on_all(stacked: np.ndarray) -> None:
    """All ranks hold the same bytes."""
    for rank in stacked[1:]:
        assert rank.tobytes() == stacked[0].tobytes()
