"""Which flows are congested, and how (REACT, section 5.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxcoll.tuner.measure import Batch

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Congestion:
    """By edge: steady and erratic congestion, p90 throughput, and the mean throughput of its likes (see `detect`)."""

    steady: Bools
    erratic: Bools
    p90: Floats
    usual: Floats

    @property
    def any(self) -> Bools:
        """Congested in either way."""
        return self.steady | self.erratic

    def __bool__(self) -> bool:
        return bool(self.any.any())


def detect(batch: Batch, delta1: float = 0.2, delta2: float = 0.15, hosts: Sequence[int] | None = None) -> Congestion:
    """Equations 1 and 2: p90 of a flow against the mean of all flows of its degree, and its normalised spread.

    The paper has one rank a host. Flows inside a host, which cross no network, are compared with each other alone.

    Args:
        hosts: host of each rank; default: every rank is a host.
    """
    speed = batch.throughput
    seen = batch.pattern.carries & np.isfinite(speed).any(axis=0)
    n = speed.shape[1]
    p90, spread = np.full(n, np.nan), np.zeros(n)
    if seen.any():
        p90[seen] = np.nanpercentile(speed[:, seen], 90, axis=0)
        spread[seen] = np.nanstd(speed[:, seen], axis=0) / np.nanmean(speed[:, seen], axis=0)
    usual = np.full(n, np.nan)
    kind = 2 * batch.pattern.degree + _inside(batch, hosts)
    for likes in np.unique(kind[seen]):
        alike = seen & (kind == likes)
        usual[alike] = np.nanmean(speed[:, alike])
    with np.errstate(invalid="ignore"):
        steady = seen & (p90 < usual * (1 - delta1))
    return Congestion(steady, seen & (spread > delta2) & ~steady, p90, usual)


def _inside(batch: Batch, hosts: Sequence[int] | None) -> Bools:
    """By edge: whether both of its ranks are on one host."""
    flows = batch.pattern.plan
    if hosts is None:
        return np.zeros(len(flows.src), bool)
    host_of = np.asarray(hosts)
    return host_of[flows.src] == host_of[flows.dst]


def rate_text(value: float) -> str:
    """A throughput for people."""
    for scale, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if value >= 0.1 * scale:
            return f"{value / scale:.2g} {unit}" if value < 10 * scale else f"{value / scale:.0f} {unit}"
    return f"{value / 1e3:.3g} kB/s"
