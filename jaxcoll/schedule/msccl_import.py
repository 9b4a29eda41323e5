"""An MSCCL program as a schedule.

The program is run symbolically, in an order that its waits allow: every place in a buffer holds a value of one unit
(the smallest equal part of a block). In a schedule a rank has one value of a unit at a time, its `version`; a value
that was received but not yet combined is `pending`, and becomes a version when sent on, combined, or found in the
output.
Then every version gets the earliest step that the versions before it allow.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace

import networkx as nx

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.ir import Chunk, Collective, Edge, Kind, Op, Schedule, independent_graphs, joined_edges
from jaxcoll.schedule.msccl_model import RECEIVES, SENDS, Program, Step, read
from jaxcoll.schedule.orders import bit_equal
from jaxcoll.schedule.verify import check

Unit = tuple[int | None, int | None, int]  # source position, destination position, index in the block
Place = tuple[int, str, int]  # rank, buffer, offset
Node = tuple[int, int, int]  # rank, threadblock, step
_GRAPHS_A_RANK = 4  # a table has a row for every graph and step: an AllToAll's single edges would make it huge


@dataclass(eq=False)
class _Transfer:
    """One unit sent: which version it reads, and where it is combined."""

    src: int
    dst: int
    unit: Unit
    reads: _Version
    step: Step


@dataclass(eq=False)
class _Version:
    """A value that a rank holds of a unit: the one before it, changed by transfers; `initial` is the input."""

    rank: int
    unit: Unit
    op: Op = Op.COPY
    transfers: list[_Transfer] = field(default_factory=list)
    readers: list[_Transfer] = field(default_factory=list)
    successor: _Version | None = None
    initial: bool = False


@dataclass(eq=False)
class _Value:
    """What lies at a place: a version, or transfers that are still to be combined (`pending`)."""

    unit: Unit
    version: _Version | None
    pending: list[_Transfer]


def from_msccl(text: str, source: str = "MSCCL XML") -> Schedule:
    """The schedule of an MSCCL program.

    Raises `ScheduleError` (with line and element) for a broken file, a program whose waits form a cycle, whose steps
    race for a place, or that holds two different values of the same data on one rank, which a schedule can't express;
    and `ScheduleInvalid` for a program that doesn't compute its collective.
    """
    program = read(text, source)
    schedule = _Import(program, source).schedule()
    check(schedule)
    if not bit_equal(schedule):
        ordered = replace(schedule, canonical=True)
        return ordered if bit_equal(ordered) else schedule
    return schedule


class _Import:
    def __init__(self, program: Program, source: str):
        self.program, self.source = program, source
        self.kind, self.n, self.units = program.kind, program.ngpus, program.units
        self.collective = Collective(self.kind, self.n, program.root if self.kind.rooted else None)
        self.values: dict[Place, _Value] = {}
        self.latest: dict[tuple[int, Unit], _Version] = {}
        self.versions: list[_Version] = []

    def error(self, step: Step | None, what: str) -> ScheduleError:
        line, tag = (self.program.line, "algo") if step is None else (step.line, "step")
        return ScheduleError(f"{self.source}, line {line}, <{tag}>: {what}")

    def schedule(self) -> Schedule:
        self._load_inputs()
        nodes, sends, before = _linked(self)
        _check_races(self, nodes, before)
        sent: dict[Node, list[_Transfer]] = {}
        for node in nodes:
            step = self.at(node)
            arrived = sent.pop(sends[node]) if node in sends else []
            self._run(node, step, arrived, sent)
        self._collect_outputs()
        return _Assembly(self).schedule()

    def at(self, node: Node) -> Step:
        return self.program.gpus[node[0]].blocks[node[1]].steps[node[2]]

    # Where data lies.

    def place(self, rank: int, buffer: str, offset: int) -> Place:
        """A place, by one name only: in place, the output buffer is the input buffer."""
        if self.program.inplace and buffer == "i":
            shift = rank * self.units if self.kind is Kind.ALL_GATHER else 0
            return rank, "o", offset + shift
        if self.program.inplace and buffer == "o" and self.kind is Kind.REDUCE_SCATTER:
            return rank, "o", offset + rank * self.units
        return rank, buffer, offset

    def places(self, rank: int, buffer: str, offset: int, step: Step) -> list[Place]:
        gpu = self.program.gpus[rank]
        size = {"i": gpu.i_chunks, "o": gpu.o_chunks, "s": gpu.s_chunks}[buffer]
        if self.program.inplace and buffer != "s":
            size = self.program.nchunksperloop  # either name may be declared empty
        if not 0 <= offset <= offset + step.cnt <= size:
            raise self.error(
                step, f"{buffer}[{offset}:{offset + step.cnt}] lies outside the {size} chunks of gpu {rank}"
            )
        return [self.place(rank, buffer, offset + i) for i in range(step.cnt)]

    def _load_inputs(self) -> None:
        for rank in range(self.n):
            if self.kind is Kind.BROADCAST and rank != self.program.root:
                continue
            for offset in range(self.units * self.collective.input_blocks):
                block, index = divmod(offset, self.units)
                unit = (rank if self.kind.has_src else None, block if self.kind.has_dst else None, index)
                version = _Version(rank, unit, initial=True)
                self.latest[rank, unit] = version
                self.versions.append(version)
                self.values[self.place(rank, "i", offset)] = _Value(unit, version, [])

    def _collect_outputs(self) -> None:
        for rank in range(self.n):
            if self.kind is Kind.REDUCE and rank != self.program.root:
                continue
            for offset in range(self.units * self.collective.output_blocks):
                block, index = divmod(offset, self.units)
                unit = (block if self.kind.has_src else None, rank if self.kind.has_dst else None, index)
                value = self.values.get(self.place(rank, "o", offset))
                if value is None or value.unit != unit:
                    found = "nothing" if value is None else f"data {_named(value.unit)}"
                    raise self.error(None, f"gpu {rank} ends with {found} in o[{offset}], wanted data {_named(unit)}")
                if self._version(rank, value, None) is not self.latest[rank, unit]:
                    raise self.error(None, f"gpu {rank} goes on with data {_named(unit)} after o[{offset}] is complete")

    # What a step does.

    def _run(self, node: Node, step: Step, arrived: list[_Transfer], sent: dict[Node, list[_Transfer]]) -> None:
        rank, kind = node[0], step.type
        if kind == "nop":
            return
        results: list[_Value] = []
        if kind in RECEIVES and len(arrived) != step.cnt:
            raise self.error(step, f"cnt={step.cnt}, but its sender sends {len(arrived)} chunks")
        if kind == "r" or kind == "rcs":
            results = [self._received(t) for t in arrived]
        elif kind in ("rrc", "rrs", "rrcs"):
            local = self._read(self.places(rank, step.srcbuf, step.srcoff, step), step)
            results = [self._reduced(rank, v, t, step) for v, t in zip(local, arrived, strict=True)]
        elif kind in ("cpy", "s"):
            results = self._read(self.places(rank, step.srcbuf, step.srcoff, step), step)
        elif kind == "re":
            mine = self._read(self.places(rank, step.dstbuf, step.dstoff, step), step)
            other = self._read(self.places(rank, step.srcbuf, step.srcoff, step), step)
            results = [self._merged(rank, a, b, step) for a, b in zip(mine, other, strict=True)]
        if kind in ("r", "rcs", "rrc", "rrcs", "cpy", "re"):
            targets = self.places(rank, step.dstbuf, step.dstoff, step)
            self.values.update(zip(targets, results, strict=True))
        if kind in SENDS:
            peer = self.program.gpus[rank].blocks[node[1]].send
            sent[node] = [self._send(rank, peer, value, step) for value in results]

    def _read(self, places: list[Place], step: Step) -> list[_Value]:
        for place in places:
            if place not in self.values:
                raise self.error(step, f"reads {place[1]}[{place[2]}] of gpu {place[0]} before anything is there")
        return [self.values[p] for p in places]

    def _send(self, rank: int, peer: int, value: _Value, step: Step) -> _Transfer:
        version = self._version(rank, value, step)
        transfer = _Transfer(rank, peer, value.unit, version, step)
        version.readers.append(transfer)
        return transfer

    def _received(self, transfer: _Transfer) -> _Value:
        value = _Value(transfer.unit, None, [transfer])
        if not self.kind.reduces:  # nothing will be added to it
            self._version(transfer.dst, value, None)
        return value

    def _reduced(self, rank: int, local: _Value, transfer: _Transfer, step: Step) -> _Value:
        return self._merged(rank, local, _Value(transfer.unit, None, [transfer]), step)

    def _merged(self, rank: int, a: _Value, b: _Value, step: Step) -> _Value:
        if a.unit != b.unit:
            raise self.error(step, f"adds data {_named(b.unit)} to data {_named(a.unit)}")
        if a.version is None and b.version is None:
            return _Value(a.unit, None, [*a.pending, *b.pending])
        held, other = (a, b) if a.version is not None else (b, a)
        if other.version is not None:
            raise self.error(step, f"adds two values of data {_named(a.unit)} that gpu {rank} holds already")
        return _Value(a.unit, self._extended(rank, held.version, other.pending, step), [])

    # Versions.

    def _version(self, rank: int, value: _Value, step: Step | None) -> _Version:
        """The value as a version; pending transfers replace what the rank holds."""
        if value.version is None:
            key = (rank, value.unit)
            first, rest = value.pending[:1], value.pending[1:]
            if key in self.latest:
                copied = self._added(rank, value.unit, Op.COPY, first)
                value.version = self._extended(rank, copied, rest, step) if rest else copied
            else:
                op = Op.REDUCE if rest else Op.COPY
                value.version = self._added(rank, value.unit, op, value.pending)
        return value.version

    def _extended(self, rank: int, version: _Version | None, transfers: list[_Transfer], step: Step | None) -> _Version:
        assert version is not None
        if version is not self.latest[rank, version.unit]:
            raise self.error(
                step,
                f"uses an older value of data {_named(version.unit)}; a schedule keeps one value a rank, the newest",
            )
        for transfer in transfers:
            version = self._added(rank, version.unit, Op.REDUCE, [transfer])
        return version

    def _added(self, rank: int, unit: Unit, op: Op, transfers: list[_Transfer]) -> _Version:
        before = self.latest.get((rank, unit))
        tens = {t.step.ten for t in transfers}
        joins = (
            op is Op.REDUCE
            and before is not None
            and before.op is Op.REDUCE
            and not before.readers
            and not before.initial
            and tens == {t.step.ten for t in before.transfers}
        )
        if joins and before is not None:  # nobody saw the value in between: one step takes both
            before.transfers += transfers
            return before
        version = _Version(rank, unit, op, list(transfers))
        if before is not None:
            before.successor = version
        self.latest[rank, unit] = version
        self.versions.append(version)
        return version


def _named(unit: Unit) -> str:
    ends = [f"{name} {p}" for name, p in (("from", unit[0]), ("for", unit[1])) if p is not None]
    return " ".join([str(unit[2]), *ends])


def _linked(run: _Import) -> tuple[list[Node], dict[Node, Node], dict[Node, list[Node]]]:
    """All steps in an order that their waits allow; each receive's send; and what each step waits for."""
    waits: dict[Node, list[Node]] = {}
    sends: dict[tuple[int, int, int], list[Node]] = defaultdict(list)
    receives: dict[tuple[int, int, int], list[Node]] = defaultdict(list)
    for gpu in run.program.gpus:
        for block in gpu.blocks:
            for i, step in enumerate(block.steps):
                node = (gpu.id, block.id, i)
                waits[node] = [(gpu.id, block.id, i - 1)] if i else []
                if step.depid >= 0:
                    waits[node].append((gpu.id, step.depid, step.deps))
                if step.type in SENDS:
                    sends[gpu.id, block.send, block.chan].append(node)
                if step.type in RECEIVES:
                    receives[block.recv, gpu.id, block.chan].append(node)
    matched: dict[Node, Node] = {}
    for key in sorted({*sends, *receives}):
        out, into = sends[key], receives[key]
        owners = {(side, n[1]) for side, part in (("send", out), ("recv", into)) for n in part}
        if len(owners) > 2 or len(out) != len(into):
            longer, shorter = sorted((out, into), key=len, reverse=True)
            node = longer[min(len(shorter), len(longer) - 1)]  # the first without a partner
            way = f"{key[0]} -> {key[1]} on channel {key[2]}"
            what = f"{way}: {len(out)} sends, but {len(into)} receives"
            if len(owners) > 2:
                what = f"{way}: several threadblocks share this connection; give each a channel"
            raise run.error(run.at(node), what)
        matched.update(zip(into, out, strict=True))
    for receive, send in matched.items():
        waits[receive].append(send)
    return _ordered(run, waits), matched, waits


def _ordered(run: _Import, waits: dict[Node, list[Node]]) -> list[Node]:
    left = {node: len(before) for node, before in waits.items()}
    then: dict[Node, list[Node]] = defaultdict(list)
    for node, before in waits.items():
        for b in before:
            then[b].append(node)
    ready = deque(sorted(node for node, count in left.items() if count == 0))
    ordered: list[Node] = []
    while ready:
        node = ready.popleft()
        ordered.append(node)
        for after in then[node]:
            left[after] -= 1
            if left[after] == 0:
                ready.append(after)
    if len(ordered) < len(waits):
        stuck = nx.DiGraph((b, node) for node, before in waits.items() if left[node] for b in before if left[b])
        cycle = [tail for tail, _ in nx.find_cycle(stuck)]
        way = " -> ".join(f"gpu {g} tb {b} step {s} (line {run.at((g, b, s)).line})" for g, b, s in cycle)
        raise run.error(run.at(cycle[0]), f"deadlock: these steps wait for each other: {way}")
    return ordered


def _check_races(run: _Import, nodes: list[Node], before: dict[Node, list[Node]]) -> None:
    """Two steps that touch one place, one of them writing, must be ordered by waits."""
    bit = {node: 1 << i for i, node in enumerate(nodes)}
    past: dict[Node, int] = {}
    writer: dict[Place, Node] = {}
    readers: dict[Place, list[Node]] = defaultdict(list)
    for node in nodes:
        past[node] = 0
        for b in before[node]:
            past[node] |= past[b] | bit[b]
        reads, writes = _touched(run, node)
        for place in [*reads, *writes]:
            earlier = [writer[place]] if place in writer else []
            if place in writes:
                earlier += readers[place]
            for other in earlier:
                if other != node and not past[node] & bit[other]:
                    what = f"{place[1]}[{place[2]}] of gpu {place[0]} with the step on line {run.at(other).line}"
                    cure = "make one wait for the other (depid, deps)"
                    raise run.error(run.at(node), f"races for {what}; {cure}")
        for place in reads:
            readers[place].append(node)
        for place in writes:
            writer[place], readers[place] = node, []


def _touched(run: _Import, node: Node) -> tuple[list[Place], set[Place]]:
    step, rank = run.at(node), node[0]
    reads: list[Place] = []
    if step.type in ("s", "rrc", "rrs", "rrcs", "cpy", "re"):
        reads += run.places(rank, step.srcbuf, step.srcoff, step)
    if step.type == "re":
        reads += run.places(rank, step.dstbuf, step.dstoff, step)
    writes = step.type in ("r", "rcs", "rrc", "rrcs", "cpy", "re")
    return reads, set(run.places(rank, step.dstbuf, step.dstoff, step)) if writes else set()


class _Assembly:
    """Steps for versions, then edges, chunks and graphs."""

    def __init__(self, run: _Import):
        self.run = run
        self.versions = [v for v in run.versions if v.transfers]

    def schedule(self) -> Schedule:
        at = self._steps()
        # Sorted by step, then by the named edge or the turn, so that edges stand in the order of their additions.
        parts: dict[tuple[int, int, int, int, int, int, Op], list[Unit]] = defaultdict(list)
        for v in self.versions:
            for turn, t in enumerate(v.transfers):
                named = t.step.edge is not None
                order = (t.step.edge or 0, 0) if named else (turn, t.step.line)
                parts[at[id(v)], int(not named), *order, t.dst, t.src, v.op].append(t.unit)
        rows = sorted(parts.items())
        chunks, chunk_of = self._chunks([units for _, units in rows])
        edges = [
            Edge(step, src, dst, op, tuple(sorted({chunk_of[u] for u in units})))
            for (step, _, _, _, dst, src, op), units in rows
        ]
        program = self.run.program
        steps = 1 + max((e.step for e in edges), default=-1)
        graphs = independent_graphs(edges, "part", limit=_GRAPHS_A_RANK * self.run.n)
        graphs = tuple(joined_edges(g) for g in graphs)
        return Schedule(program.name, self.run.collective, steps, chunks, graphs, program.pipeline)

    def _steps(self) -> dict[int, int]:
        """The earliest step of every version, by id.

        A version comes at least one step after those it reads; a version that replaces another comes no earlier than
        the transfers that read the old one, which may happen in the same step. So versions that need each other in one
        step (an exchange) form a component of equal steps.
        """
        graph = nx.DiGraph()
        floor: dict[int, int] = {}
        for v in self.versions:
            graph.add_node(id(v))
            floor[id(v)] = max((t.step.ten for t in v.transfers if t.step.ten is not None), default=0)

        def after(first: int, then: int, gap: int) -> None:
            gap = max(gap, graph.edges[first, then]["gap"]) if graph.has_edge(first, then) else gap
            graph.add_edge(first, then, gap=gap)

        for v in self.versions:
            for t in v.transfers:
                if t.reads.transfers:
                    after(id(t.reads), id(v), 1)
                if t.reads.successor is not None:
                    after(id(v), id(t.reads.successor), 0)
            if v.successor is not None:
                after(id(v), id(v.successor), 1)
        return self._longest(graph, floor)

    def _longest(self, graph: nx.DiGraph[int], floor: dict[int, int]) -> dict[int, int]:
        whole = nx.condensation(graph)
        member: dict[int, int] = whole.graph["mapping"]
        for first, then, gap in graph.edges(data="gap"):
            if gap and member[first] == member[then]:
                raise self.run.error(
                    None, "a rank sends a value after it was replaced; a schedule keeps only the newest"
                )
        at: dict[int, int] = {}
        for part in nx.topological_sort(whole):
            inside = whole.nodes[part]["members"]
            at[part] = max(floor[v] for v in inside)
            for v in inside:
                for first, _, gap in graph.in_edges(v, data="gap"):
                    if member[first] != part:
                        at[part] = max(at[part], at[member[first]] + gap)
        return {v: at[member[v]] for v in graph}

    def _chunks(self, rows: list[list[Unit]]) -> tuple[tuple[Chunk, ...], dict[Unit, int]]:
        """Neighbouring units of a block that always travel together, as one chunk."""
        ways: dict[Unit, list[int]] = defaultdict(list)
        for i, units in enumerate(rows):
            for unit in units:
                ways[unit].append(i)
        run, chunks, chunk_of = self.run, list[Chunk](), dict[Unit, int]()
        sources = range(run.n) if run.kind.has_src else (None,)
        dests = range(run.n) if run.kind.has_dst else (None,)
        for src in sources:
            for dst in dests:
                for k in range(run.units):
                    unit = (src, dst, k)
                    if k and ways[unit] == ways[src, dst, k - 1]:
                        chunks[-1] = replace(chunks[-1], weight=chunks[-1].weight + 1)
                    else:
                        chunks.append(Chunk(src, dst))
                    chunk_of[unit] = len(chunks) - 1
        common = math.gcd(*(c.weight for c in chunks))
        return tuple(replace(c, weight=c.weight // common) for c in chunks), chunk_of
