"""Rank x rank measurements out of records."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import UsageError
from jaxcoll.telemetry.record import RECEIVER, Records


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Measurements by (src, dst), each array [nranks, nranks]; NaN where nothing was seen.

    `throughput` is the median over the edges of bytes / transfer time, bytes/s; `transfer_ns` and `wait_ns` are
    medians of the receivers' records; `bytes` and `count` are sums. Edges whose transfer nobody could time
    (`transfer_ns` 0) are in `wait_ns`, `bytes` and `count` only.
    """

    throughput: npt.NDArray[np.float64]
    transfer_ns: npt.NDArray[np.float64]
    wait_ns: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]


def measurement_matrix(records: Records, nranks: int) -> Matrix:
    """The measurements of the receivers' records that carried bytes, by pair of ranks."""
    rows = records[(records["side"] == RECEIVER) & (records["bytes"] > 0)]
    if len(rows) and int(max(rows["src"].max(), rows["dst"].max())) >= nranks:
        high = int(max(rows["src"].max(), rows["dst"].max()))
        raise UsageError(f"a record names rank {high}, but nranks is {nranks}; pass the size of the communicator")
    shape = (nranks, nranks)
    medians = [np.full(shape, np.nan) for _ in range(3)]
    total, count = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    transfer = np.where(rows["transfer_ns"] > 0, rows["transfer_ns"], np.nan)
    speed = rows["bytes"] / transfer * 1e9
    pair = rows["src"].astype(np.int64) * nranks + rows["dst"]
    order = np.argsort(pair, kind="stable")
    cuts = np.flatnonzero(np.diff(pair[order])) + 1
    for piece in np.split(order, cuts) if len(order) else []:
        a, b = divmod(int(pair[piece[0]]), nranks)
        for out, values in zip(medians, (speed, transfer, rows["wait_ns"].astype(np.float64)), strict=True):
            known = values[piece][~np.isnan(values[piece])]
            out[a, b] = float(np.median(known)) if len(known) else np.nan
        total[a, b] = int(rows["bytes"][piece].sum())
        count[a, b] = len(piece)
    return Matrix(medians[0], medians[1], medians[2], total, count)
