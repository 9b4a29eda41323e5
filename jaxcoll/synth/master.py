"""The restricted master problem (1)-(4) of MCCL 4.2 on HiGHS, over symmetry classes.

    max z   s.t.   sum of x over the trees of class c  - z >= 0    for every source class c          (dual alpha_c)
                   sum of beta * x over all trees          <= 1    for every arc class                 (dual pi)

The capacity rows are divided by the class's capacity, so beta is a utilisation and the rows are of one size. With
every rank and arc
alone in its class this is the paper's master, row for row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxcoll.errors import SynthesisError
from jaxcoll.synth.alltoall_net import FloatArray, IntArray
from jaxcoll.synth.highs import new_highs
from jaxcoll.synth.path_trees import Trees

DUAL_TOLERANCE = 1e-9


@dataclass(frozen=True)
class MasterSolution:
    """`rate`: z. `price`: duals of the capacity rows, float64 [arc classes], >= 0. `worth`: alpha_c, float64 [source
    classes]. `value`: x, float64 [columns]."""

    rate: float
    price: FloatArray
    worth: FloatArray
    value: FloatArray


class RestrictedMaster:
    """Holds one HiGHS model; the basis stays between solves, so adding columns costs a few simplex pivots."""

    def __init__(self, sources: int, arcs: int, threads: int | None = None):
        self._sources = sources
        self._columns = 0
        # Presolve would throw the basis away; primal simplex (strategy 4) continues where added columns left it.
        tight = {"primal_feasibility_tolerance": DUAL_TOLERANCE, "dual_feasibility_tolerance": DUAL_TOLERANCE}
        h = new_highs(threads, presolve="off", solver="simplex", simplex_strategy=4, **tight)
        import highspy

        self._status = highspy.HighsModelStatus
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = 1, sources + arcs
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = np.ones(1), np.zeros(1), np.full(1, np.inf)
        lp.row_lower_ = np.concatenate([np.zeros(sources), np.full(arcs, -np.inf)])
        lp.row_upper_ = np.concatenate([np.full(sources, np.inf), np.ones(arcs)])
        lp.sense_ = highspy.ObjSense.kMaximize
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.array([0, sources])
        lp.a_matrix_.index_, lp.a_matrix_.value_ = np.arange(sources), -np.ones(sources)
        h.passModel(lp)
        self._h = h

    @property
    def columns(self) -> int:
        return self._columns

    def add(self, source: IntArray, trees: Trees) -> None:
        """Add columns: `source` int64 [k], the class of each; in `trees` arcs are arc classes and units shares of a
        class's capacity."""
        k = len(trees)
        start = trees.start[:-1] + np.arange(k)
        index = np.empty(len(trees.arc) + k, np.int32)
        value = np.ones(len(index))
        index[start] = source
        rest = np.arange(len(trees.arc)) + trees.tree + 1
        index[rest], value[rest] = trees.arc + self._sources, trees.units
        zero, inf = np.zeros(k), np.full(k, np.inf)
        self._h.addCols(k, zero, zero, inf, len(index), start.astype(np.int32), index, value)
        self._columns += k

    def solve(self, time_limit: float | None = None) -> MasterSolution | None:
        """The optimum over the columns so far; None when `time_limit` (seconds) ran out first."""
        if time_limit is not None:
            self._h.setOptionValue("time_limit", self._h.getRunTime() + max(time_limit, 0.01))
        self._h.run()
        status = self._h.getModelStatus()
        if status == self._status.kTimeLimit:
            return None
        if status != self._status.kOptimal:
            raise SynthesisError(
                f"the master problem ended as {self._h.modelStatusToString(status)}; capacities that differ "
                "by more than 10^9 are a likely cause"
            )
        solution = self._h.getSolution()
        price = np.abs(np.array(solution.row_dual[self._sources :]))
        value = np.array(solution.col_value)
        worth = np.abs(np.array(solution.row_dual[: self._sources]))
        return MasterSolution(float(value[0]), price, worth, value[1:])
