"""The step-aware switch removal of MCCL appendix C, one switch at a time, as a linear program.

Variables are the logical links y[u, v] of one switch. The first aim is to place all its capacity (M times the sum of
y); the second spreads it: each u pays a convex price for what it gives to one v, whose k-th piece, as wide as an even
share of u's capacity, costs k per unit. Here the pieces are bounded variables with rising cost, which is the paper's
lower envelope (6) without its rows. The min-cut rows (9) are the known cuts; the caller checks the answer by flows
and comes back with the cuts that it violates, which is the paper's cutting-plane loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxcoll.synth.switches import IntMatrix, Room, bend_greedily

PIECES = 8  # prices beyond the eighth share rise no further; few links ever get there
MOST_VARIABLES = 20_000  # beyond, fewer pieces; beyond that with one piece, the greedy plan (140 neighbours)


def bend_by_lp(plan: IntMatrix, room: Room, seconds: float = float("inf")) -> IntMatrix:
    """A plan that hurts no known cut: the LP's (as far as it comes in `seconds`), rounded, the rest placed greedily."""
    from scipy.optimize import linprog

    rows, columns = np.nonzero(~room.same)
    if len(rows) > MOST_VARIABLES:
        return bend_greedily(plan, room)
    share = np.maximum(1, room.inward // max(1, plan.shape[1] - 1))[rows]
    count = len(rows)
    pieces = max(1, min(PIECES, plan.shape[1], MOST_VARIABLES // count))
    # Columns: piece k of link i at k * count + i.
    price = np.repeat(np.arange(1, pieces + 1), count).astype(np.float64)
    big = float(plan.shape[0] ** 2 * max(1, int(room.inward.max())))
    bounds = [(0.0, None if k == pieces - 1 else float(share[i])) for k in range(pieces) for i in range(count)]
    matrix, limit = _constraints(room, rows, columns, pieces)
    options = {} if seconds == float("inf") else {"time_limit": max(0.01, seconds)}
    answer: Any = linprog(price - big, A_ub=matrix, b_ub=limit, bounds=bounds, method="highs", options=options)
    if answer.x is None:
        return bend_greedily(plan, room)
    value = np.asarray(answer.x, dtype=np.float64).reshape(pieces, count).sum(axis=0)
    wanted = np.zeros_like(plan)
    wanted[rows, columns] = np.floor(value + 1e-7).astype(np.int64)
    return bend_greedily(wanted, room)


def _constraints(
    room: Room, rows: NDArray[np.intp], columns: NDArray[np.intp], pieces: int
) -> tuple[Any, NDArray[np.float64]]:
    """(7) and (8), the sums at each neighbour, and (9), what each known cut can lose; the same for all pieces."""
    from scipy.sparse import coo_array, hstack

    count = len(rows)
    # What a cut could lose at the very most; most cuts can't lose all that they can spare, and need no row.
    most = np.minimum(room.tail_side @ room.inward, room.head_side @ room.outward)
    binding = most > room.slack
    hurt = room.tail_side[:, rows] & room.head_side[:, columns] & binding[:, None]
    binding &= hurt.any(axis=1)
    cut, link = np.nonzero(hurt[binding])
    inward, outward = len(room.inward), len(room.outward)
    line = np.concatenate([rows, inward + columns, inward + outward + cut])
    where = np.concatenate([np.arange(count), np.arange(count), link])
    height = inward + outward + int(binding.sum())
    one = coo_array((np.ones(len(line)), (line, where)), shape=(height, count))
    limit = np.concatenate([room.inward, room.outward, np.maximum(room.slack[binding], 0)]).astype(np.float64)
    return hstack([one] * pieces, format="csr"), limit
