"""MSCCL's program form (an XML file): its data model, reader and writer.

A program holds, for every GPU, threadblocks that run their steps in order, beside each other; each has at most one peer
to send to and one to receive from. Sends and receives match in order for each (sender, receiver, channel). A step may
wait for one step of another threadblock of its GPU (`depid`, `deps`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.ir import Kind

COLLECTIVES = {
    "allreduce": Kind.ALL_REDUCE,
    "allgather": Kind.ALL_GATHER,
    "reduce_scatter": Kind.REDUCE_SCATTER,
    "alltoall": Kind.ALL_TO_ALL,
    "reduce": Kind.REDUCE,
    "broadcast": Kind.BROADCAST,
}
SENDS = ("s", "rcs", "rrs", "rrcs")
RECEIVES = ("r", "rcs", "rrs", "rrc", "rrcs")
TYPES = ("s", "r", "rcs", "rrs", "rrc", "rrcs", "cpy", "re", "nop")
BUFFERS = ("i", "o", "s")

MAX_STEPS, MAX_COUNT, MAX_BLOCKS = 256, 72, 216  # limits of the MSCCL runtimes: steps a block, count, blocks a GPU
_MAX_ITEMS = 1 << 20  # bound on any number in a file: far above every real program, far below trouble


@dataclass
class Step:
    """One step; `ten` and `edge`, which MSCCL ignores, are the step and the edge of the schedule it came from."""

    type: str
    srcbuf: str = "i"
    srcoff: int = -1
    dstbuf: str = "o"
    dstoff: int = -1
    cnt: int = 0
    depid: int = -1
    deps: int = -1
    hasdep: int = 0
    ten: int | None = None
    edge: int | None = None
    line: int = 0


@dataclass
class ThreadBlock:
    id: int
    send: int
    recv: int
    chan: int
    steps: list[Step] = field(default_factory=list)
    line: int = 0


@dataclass
class Gpu:
    id: int
    i_chunks: int
    o_chunks: int
    s_chunks: int
    blocks: list[ThreadBlock] = field(default_factory=list)
    line: int = 0


@dataclass
class Program:
    """An `<algo>`; `pipeline` and `root` are jaxcoll's own attributes, which other readers ignore."""

    name: str
    kind: Kind
    ngpus: int
    nchunksperloop: int
    inplace: bool = False
    root: int = 0
    pipeline: int = 1
    gpus: list[Gpu] = field(default_factory=list)
    line: int = 0

    @property
    def units(self) -> int:
        """Equal parts of a block."""
        blocks = self.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)
        return self.nchunksperloop // self.ngpus if blocks else self.nchunksperloop


def write(program: Program) -> str:
    """The program as XML text."""
    p = program
    label = next(name for name, kind in COLLECTIVES.items() if kind is p.kind)
    channels = 1 + max((b.chan for g in p.gpus for b in g.blocks), default=0)
    head: dict[str, Any] = {
        "name": p.name,
        "proto": "Simple",
        "nchannels": channels,
        "nchunksperloop": p.nchunksperloop,
    }
    head |= {"ngpus": p.ngpus, "coll": label, "inplace": int(p.inplace), "outofplace": int(not p.inplace)}
    head |= {"minBytes": 0, "maxBytes": 1 << 40, "pipeline": p.pipeline}
    head |= {"root": p.root} if p.kind.rooted else {}
    lines = [f"<algo{_attributes(head)}>"]
    for g in p.gpus:
        sizes = {"id": g.id, "i_chunks": g.i_chunks, "o_chunks": g.o_chunks, "s_chunks": g.s_chunks}
        lines.append(f"  <gpu{_attributes(sizes)}>")
        for b in g.blocks:
            lines.append(f"    <tb{_attributes({'id': b.id, 'send': b.send, 'recv': b.recv, 'chan': b.chan})}>")
            lines += [f"      <step{_attributes(_step_fields(i, s))}/>" for i, s in enumerate(b.steps)]
            lines.append("    </tb>")
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>", ""])


def _step_fields(index: int, s: Step) -> dict[str, Any]:
    fields: dict[str, Any] = {"s": index, "type": s.type, "srcbuf": s.srcbuf, "srcoff": s.srcoff}
    fields |= {"dstbuf": s.dstbuf, "dstoff": s.dstoff, "cnt": s.cnt}
    fields |= {"depid": s.depid, "deps": s.deps, "hasdep": s.hasdep}
    return fields | {name: v for name, v in (("ten", s.ten), ("edge", s.edge)) if v is not None}


def _attributes(fields: dict[str, Any]) -> str:
    return "".join(f" {name}={quoteattr(str(value))}" for name, value in fields.items())


@dataclass
class _Element:
    """An XML element with its line."""

    source: str
    tag: str
    attributes: dict[str, str]
    line: int
    children: list[_Element] = field(default_factory=list)

    def error(self, what: str) -> ScheduleError:
        return ScheduleError(f"{self.source}, line {self.line}, <{self.tag}>: {what}")

    def text(self, name: str, known: tuple[str, ...] | None = None) -> str:
        value = self.attributes.get(name)
        if value is None:
            raise self.error(f"the attribute {name!r} is missing")
        if known is not None and value not in known:
            raise self.error(f"{name}={value!r}; known are {', '.join(known)}")
        return value

    def number(self, name: str, low: int, high: int, default: int | None = None) -> int:
        if name not in self.attributes and default is not None:
            return default
        raw = self.text(name)
        try:
            value = int(raw)
        except ValueError:
            raise self.error(f"{name}={raw!r} is no integer") from None
        if not low <= value <= high:
            raise self.error(f"{name}={value} lies outside {low}..{high}")
        return value

    def of(self, tag: str) -> list[_Element]:
        for child in self.children:
            if child.tag != tag:
                raise child.error(f"unexpected here; <{self.tag}> holds <{tag}> elements")
        return self.children


def _parse(text: str, source: str) -> _Element:
    root = _Element(source, "document", {}, 1)
    open_elements = [root]
    parser = expat.ParserCreate()

    def start(tag: str, attributes: dict[str, str]) -> None:
        element = _Element(source, tag, attributes, parser.CurrentLineNumber)
        open_elements[-1].children.append(element)
        open_elements.append(element)

    def doctype(*_: object) -> None:  # entities could make a small file unfold without bound
        raise ScheduleError(f"{source}, line {parser.CurrentLineNumber}: a DOCTYPE isn't accepted; remove it")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: open_elements.pop()
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        what = expat.errors.messages[error.code]
        raise ScheduleError(f"{source}, line {error.lineno}, column {error.offset + 1}: no XML: {what}") from None
    return root.of("algo")[0]


def read(text: str, source: str = "MSCCL XML") -> Program:
    """Reads XML text; a `ScheduleError` names `source`, the line and the element that is wrong."""
    algo = _parse(text, source)
    ngpus = algo.number("ngpus", 1, 32767)
    program = Program(
        name=algo.attributes.get("name", "msccl"),
        kind=COLLECTIVES[algo.text("coll", tuple(COLLECTIVES))],
        ngpus=ngpus,
        nchunksperloop=algo.number("nchunksperloop", 1, _MAX_ITEMS),
        inplace=bool(algo.number("inplace", 0, 1, 0)),
        root=algo.number("root", 0, ngpus - 1, 0),
        pipeline=algo.number("pipeline", 1, 65535, 1),
        line=algo.line,
    )
    if program.units * (program.nchunksperloop // program.units if program.units else 0) != program.nchunksperloop:
        raise algo.error(f"nchunksperloop={program.nchunksperloop} isn't a multiple of ngpus={ngpus}")
    gpus = sorted((_gpu(e, ngpus) for e in algo.of("gpu")), key=lambda g: g.id)
    if [g.id for g in gpus] != list(range(ngpus)):
        raise algo.error(f"the gpus have the ids {[g.id for g in gpus]}; wanted 0..{ngpus - 1}, each once")
    program.gpus = gpus
    return program


def _gpu(element: _Element, ngpus: int) -> Gpu:
    i, o, s = (element.number(name, 0, _MAX_ITEMS) for name in ("i_chunks", "o_chunks", "s_chunks"))
    gpu = Gpu(element.number("id", 0, ngpus - 1), i, o, s, line=element.line)
    gpu.blocks = [_block(e, ngpus, gpu.id) for e in element.of("tb")]
    if [b.id for b in gpu.blocks] != list(range(len(gpu.blocks))):
        raise element.error(f"the threadblocks have the ids {[b.id for b in gpu.blocks]}; wanted 0, 1, ... in order")
    for block, tb in zip(gpu.blocks, element.children, strict=True):
        for step, e in zip(block.steps, tb.children, strict=True):
            if step.depid >= 0 and not (step.depid < len(gpu.blocks) and step.deps < len(gpu.blocks[step.depid].steps)):
                raise e.error(f"waits for step {step.deps} of threadblock {step.depid}, which doesn't exist")
    return gpu


def _block(element: _Element, ngpus: int, gpu: int) -> ThreadBlock:
    peers = [element.number(name, -1, ngpus - 1) for name in ("send", "recv")]
    if gpu in peers:
        raise element.error(f"gpu {gpu} can't be its own peer")
    block = ThreadBlock(
        element.number("id", 0, _MAX_ITEMS),
        peers[0],
        peers[1],
        element.number("chan", -1, _MAX_ITEMS, 0),
        line=element.line,
    )
    for index, e in enumerate(element.of("step")):
        if e.number("s", 0, _MAX_ITEMS) != index:
            raise e.error(f"s={e.attributes['s']}; the steps of a threadblock are numbered 0, 1, ... in order")
        block.steps.append(_step(e, block))
    return block


def _step(e: _Element, block: ThreadBlock) -> Step:
    kind = e.text("type", TYPES)
    for needed, peer, name in ((SENDS, block.send, "send"), (RECEIVES, block.recv, "recv")):
        if kind in needed and peer < 0:
            raise e.error(f"type {kind!r} needs a peer, but its threadblock has {name}=-1")
    depid = e.number("depid", -1, _MAX_ITEMS, -1)
    return Step(
        kind,
        e.text("srcbuf", BUFFERS) if kind != "nop" else "i",
        e.number("srcoff", -1, _MAX_ITEMS, -1),
        e.text("dstbuf", BUFFERS) if kind != "nop" else "o",
        e.number("dstoff", -1, _MAX_ITEMS, -1),
        e.number("cnt", 0, _MAX_ITEMS, 0),
        depid,
        e.number("deps", 0, _MAX_ITEMS) if depid >= 0 else -1,
        e.number("hasdep", 0, 1, 0),
        e.number("ten", 0, 65535) if "ten" in e.attributes else None,
        e.number("edge", 0, _MAX_ITEMS) if "edge" in e.attributes else None,
        e.line,
    )
