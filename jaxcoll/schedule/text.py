"""The text form of a schedule: JSON, one chunk or edge a line, so that a person can read, write and diff it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.ir import Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule

FORMAT = "jaxcoll-schedule"
VERSION = 1
_OPS = {"copy": Op.COPY, "reduce": Op.REDUCE}


def dumps(schedule: Schedule) -> str:
    """The schedule as JSON text. An edge is [step, src, dst, "copy" | "reduce", [chunks]]."""
    s = schedule
    head: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": s.name,
        "kind": s.kind.label,
        "nranks": s.nranks,
        **({} if s.collective.root is None else {"root": s.collective.root}),
        "steps": s.steps,
        "pipeline": s.pipeline,
        "canonical": s.canonical,
    }
    lines = [f"  {json.dumps(k)}: {json.dumps(v)}," for k, v in head.items()]
    lines += [
        '  "chunks": [',
        *_rows([json.dumps(_chunk_fields(c)) for c in s.chunks], "    "),
        "  ],",
        '  "graphs": [',
    ]
    graphs: list[str] = []
    for graph in s.graphs:
        edges = [json.dumps([e.step, e.src, e.dst, e.op.name.lower(), list(e.chunks)]) for e in graph.edges]
        open_line = f'    {{"name": {json.dumps(graph.name)}, "edges": ['
        graphs.append("\n".join([open_line, *_rows(edges, "      "), "    ]}"]))
    return "\n".join(["{", *lines, *([",\n".join(graphs)] if graphs else []), "  ]", "}", ""])


def _rows(items: list[str], indent: str) -> list[str]:
    return [f"{indent}{item}{',' if i < len(items) - 1 else ''}" for i, item in enumerate(items)]


def _chunk_fields(chunk: Chunk) -> dict[str, int]:
    ends = {"src": chunk.src, "dst": chunk.dst}
    return {**{k: v for k, v in ends.items() if v is not None}, "weight": chunk.weight}


@dataclass(frozen=True)
class _Node:
    """A value in the JSON text and the way to it, so that a complaint can name its element and line."""

    text: str
    source: str
    value: Any
    path: tuple[str | int, ...] = ()

    def error(self, what: str) -> ScheduleError:
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path).lstrip(".") or "the document"
        return ScheduleError(f"{self.source}, line {_line_of(self.text, self.path)}, {where}: {what}")

    def child(self, key: str | int) -> _Node:
        return _Node(self.text, self.source, self.value[key], (*self.path, key))

    def typed(self, kind: type[Any], what: str) -> Any:
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            raise self.error(f"wanted {what}, found {json.dumps(self.value)[:60]}")
        return self.value

    def integer(self) -> int:
        return int(self.typed(int, "an integer"))

    def items(self) -> list[_Node]:
        return [self.child(i) for i in range(len(self.typed(list, "a list")))]

    def fields(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, _Node]:
        value = self.typed(dict, "an object")
        for key in required:
            if key not in value:
                raise self.error(f"the field {key!r} is missing")
        for key in value:
            if key not in (*required, *optional):
                raise self.child(key).error(f"unknown field; known are {', '.join((*required, *optional))}")
        return {key: self.child(key) for key in value}

    def made(self, make: Callable[[], Any]) -> Any:
        """`make()`, with this place put before the message of a `ScheduleError`."""
        try:
            return make()
        except ScheduleError as error:
            raise self.error(str(error)) from None


def loads(text: str, source: str = "schedule") -> Schedule:
    """Reads `dumps`'s text; a `ScheduleError` names `source`, the line and the element that is wrong."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{source}, line {error.lineno}, column {error.colno}: no JSON: {error.msg}") from None
    except RecursionError:
        raise ScheduleError(f"{source}: no schedule: its lists lie too deep in each other") from None
    except ValueError as error:  # a number of thousands of digits
        raise ScheduleError(f"{source}: no schedule: {error}") from None
    top = _Node(text, source, value)
    names = ("format", "version", "name", "kind", "nranks", "steps", "chunks", "graphs")
    fields = top.fields(names, ("root", "pipeline", "canonical"))
    if fields["format"].value != FORMAT:
        raise fields["format"].error(f"wanted {FORMAT!r}")
    if fields["version"].integer() != VERSION:
        raise fields["version"].error(f"this version of jaxcoll reads version {VERSION}")
    kind = fields["kind"].made(lambda: Kind.parse(fields["kind"].typed(str, "the name of a collective")))
    root = fields["root"].integer() if "root" in fields else None
    collective = fields["nranks"].made(lambda: Collective(kind, fields["nranks"].integer(), root))
    chunks = tuple(_chunk(node) for node in fields["chunks"].items())
    steps = fields["steps"].integer()
    graphs = tuple(_graph(node, steps, collective.nranks, len(chunks)) for node in fields["graphs"].items())
    pipeline = fields["pipeline"].integer() if "pipeline" in fields else 1
    canonical = bool(fields["canonical"].typed(bool, "true or false")) if "canonical" in fields else False
    name = fields["name"].typed(str, "a string")
    return top.made(lambda: Schedule(name, collective, steps, chunks, graphs, pipeline, canonical))


def _chunk(node: _Node) -> Chunk:
    fields = node.fields((), ("src", "dst", "weight"))
    values = {key: field.integer() for key, field in fields.items()}
    return Chunk(values.get("src"), values.get("dst"), values.get("weight", 1))


def _graph(node: _Node, steps: int, nranks: int, nchunks: int) -> ChunkGraph:
    fields = node.fields(("edges",), ("name",))
    edges = tuple(_edge(e, steps, nranks, nchunks) for e in fields["edges"].items())
    return ChunkGraph(edges, fields["name"].typed(str, "a string") if "name" in fields else "")


def _edge(node: _Node, steps: int, nranks: int, nchunks: int) -> Edge:
    parts = node.items()
    if len(parts) != 5:
        raise node.error(f'wanted [step, src, dst, "copy" | "reduce", [chunks]], found {len(parts)} parts')
    step, src, dst = (_below(part, top) for part, top in zip(parts[:3], (steps, nranks, nranks), strict=True))
    op = _OPS.get(parts[3].typed(str, '"copy" or "reduce"'))
    if op is None:
        raise parts[3].error('wanted "copy" or "reduce"')
    chunks = tuple(_below(c, nchunks) for c in parts[4].items())
    if not chunks or len(set(chunks)) != len(chunks):
        raise parts[4].error("wanted at least one chunk, and none twice")
    return Edge(step, src, dst, op, chunks)


def _below(node: _Node, top: int) -> int:
    value = node.integer()
    if not 0 <= value < top:
        raise node.error(f"{value} lies outside 0..{top - 1}")
    return value


_SPACE = re.compile(r"[\s,]*")


def _line_of(text: str, path: tuple[str | int, ...]) -> int:
    """The line on which the element begins. Walks the text once, which only an error has to pay for."""
    decoder = json.JSONDecoder()
    at = _skip(text, 0)
    for key in path:
        at = _skip(text, at + 1)
        if isinstance(key, int):
            for _ in range(key):
                at = _skip(text, decoder.raw_decode(text, at)[1])
            continue
        while True:
            name, end = decoder.raw_decode(text, at)
            at = _skip(text, text.index(":", end) + 1)
            if name == key:
                break
            at = _skip(text, decoder.raw_decode(text, at)[1])
    return text.count("\n", 0, at) + 1


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
