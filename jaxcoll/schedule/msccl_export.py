"""A schedule as an MSCCL program.

Every value that a rank holds for a chunk gets a place of its own (the last one of a result in the output buffer, the
rest in scratch), so nothing is overwritten while somebody may still read it, and the only waits are for data to arrive.
Each connection has a threadblock at either end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.ir import Edge, Kind, Op, Schedule
from jaxcoll.schedule.msccl_model import MAX_BLOCKS, MAX_COUNT, MAX_STEPS, Gpu, Program, Step, ThreadBlock, write
from jaxcoll.schedule.table import Table
from jaxcoll.schedule.verify import check, wanted_at

Place = tuple[str, int]  # buffer, offset in units
_PEERS_A_CHANNEL = 16  # of each direction; a channel takes 32 threadblocks
_MAX_UNITS = 4096


def to_msccl(schedule: Schedule, table: Table | None = None) -> str:
    """The schedule, with the ranks of the table (the identity if None), as MSCCL XML.

    Raises `ScheduleError` for what MSCCL can't express: a permute, a schedule beyond its limits, or weights that need
    too many equal parts; `ScheduleInvalid` for an invalid schedule. A canonical order of additions is not kept.
    """
    if schedule.kind is Kind.PERMUTE:
        raise ScheduleError("MSCCL has no permute; save this schedule as .json or .jxc")
    table = table or Table.identity(schedule)
    check(schedule, table)
    program = _Export(schedule, table).program()
    for gpu in program.gpus:
        longest = max((len(b.steps) for b in gpu.blocks), default=0)
        if longest > MAX_STEPS or len(gpu.blocks) > MAX_BLOCKS:
            raise ScheduleError(
                f"schedule {schedule.name!r} needs {len(gpu.blocks)} threadblocks of up to {longest} steps on gpu "
                f"{gpu.id}; MSCCL takes {MAX_BLOCKS} of {MAX_STEPS}. Use a schedule with fewer steps or peers"
            )
    return write(program)


@dataclass
class _Rank:
    """One GPU being written: its threadblocks by peer, its scratch, and which step wrote each place last."""

    id: int
    blocks: dict[tuple[str, int], ThreadBlock] = field(default_factory=dict)
    scratch: int = 0
    writer: dict[Place, tuple[int, int]] = field(default_factory=dict)

    def block(self, role: str, peer: int, nranks: int) -> ThreadBlock:
        if (role, peer) not in self.blocks:
            distance = (peer - self.id if role == "send" else self.id - peer) % nranks
            send, recv = (peer, -1) if role == "send" else (-1, peer)
            self.blocks[role, peer] = ThreadBlock(len(self.blocks), send, recv, distance // _PEERS_A_CHANNEL)
        return self.blocks[role, peer]

    def add(self, block: ThreadBlock, step: Step, reads: list[Place], writes: list[Place]) -> None:
        """Appends a step that waits for all writers of what it reads; extra waits go on `nop` steps before it."""
        waits: dict[int, int] = {}
        for place in reads:
            if place in self.writer:
                tb, index = self.writer[place]
                waits[tb] = max(index, waits.get(tb, -1))
        waits.pop(block.id, None)
        todo = sorted(waits.items())
        for tb, index in todo[1:]:
            block.steps.append(Step("nop", depid=tb, deps=index))
        if todo:
            step.depid, step.deps = todo[0]
        block.steps.append(step)
        for place in writes:
            self.writer[place] = (block.id, len(block.steps) - 1)


@dataclass(frozen=True)
class _Move:
    """One chunk on one edge: where it is read, what it is combined with at the receiver, and where it goes."""

    size: int
    read: Place
    local: Place | None
    write: Place

    def continues(self, before: _Move) -> bool:
        """Whether this move can share a step with `before`: all its places follow on."""
        pairs = [(before.read, self.read), (before.write, self.write)]
        if (before.local is None) != (self.local is None):
            return False
        if before.local is not None and self.local is not None:
            pairs.append((before.local, self.local))
        return all(a[0] == b[0] and a[1] + before.size == b[1] for a, b in pairs)


def _places(place: Place, size: int) -> list[Place]:
    return [(place[0], place[1] + i) for i in range(size)]


class _Export:
    def __init__(self, schedule: Schedule, table: Table):
        self.schedule, self.table = schedule, table
        self.units, self.spans = _units(schedule)
        self.ranks = [_Rank(r) for r in range(schedule.nranks)]
        self.wanted = wanted_at(schedule, table)
        self.place: dict[tuple[int, int], Place] = {}  # (chunk, rank) -> where its value lies
        self.last: dict[tuple[int, int], int] = {}  # (chunk, rank) -> the last step that writes it
        vertex = table.vertex.tolist()
        graphs = zip(schedule.edges, schedule.edge_graph.tolist(), strict=True)
        self.routes = [
            (i, e, vertex[g][e.step][e.src], vertex[g][e.step + 1][e.dst]) for i, (e, g) in enumerate(graphs)
        ]
        for _, e, _, dst in self.routes:
            for c in e.chunks:
                self.last[c, dst] = max(self.last.get((c, dst), 0), e.step)

    def program(self) -> Program:
        s, kind = self.schedule, self.schedule.kind
        self._start()
        for t in range(s.steps):
            self._step(t, [route for route in self.routes if route[1].step == t])
        self._finish()
        blocks = max(s.collective.input_blocks, s.collective.output_blocks)
        program = Program(s.name, kind, s.nranks, self.units * blocks, root=s.collective.root or 0, pipeline=s.pipeline)
        sizes = (self.units * s.collective.input_blocks, self.units * s.collective.output_blocks)
        for rank in self.ranks:
            gpu = Gpu(rank.id, *sizes, rank.scratch, sorted(rank.blocks.values(), key=lambda b: b.id))
            for step in [step for b in gpu.blocks for step in b.steps if step.depid >= 0]:
                gpu.blocks[step.depid].steps[step.deps].hasdep = 1
            program.gpus.append(gpu)
        return program

    def _input(self, chunk: int) -> Place:
        dst = self.schedule.chunks[chunk].dst
        block = self.table.home[dst] if self.schedule.collective.input_blocks > 1 and dst is not None else 0
        return "i", block * self.units + self.spans[chunk][0]

    def _output(self, chunk: int) -> Place:
        src = self.schedule.chunks[chunk].src
        block = self.table.home[src] if self.schedule.collective.output_blocks > 1 and src is not None else 0
        return "o", block * self.units + self.spans[chunk][0]

    def _size(self, chunk: int) -> int:
        return self.spans[chunk][1] - self.spans[chunk][0]

    def _start(self) -> None:
        for c, chunk in enumerate(self.schedule.chunks):
            if self.schedule.kind.reduces:
                holders = list(range(self.schedule.nranks))
            else:
                position = self.schedule.collective.root if chunk.src is None else chunk.src
                holders = [self.table.home[position or 0]]
            for rank in holders:
                self.place[c, rank] = self._input(c)

    def _new_place(self, chunk: int, rank: int, t: int) -> Place:
        if self.wanted[chunk, rank] and self.last[chunk, rank] == t:
            return self._output(chunk)
        start = self.ranks[rank].scratch
        self.ranks[rank].scratch += self._size(chunk)
        return "s", start

    def _step(self, t: int, routes: list[tuple[int, Edge, int, int]]) -> None:
        fresh: dict[tuple[int, int], Place] = {}
        for i, e, src, dst in routes:
            moves: list[_Move] = []
            for c in sorted((c for c in e.chunks if self._size(c)), key=lambda c: self.place[c, src]):
                local = fresh.get((c, dst)) or (self.place.get((c, dst)) if e.op is Op.REDUCE else None)
                if (c, dst) not in fresh:
                    fresh[c, dst] = self._new_place(c, dst, t)
                moves.append(_Move(self._size(c), self.place[c, src], local, fresh[c, dst]))
            self._send(t, i, src, dst, moves)
        self.place.update(fresh)

    def _send(self, t: int, edge: int, src: int, dst: int, moves: list[_Move]) -> None:
        n = self.schedule.nranks
        for move in _joined(moves):
            s = Step("s", move.read[0], move.read[1], move.write[0], move.write[1], move.size, ten=t, edge=edge)
            self.ranks[src].add(self.ranks[src].block("send", dst, n), s, _places(move.read, move.size), [])
            # A receive names the sender's place as its source, a combining one its own local operand.
            source = move.read if move.local is None else move.local
            kind = "r" if move.local is None else "rrc"
            r = Step(kind, source[0], source[1], move.write[0], move.write[1], move.size, ten=t, edge=edge)
            reads = [] if move.local is None else _places(move.local, move.size)
            block = self.ranks[dst].block("recv", src, n)
            self.ranks[dst].add(block, r, reads, _places(move.write, move.size))

    def _finish(self) -> None:
        for c, rank in zip(*self.wanted.nonzero(), strict=True):
            place = self.place[int(c), int(rank)]
            if place[0] != "o" and self._size(int(c)):
                out, owner = self._output(int(c)), self.ranks[int(rank)]
                step = Step("cpy", place[0], place[1], out[0], out[1], self._size(int(c)))
                owner.add(self._local_block(owner), step, _places(place, step.cnt), _places(out, step.cnt))

    @staticmethod
    def _local_block(rank: _Rank) -> ThreadBlock:
        return rank.blocks.setdefault(("local", -1), ThreadBlock(len(rank.blocks), -1, -1, 0))


def _joined(moves: list[_Move]) -> list[_Move]:
    """Neighbouring moves made one, as far as MSCCL's count goes."""
    joined: list[_Move] = []
    for move in moves:
        if joined and move.continues(joined[-1]) and joined[-1].size + move.size < MAX_COUNT:
            before = joined.pop()
            move = _Move(before.size + move.size, before.read, before.local, before.write)
        joined += _split(move)
    return joined


def _split(move: _Move) -> list[_Move]:
    def shifted(place: Place, by: int) -> Place:
        return place[0], place[1] + by

    top = MAX_COUNT - 1
    return [
        _Move(
            min(top, move.size - i),
            shifted(move.read, i),
            None if move.local is None else shifted(move.local, i),
            shifted(move.write, i),
        )
        for i in range(0, move.size, top)
    ]


def _units(schedule: Schedule) -> tuple[int, list[tuple[int, int]]]:
    """Equal units in a block so that every chunk is a whole number of them, and each chunk's span in its block."""
    common = math.gcd(*(c.weight for c in schedule.chunks))
    totals = [sum(schedule.chunks[i].weight for i in ids) // common for ids in schedule.blocks.values()]
    units = math.lcm(*totals)
    if units > _MAX_UNITS:
        raise ScheduleError(f"the weights need {units} equal parts in MSCCL, over {_MAX_UNITS}; use simpler ones")
    spans = [(0, 0)] * len(schedule.chunks)
    for ids, total in zip(schedule.blocks.values(), totals, strict=True):
        at = 0
        for i in ids:
            size = schedule.chunks[i].weight // common * (units // total)
            spans[i] = (at, at + size)
            at += size
    return units, spans
