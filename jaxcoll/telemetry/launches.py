"""Launch numbers: each executable counts its own from a hash, so those of two executables are far apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

NEAR = 1 << 18
"""Launches whose numbers differ by less are of one executable; `Place::kNear` in the library."""


def near(a: int, b: int) -> bool:
    """Whether two launches are of one executable."""
    return abs(a - b) < NEAR


def by_executable(launches: Sequence[int]) -> list[npt.NDArray[np.intp]]:
    """For each executable the indices of its launches, in the order of their numbers."""
    numbers = np.asarray(launches, np.int64)
    order = np.argsort(numbers, kind="stable")
    return [part for part in np.split(order, np.flatnonzero(np.diff(numbers[order]) >= NEAR) + 1) if len(part)]
