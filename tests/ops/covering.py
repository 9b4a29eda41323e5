"""A small set of cases in which every pair of values occurs together at least once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]


def product(factors: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool]) -> list[Case]:
    """All valid cases."""
    cases = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [case for case in cases if valid(case)]


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(sorted(case.items()), 2))


def pairwise(factors: Mapping[str, Sequence[Any]], valid: Callable[[Case], bool], seed: int) -> list[Case]:
    """Some valid cases that hold every pair of values that any valid case holds (values must be comparable strings).

    Greedy: each case is the best of some that hold the first pair still missing. Deterministic for a seed.
    """
    everything = product(factors, valid)
    holders: dict[Any, list[Case]] = {}
    for case in everything:
        for pair in _pairs(case):
            holders.setdefault(pair, []).append(case)
    missing = dict.fromkeys(sorted(holders))
    rng = random.Random(seed)
    chosen: list[Case] = []
    while missing:
        pair = next(iter(missing))
        candidates = rng.sample(holders[pair], min(40, len(holders[pair])))
        best = max(candidates, key=lambda case: sum(p in missing for p in _pairs(case)))
        chosen.append(best)
        for p in _pairs(best):
            missing.pop(p, None)
    return chosen
