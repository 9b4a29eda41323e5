"""Critical paths of a weighted pattern (REACT, section 5.4.1)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from jaxcoll.sim.plan import Plan

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def critical_path(plan: Plan, weight: Floats) -> Ints:
    """Edges, first to last, of the chain of dependent edges with the highest sum of `weight`."""
    n = len(weight)
    if not n:
        return np.zeros(0, np.int64)
    total = weight.copy()
    before = np.full(n, -1, np.int64)
    # A parent's step lies below its child's, so one pass in step order settles every edge before it is used.
    order = np.argsort(plan.step[plan.child], kind="stable")
    for child, parent in zip(plan.child[order].tolist(), plan.parent[order].tolist(), strict=True):
        if total[parent] + weight[child] > total[child]:
            total[child] = total[parent] + weight[child]
            before[child] = parent
    edge = int(np.argmax(total))
    path = [edge]
    while before[edge] >= 0:
        edge = int(before[edge])
        path.append(edge)
    return np.array(path[::-1], np.int64)


def critical_paths(plan: Plan, fct: Floats) -> list[tuple[Ints, Floats]]:
    """(path, weights of its edges) for each epoch's times, and last for their mean."""
    mean = np.nan_to_num(np.nanmean(np.where(np.isnan(fct).all(axis=0), 0.0, fct), axis=0))
    weights = [*np.where(np.isnan(fct), mean, fct), mean]
    paths = [critical_path(plan, weight) for weight in weights]
    return [(path, weight[path]) for path, weight in zip(paths, weights, strict=True)]
