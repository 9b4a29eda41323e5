"""Does a schedule, under a table, compute its collective? Contributions are counted, not only marked.

REACT (A.3) follows bit vectors through the network; for a reduction those accept a pattern that adds one contribution
twice. Here every rank holds, for each chunk, how often each source's contribution is in its value: a result must have
each of them exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import ScheduleInvalid
from jaxcoll.schedule.ir import IntArray, Kind, Op, Schedule
from jaxcoll.schedule.table import Table

Counts = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

_SHOWN = 10  # findings that an exception's message spells out
_MANY = 1000  # counts stop here: an invalid schedule could double them every step


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault and its place; `edge` is an index in `Schedule.edges`, `rank` a rank, the rest as in the schedule.

    Codes: `table` (doesn't fit the schedule), `home` (the table moves a root or a permutation's ends), `uncovered` (a
    block without data-carrying chunk), `overlap` (two sources for one output of a permutation), `shared-chunk` (in two
    graphs), `reduce-in-copy` (a reduction in a collective that has none), `write-conflict` (a copy meets another edge),
    `self-edge` (both ends are one rank), `not-held` (a rank sends what it doesn't have), `missing` and `duplicate`
    (contributions of a result).
    """

    code: str
    message: str
    graph: int | None = None
    step: int | None = None
    edge: int | None = None
    chunk: int | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The rows of one step, split into copies, and reductions grouped by where they land."""

    copies: IntArray  # rows of `Schedule.flows`
    reduces: IntArray  # sorted by (chunk, graph, dst)
    groups: IntArray  # index in `reduces` where each group starts


@lru_cache(maxsize=64)
def _plan(schedule: Schedule) -> tuple[_Step, ...]:
    flows = schedule.flows
    key = (flows.chunk * max(1, len(schedule.graphs)) + flows.graph) * schedule.nranks + flows.dst
    steps: list[_Step] = []
    for t in range(schedule.steps):
        rows = np.arange(flows.starts[t], flows.starts[t + 1])
        reduces = rows[flows.op[rows] == Op.REDUCE]
        reduces = reduces[np.argsort(key[reduces], kind="stable")]
        groups = np.flatnonzero(np.diff(key[reduces], prepend=-1))
        steps.append(_Step(rows[flows.op[rows] == Op.COPY], reduces, groups))
    return tuple(steps)


@lru_cache(maxsize=64)
def _static_findings(schedule: Schedule) -> tuple[Finding, ...]:
    """Faults that no table can mend or cause."""
    return (*_coverage(schedule), *_graph_findings(schedule), *_conflicts(schedule))


def _coverage(schedule: Schedule) -> list[Finding]:
    kind, n = schedule.kind, schedule.nranks
    held = {key for key, ids in schedule.blocks.items() if any(schedule.chunks[i].weight for i in ids)}
    if kind is Kind.PERMUTE:
        wanted = set(schedule.blocks)
        targets = [dst for _, dst in wanted]
        twice = sorted({dst for dst in targets if dst is not None and targets.count(dst) > 1})
        found = [Finding("overlap", f"position {d} of the permutation has several sources", rank=d) for d in twice]
    else:
        sources = range(n) if kind.has_src else (None,)
        dests = range(n) if kind.has_dst else (None,)
        wanted = {(s, d) for s in sources for d in dests}
        found: list[Finding] = []
    for src, dst in sorted(wanted - held, key=str):
        ends = ", ".join(f"{name} {p}" for name, p in (("source", src), ("destination", dst)) if p is not None)
        found.append(Finding("uncovered", f"no chunk with a weight covers the block{' of ' + ends if ends else ''}"))
    return found


def _graph_findings(schedule: Schedule) -> list[Finding]:
    found: list[Finding] = []
    owner: dict[int, int] = {}
    for g, graph in enumerate(schedule.graphs):
        for c in graph.chunks:
            if owner.setdefault(c, g) != g:
                message = f"chunk {c} moves in graphs {owner[c]} and {g}; graphs must be independent"
                found.append(Finding("shared-chunk", message, graph=g, chunk=c))
    if not schedule.kind.reduces:
        for i, edge in enumerate(schedule.edges):
            if edge.op is Op.REDUCE:
                message = f"{schedule.kind.label} only copies, but this edge reduces"
                found.append(_at_edge(schedule, i, "reduce-in-copy", message, edge.chunks[0]))
    return found


def _at_edge(schedule: Schedule, edge: int, code: str, message: str, chunk: int, rank: int | None = None) -> Finding:
    e, g = schedule.edges[edge], int(schedule.edge_graph[edge])
    where = f"graph {g}, step {e.step}, edge {edge} ({e.src} -> {e.dst}), chunk {chunk}"
    return Finding(code, f"{where}: {message}", g, e.step, edge, chunk, rank)


def _conflicts(schedule: Schedule) -> list[Finding]:
    # Permutations keep different positions on different ranks, so a conflict of positions is one under every table.
    flows = schedule.flows
    key = (flows.step * len(schedule.chunks) + flows.chunk) * schedule.nranks + flows.dst
    _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
    has_copy = np.zeros(len(counts), dtype=bool)
    has_copy[inverse[flows.op == Op.COPY]] = True
    rows = np.flatnonzero(((counts > 1) & has_copy)[inverse])
    message = "a copy and another edge write the same chunk of the same vertex"
    return [_at_edge(schedule, int(flows.edge[r]), "write-conflict", message, int(flows.chunk[r])) for r in rows]


def _table_findings(schedule: Schedule, table: Table) -> list[Finding]:
    shape = (len(schedule.graphs), schedule.steps + 1, schedule.nranks)
    if table.vertex.shape != shape:
        return [Finding("table", f"the table has the shape {table.vertex.shape}, the schedule needs {shape}")]
    home, root = table.home, schedule.collective.root
    if root is not None and home[root] != root:
        return [Finding("home", f"the table moves the root from rank {root} to rank {home[root]}", rank=home[root])]
    if schedule.kind is Kind.PERMUTE:
        wanted = {(c.src, c.dst) for c in schedule.chunks}
        moved = {(home[c.src], home[c.dst]) for c in schedule.chunks if c.src is not None and c.dst is not None}
        return [
            Finding("home", f"the table moves data from rank {s} to {d}, which the permutation doesn't ask for", rank=d)
            for s, d in sorted(moved - wanted)
        ]
    return []


def edge_ranks(schedule: Schedule, table: Table) -> tuple[IntArray, IntArray]:
    """Sending and receiving rank of every row of `schedule.flows`."""
    f = schedule.flows
    vertex = table.vertex
    return vertex[f.graph, f.step, f.src].astype(np.int64), vertex[f.graph, f.step + 1, f.dst].astype(np.int64)


def initial_counts(schedule: Schedule, table: Table) -> Counts:
    """int32 [chunks][ranks][sources]: what each rank holds before step 0; one source column if nothing is reduced."""
    n, chunks = schedule.nranks, len(schedule.chunks)
    if schedule.kind.reduces:
        return np.broadcast_to(np.eye(n, dtype=np.int32), (chunks, n, n)).copy()
    counts = np.zeros((chunks, n, 1), dtype=np.int32)
    root = schedule.collective.root
    positions = [root if c.src is None else c.src for c in schedule.chunks]
    ranks = [table.home[0 if p is None else p] for p in positions]
    counts[np.arange(chunks), ranks, 0] = 1
    return counts


def wanted_at(schedule: Schedule, table: Table) -> BoolArray:
    """bool [chunks][ranks]: which ranks need each chunk's result; chunks of weight 0 nobody needs."""
    n, chunks = schedule.nranks, schedule.chunks
    wanted = np.zeros((len(chunks), n), dtype=bool)
    if schedule.kind.has_dst:
        wanted[np.arange(len(chunks)), [table.home[c.dst or 0] for c in chunks]] = True
    elif schedule.kind is Kind.REDUCE:
        wanted[:, table.home[schedule.collective.root or 0]] = True
    else:
        wanted[:] = True
    return wanted & (np.array([c.weight for c in chunks], dtype=np.int64) > 0)[:, None]


def _simulate(schedule: Schedule, table: Table, src: IntArray, dst: IntArray) -> tuple[Counts, IntArray]:
    """Final counts, and the rows (of `schedule.flows`) that send what their rank doesn't hold."""
    counts, chunk = initial_counts(schedule, table), schedule.flows.chunk
    empty: list[IntArray] = []
    for step in _plan(schedule):
        copied = counts[chunk[step.copies], src[step.copies]]
        moved = counts[chunk[step.reduces], src[step.reduces]]
        for rows, values in ((step.copies, copied), (step.reduces, moved)):
            empty.append(rows[~values.any(axis=1)])
        counts[chunk[step.copies], dst[step.copies]] = copied
        if len(step.reduces):
            first = step.reduces[step.groups]
            at = (chunk[first], dst[first])
            counts[at] = np.minimum(counts[at] + np.add.reduceat(moved, step.groups, axis=0), _MANY)
    return counts, np.concatenate(empty) if empty else np.zeros(0, dtype=np.int64)


def valid(schedule: Schedule, table: Table | None = None) -> bool:
    """Whether `verify` finds nothing; cheaper, since it stops at the first fault and words none."""
    if _static_findings(schedule):
        return False
    table = table or Table.identity(schedule)
    if _table_findings(schedule, table):
        return False
    src, dst = edge_ranks(schedule, table)
    if (src == dst).any():
        return False
    counts, empty = _simulate(schedule, table, src, dst)
    return not len(empty) and bool((counts[wanted_at(schedule, table)] == 1).all())


def verify(schedule: Schedule, table: Table | None = None) -> list[Finding]:
    """All faults of a schedule under a table (the identity if None); an empty list means that it is valid."""
    found = list(_static_findings(schedule))
    table = table or Table.identity(schedule)
    misfit = _table_findings(schedule, table)
    found += misfit
    if any(f.code == "table" for f in misfit):
        return found
    src, dst = edge_ranks(schedule, table)
    counts, empty = _simulate(schedule, table, src, dst)
    flows = schedule.flows
    for edge in np.unique(flows.edge[src == dst]):
        row = int(np.flatnonzero(flows.edge == edge)[0])
        rank = int(src[row])
        message = f"both ends are rank {rank} under the table"
        found.append(_at_edge(schedule, int(edge), "self-edge", message, int(flows.chunk[row]), rank))
    for row in empty:
        message = f"rank {src[row]} sends it without holding it"
        place = (int(flows.edge[row]), "not-held", message, int(flows.chunk[row]), int(src[row]))
        found.append(_at_edge(schedule, *place))
    return found + _result_findings(schedule, table, counts)


def _result_findings(schedule: Schedule, table: Table, counts: Counts) -> list[Finding]:
    found: list[Finding] = []
    wrong = (counts != 1).any(axis=2) & wanted_at(schedule, table)
    for chunk, rank in np.argwhere(wrong).tolist():
        row = counts[chunk, rank]
        for code, sources in (("missing", np.flatnonzero(row == 0)), ("duplicate", np.flatnonzero(row > 1))):
            if not len(sources):
                continue
            if schedule.kind.reduces:
                what = f"contribution{'s' if len(sources) > 1 else ''} of rank{'s' if len(sources) > 1 else ''} "
                what += ", ".join(str(s) for s in sources)
            else:
                what = "its data"
            how = "without" if code == "missing" else "with more than once"
            found.append(Finding(code, f"rank {rank} ends {how} {what} in chunk {chunk}", chunk=chunk, rank=rank))
    return found


def check(schedule: Schedule, table: Table | None = None) -> None:
    """Raises `ScheduleInvalid`, with all findings, unless the schedule is valid under the table."""
    findings = verify(schedule, table)
    if findings:
        lines = [f"  {f.code}: {f.message}" for f in findings[:_SHOWN]]
        if len(findings) > _SHOWN:
            lines.append(f"  and {len(findings) - _SHOWN} more (see .findings)")
        what = f"schedule {schedule.name!r} doesn't compute {schedule.kind.label} over {schedule.nranks} ranks"
        raise ScheduleInvalid("\n".join([f"{what}; mend these:", *lines]), tuple(findings))
