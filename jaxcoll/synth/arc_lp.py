"""The plain arc formulation of all-to-all throughput on HiGHS: the second solver, and the oracle of the column
generation.

Variables are f[s, a], the flow of everything that source s sends, on arc a, and the rate z of every (source,
destination) pair:

    max z   s.t.  f[s] into v - f[s] out of v >= z at every rank v != s,   = 0 at switches,   sum over s of f[s, a] <=
    c_a.

This is the relaxation (16)-(19) of MCCL appendix G with the commodities of one source added up, which loses nothing.
With `steps` the network is
expanded in time first. With `chunks` f counts whole chunks and the congestion is minimised: the compact MILP (11)-(14).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxcoll.errors import SynthesisError
from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net
from jaxcoll.synth.highs import new_highs

if TYPE_CHECKING:
    import highspy


@dataclass(frozen=True)
class ArcSolution:
    """`throughput` per pair, `bound` proven by the solver (equal for an LP solved to the end), whether `optimal`,
    `load` on arcs float64 [arcs]."""

    throughput: float
    bound: float
    optimal: bool
    load: FloatArray


@dataclass(frozen=True)
class _Expanded:
    tail: IntArray
    head: IntArray
    base: IntArray
    """The network's arc behind every arc; -1: waiting at a rank."""
    nodes: int
    start: IntArray
    """Node at which rank r's data begins."""
    sink: IntArray
    """Node at which data for rank r is taken, or -1 for the other nodes."""


def _expand(net: Net, steps: int | None) -> _Expanded:
    ranks = np.arange(net.ranks)
    if steps is None:
        sink = np.where(np.arange(net.nodes) < net.ranks, np.arange(net.nodes), -1)
        return _Expanded(net.tail, net.head, np.arange(net.arcs), net.nodes, ranks, sink)
    shift = np.where(net.head < net.ranks, net.nodes, 0)
    level = np.arange(steps)[:, None] * net.nodes
    wait = (level + ranks).ravel()
    tail = np.concatenate([(level + net.tail).ravel(), wait])
    head = np.concatenate([(level + net.head + shift).ravel(), wait + net.nodes])
    base = np.concatenate([np.tile(np.arange(net.arcs), steps), np.full(len(wait), -1)])
    sink = np.full((steps + 1) * net.nodes, -1)
    sink[steps * net.nodes + ranks] = ranks
    return _Expanded(tail, head, base, (steps + 1) * net.nodes, ranks, sink)


def _rows(net: Net, ex: _Expanded, chunks: int | None) -> tuple[FloatArray, FloatArray, IntArray, IntArray, FloatArray]:
    """Row bounds and the matrix as triples; rows: (source, node) balances, then capacities; columns: f[s, a], then z
    (or the congestion)."""
    n, arcs, nodes = net.ranks, len(ex.tail), ex.nodes
    s = np.arange(n)[:, None]
    column = (s * arcs + np.arange(arcs)).ravel()
    into, out = (s * nodes + ex.head).ravel(), (s * nodes + ex.tail).ravel()
    carried = np.flatnonzero(ex.base >= 0)
    capacity = n * nodes + ex.base[carried]
    last = n * arcs
    want = np.array([(src * nodes + v, src != r) for src in range(n) for v, r in enumerate(ex.sink) if r >= 0])
    sinks = want[want[:, 1] == 1, 0]
    ones = np.ones(len(column))
    parts = [
        (into, column, ones),
        (out, column, -ones),
        (np.tile(capacity, n), (s * arcs + carried).ravel(), np.ones(n * len(carried))),
    ]
    lower, upper = np.zeros(n * nodes + net.arcs), np.zeros(n * nodes + net.arcs)
    lower[n * nodes :] = -np.inf
    rows_cap = n * nodes + np.arange(net.arcs)
    if chunks is None:
        parts.append((sinks, np.full(len(sinks), last), -np.ones(len(sinks))))
        upper[rows_cap] = net.cap
    else:
        lower[sinks] = upper[sinks] = chunks
        parts.append((rows_cap, np.full(net.arcs, last), -net.cap))
    for src in range(n):
        lower[src * nodes + ex.start[src]] = -np.inf
        for v in np.flatnonzero(ex.sink == src):
            lower[src * nodes + v], upper[src * nodes + v] = -np.inf, np.inf
    rows, cols, values = (np.concatenate(p) for p in zip(*parts, strict=True))
    return lower, upper, rows, cols, values


def solve(
    net: Net,
    *,
    steps: int | None = None,
    chunks: int | None = None,
    threads: int | None = None,
    time_limit: float | None = None,
    gap: float = 1e-6,
    solver: str = "choose",
) -> ArcSolution:
    """Solve the arc LP, or with `chunks` the MILP for that many chunks a pair (`gap`: its relative stopping gap).

    Raises SynthesisError when HiGHS ends without any solution, naming its status.
    """
    ex = _expand(net, steps)
    lower, upper, rows, cols, values = _rows(net, ex, chunks)
    flows = net.ranks * len(ex.tail)
    order = np.argsort(cols, kind="stable")
    solver_ = new_highs(threads, mip_rel_gap=gap, solver=solver)
    import highspy

    if time_limit is not None:
        solver_.setOptionValue("time_limit", float(time_limit))
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = flows + 1, len(lower)
    cost = np.zeros(flows + 1)
    cost[-1] = 1.0
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(flows + 1), np.full(flows + 1, np.inf)
    lp.row_lower_, lp.row_upper_ = lower, upper
    lp.sense_ = highspy.ObjSense.kMaximize if chunks is None else highspy.ObjSense.kMinimize
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(cols, minlength=flows + 1))])
    lp.a_matrix_.index_, lp.a_matrix_.value_ = rows[order], values[order]
    if chunks is not None:
        lp.integrality_ = [highspy.HighsVarType.kInteger] * flows + [highspy.HighsVarType.kContinuous]
    solver_.passModel(lp)
    solver_.run()
    return _read(net, ex, solver_, chunks)


def _read(net: Net, ex: _Expanded, h: highspy.Highs, chunks: int | None) -> ArcSolution:
    import highspy

    status, info = h.getModelStatus(), h.getInfo()
    value = np.array(h.getSolution().col_value)
    if not len(value) or info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise SynthesisError(
            f"the arc model ended without a solution ({h.modelStatusToString(status)}); allow more time or steps"
        )
    optimal = status == highspy.HighsModelStatus.kOptimal
    flow = value[:-1].reshape(net.ranks, -1).sum(axis=0)
    load = np.asarray(np.bincount(ex.base[ex.base >= 0], flow[ex.base >= 0], net.arcs), np.float64)
    if chunks is None:
        return ArcSolution(float(value[-1]), float(value[-1]) if optimal else float("inf"), optimal, load)
    least = max(info.mip_dual_bound, 1e-300)
    return ArcSolution(chunks / float(value[-1]), chunks / least, optimal, load)
