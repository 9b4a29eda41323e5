"""Swaps by the table of position-equivalent ones against a check of the whole table."""

from __future__ import annotations

import numpy as np
import pytest

from jaxcoll.schedule import Kind, Schedule, Table, build, builders
from jaxcoll.tuner.transforms import Swap, is_valid, swapped


def _idle(schedule: Schedule, table: Table, swap: Swap) -> bool:
    """Whether neither rank sends or receives where they would change places."""
    assert swap.graph is not None
    assert swap.step is not None
    edges = schedule.graphs[swap.graph].edges
    positions = {e.dst for e in edges if e.step == swap.step - 1} | {e.src for e in edges if e.step == swap.step}
    active = {int(table.vertex[swap.graph, swap.step, p]) for p in positions}
    return not active & {swap.a, swap.b}


@pytest.mark.parametrize("name", list(builders(Kind.ALL_REDUCE)))
@pytest.mark.parametrize("seed", [0, 1])
def test_looked_up_swaps_are_those_that_keep_the_table_valid(name: str, seed: int) -> None:
    """Swap upon swap, so that most are asked for under a table that others have changed."""
    params = {"groups": [[0, 1, 2, 3], [4, 5, 6, 7]]} if name == "hierarchical" else {}
    schedule = build(name, Kind.ALL_REDUCE, 8, **params)
    rng, table = np.random.default_rng(seed), Table.identity(schedule)
    accepted = refused = 0
    for _ in range(150):
        graph = int(rng.integers(len(schedule.graphs)))
        step = int(rng.integers(schedule.steps + 1))
        a, b = (int(r) for r in rng.choice(8, 2, replace=False))
        kinds = [Swap(None, None, a, b), Swap(graph, None, a, b), *[Swap(graph, step, a, b)] * 4]
        swap = kinds[int(rng.integers(len(kinds)))]
        after, right = swapped(schedule, table, swap), is_valid(schedule, swap.apply(table))
        if after is None and right:
            assert swap.step is not None, (seed, swap)
            assert _idle(schedule, table, swap), (seed, swap)
        else:
            assert (after is not None) == right, (seed, swap)
        accepted, refused = accepted + (after is not None), refused + (not right)
        if after is not None and rng.random() < 0.5:
            table = after
    assert accepted
    assert refused
