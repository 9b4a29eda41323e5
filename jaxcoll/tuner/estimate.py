"""The paper's analytical estimate of a transformed pattern (REACT, section 5.4.1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxcoll.tuner.measure import Batch, Pattern

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """Mean flow completion times of one batch: by edge the pair, its degree, bytes and seconds; `epoch` dates it."""

    epoch: int
    epochs: int
    src: Ints
    dst: Ints
    degree: Ints
    size: Floats
    seconds: Floats


def remember(history: Sequence[Memory], batch: Batch, epoch: int, horizon: int) -> tuple[Memory, ...]:
    """The history with `batch`, measured up to `epoch`, and without what is older than `horizon` epochs."""
    seen = batch.pattern.carries & np.isfinite(batch.fct).any(axis=0)
    flows = batch.pattern.plan
    new = Memory(
        epoch,
        len(batch.fct),
        flows.src[seen],
        flows.dst[seen],
        batch.pattern.degree[seen],
        flows.size[seen],
        np.nanmean(batch.fct[:, seen], axis=0) if seen.any() else np.zeros(0),
    )
    return tuple(m for m in (*history, new) if m.epoch > epoch - horizon)


class Estimator:
    """Estimates flow completion times from a history; unit cost = seconds per byte and unit of degree."""

    def __init__(self, history: Sequence[Memory], nranks: int):
        self._n = nranks
        src, dst, degree, size, seconds = (
            np.concatenate([getattr(m, name) for m in history]) if history else np.zeros(0)
            for name in ("src", "dst", "degree", "size", "seconds")
        )
        repeat = [np.full(len(m.src), m.epochs, np.float64) for m in history]
        weight = np.concatenate(repeat) if repeat else np.zeros(0)
        unit = seconds / (size * np.maximum(degree, 1)) if len(size) else np.zeros(0)
        pair = (src * nranks + dst).astype(np.int64)
        count = np.bincount(pair, weight, nranks * nranks)
        with np.errstate(invalid="ignore"):
            self._pair = np.bincount(pair, weight * unit, nranks * nranks) / count
        # Medians are of seconds per byte among flows of one degree: sizes differ between steps.
        per_byte = seconds / size if len(size) else np.zeros(0)
        self._degree = {int(k): float(np.median(per_byte[degree == k])) for k in np.unique(degree)}
        self._all = float(np.median(unit)) if len(unit) else 0.0

    def seconds(self, pattern: Pattern) -> Floats:
        """Estimated FCT of every edge of `pattern`: its pair's past, else the median of its degree, else of all."""
        flows, degree = pattern.plan, pattern.degree
        known = self._pair[flows.src * self._n + flows.dst] * np.maximum(degree, 1)
        median = np.array([self._degree.get(int(k), self._all * max(int(k), 1)) for k in degree])
        return np.where(np.isfinite(known), known, median) * flows.size
