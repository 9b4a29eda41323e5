"""Schedules to run tests over, and what their collectives mean, written without the schedule package's own rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcoll.schedule import Kind, Schedule, build, builders

Array = npt.NDArray[Any]


def params_for(name: str, n: int) -> list[dict[str, Any]]:
    """Parameters worth building with, for every builder."""
    if name == "permute":
        return [{"perm": [(i, (i + 1) % n) for i in range(n)]}, {"perm": [(n - 1, 0)]}, {"perm": []}]
    if name == "hierarchical":
        even = [list(range(i, min(i + 2, n))) for i in range(0, n, 2)]
        uneven = [g for g in ([0], list(range(1, min(4, n))), list(range(n - 1, 3, -1))) if g]
        return [{"groups": even}, {"groups": uneven, "inner": "ring", "inter": "direct"}]
    return [{}]


def all_schedules(sizes: Iterable[int]) -> Iterator[Schedule]:
    """Every builder, kind and parameter set for the given numbers of ranks."""
    for n in sizes:
        for name, builder in builders().items():
            for kind in builder.kinds:
                for params in params_for(name, n):
                    if kind.rooted:
                        params = {**params, "root": n // 2}
                    yield build(name, kind, n, **params)


def describe(schedule: Schedule) -> str:
    return f"{schedule.name} {schedule.kind.label} over {schedule.nranks}"


def inputs_for(schedule: Schedule, n: int, seed: int, dtype: Any = np.float32) -> list[Array]:
    """Random inputs of blocks of `n` elements, over several orders of magnitude so that the order of sums shows."""
    rng = np.random.default_rng(seed)
    blocks = schedule.nranks if schedule.kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1
    size = n * blocks
    if np.issubdtype(np.dtype(dtype), np.integer):
        return [rng.integers(-100, 100, size).astype(dtype) for _ in range(schedule.nranks)]
    scale = 10.0 ** rng.integers(-3, 4, size)
    return [(rng.standard_normal(size) * scale).astype(dtype) for _ in range(schedule.nranks)]


def expected(schedule: Schedule, inputs: list[Array]) -> list[Array]:
    """What every rank must end with; zeros where it gets nothing."""
    kind, ranks, root = schedule.kind, range(schedule.nranks), schedule.collective.root
    stacked = np.stack(inputs)
    total = stacked.sum(axis=0, dtype=np.float64 if stacked.dtype.kind == "f" else stacked.dtype)
    n = stacked.shape[1] // (len(ranks) if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1)
    block = [slice(r * n, (r + 1) * n) for r in ranks]
    zero = np.zeros(n, dtype=stacked.dtype)
    if kind is Kind.ALL_REDUCE:
        return [total for _ in ranks]
    if kind is Kind.REDUCE:
        return [total if r == root else zero for r in ranks]
    if kind is Kind.BROADCAST:
        return [inputs[root or 0] for _ in ranks]
    if kind is Kind.ALL_GATHER:
        return [np.concatenate(inputs) for _ in ranks]
    if kind is Kind.REDUCE_SCATTER:
        return [total[block[r]] for r in ranks]
    if kind is Kind.ALL_TO_ALL:
        return [np.concatenate([inputs[s][block[r]] for s in ranks]) for r in ranks]
    source = {c.dst: c.src for c in schedule.chunks}
    return [zero if (s := source.get(r)) is None else inputs[s] for r in ranks]
