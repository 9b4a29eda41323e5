"""A schedule as a picture (SVG): steps are columns, ranks are rows, edges are arrows in their graph's colour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.ir import Op, Schedule
from jaxcoll.schedule.table import Table

_COLUMN, _ROW = 110, 34  # pixels between steps and between ranks
_LEFT, _TOP, _RIGHT, _FOOT, _RADIUS = 60, 64, 30, 34, 9
# Colours that stay apart for most kinds of colour vision; further graphs take evenly spaced hues.
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")


@dataclass(frozen=True)
class _Canvas:
    """The places of vertices."""

    steps: int
    nranks: int

    @property
    def width(self) -> int:
        return _LEFT + self.steps * _COLUMN + _RIGHT

    @property
    def height(self) -> int:
        return _TOP + (self.nranks - 1) * _ROW + _FOOT

    @staticmethod
    def at(step: int, rank: int) -> tuple[int, int]:
        return _LEFT + step * _COLUMN, _TOP + rank * _ROW


def graph_colour(graph: int) -> str:
    """The colour in which a chunk graph is drawn."""
    if graph < len(_PALETTE):
        return _PALETTE[graph]
    return f"hsl({graph * 137 % 360},60%,42%)"  # the golden angle: neighbours differ most


def draw_svg(
    schedule: Schedule,
    table: Table | None = None,
    *,
    highlight: Mapping[int, str] | None = None,
    title: str | None = None,
) -> str:
    """SVG text of the schedule's TEN under a table (the identity if None).

    `highlight` gives edges (indices in `Schedule.edges`) a colour of their own and a wider line, on top of the others.
    A reduction is drawn solid, a copy dashed. Every edge carries its ends, operation and chunks as a tooltip, and
    `data-edge`, `data-graph` for scripts.
    """
    table = table or Table.identity(schedule)
    if table.vertex.shape != (len(schedule.graphs), schedule.steps + 1, schedule.nranks):
        raise ScheduleError("the table belongs to another schedule; use Table.identity(schedule) and its swaps")
    highlight = dict(highlight or {})
    unknown = [i for i in highlight if not 0 <= i < len(schedule.edges)]
    if unknown:
        raise ScheduleError(f"highlight: edge {unknown[0]} doesn't exist; the schedule has {len(schedule.edges)} edges")
    canvas = _Canvas(schedule.steps, schedule.nranks)
    heading = title or f"{schedule.name}: {schedule.kind.label}, {schedule.nranks} ranks"
    size = f'width="{canvas.width}" height="{canvas.height}" viewBox="0 0 {canvas.width} {canvas.height}"'
    colours = {graph_colour(g) for g in range(len(schedule.graphs))} | set(highlight.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f"<title>{escape(heading)}</title>",
        "<defs>",
        *(_arrow_head(colour) for colour in sorted(colours)),
        "</defs>",
        f'<rect width="{canvas.width}" height="{canvas.height}" fill="white"/>',
        f'<text x="{_LEFT - 40}" y="20" font-size="14" font-weight="bold">{escape(heading)}</text>',
        *_axes(canvas),
        *_edges(schedule, table, highlight),
        *_vertices(canvas),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _arrow_id(colour: str) -> str:
    return "arrow-" + "".join(c if c.isalnum() else "-" for c in colour)


def _arrow_head(colour: str) -> str:
    shape = f'<path d="M0 0L8 4L0 8z" fill="{escape(colour, _QUOTES)}"/>'
    frame = 'viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto"'
    return f'<marker id="{_arrow_id(colour)}" {frame}>{shape}</marker>'


_QUOTES = {'"': "&quot;"}


def _axes(canvas: _Canvas) -> list[str]:
    out: list[str] = []
    for t in range(canvas.steps + 1):
        x, y = canvas.at(t, 0)
        out.append(f'<text x="{x}" y="{y - 18}" text-anchor="middle" fill="#666">step {t}</text>')
    for rank in range(canvas.nranks):
        x, y = canvas.at(0, rank)
        out.append(f'<text x="{x - 20}" y="{y + 4}" text-anchor="end" fill="#666">rank {rank}</text>')
    return out


def _edges(schedule: Schedule, table: Table, highlight: Mapping[int, str]) -> list[str]:
    plain: list[str] = []
    marked: list[str] = []
    for i, (edge, g) in enumerate(zip(schedule.edges, schedule.edge_graph.tolist(), strict=True)):
        src = int(table.vertex[g, edge.step, edge.src])
        dst = int(table.vertex[g, edge.step + 1, edge.dst])
        (x1, y1), (x2, y2) = _Canvas.at(edge.step, src), _Canvas.at(edge.step + 1, dst)
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length * _RADIUS, (y2 - y1) / length * _RADIUS  # lines end at the circles' rims
        colour = escape(highlight.get(i, graph_colour(g)), _QUOTES)
        style = f'stroke="{colour}" stroke-width="{3 if i in highlight else 1.4}"'
        style += ' stroke-dasharray="5 3"' if edge.op is Op.COPY else ""
        style += f' marker-end="url(#{_arrow_id(highlight.get(i, graph_colour(g)))})"'
        name = schedule.graphs[g].name or f"graph {g}"
        tip = f"{name}, step {edge.step}: rank {src} to {dst}, {edge.op.name.lower()} {_listed(edge.chunks)}"
        ends = f'x1="{x1 + dx:.1f}" y1="{y1 + dy:.1f}" x2="{x2 - dx:.1f}" y2="{y2 - dy:.1f}"'
        line = f'<line data-edge="{i}" data-graph="{g}" {ends} {style}><title>{escape(tip)}</title></line>'
        (marked if i in highlight else plain).append(line)
    return plain + marked


def _listed(chunks: tuple[int, ...]) -> str:
    shown = ", ".join(str(c) for c in chunks[:8])
    more = f" and {len(chunks) - 8} more" if len(chunks) > 8 else ""
    return f"chunk{'s' if len(chunks) > 1 else ''} {shown}{more}"


def _vertices(canvas: _Canvas) -> list[str]:
    out: list[str] = []
    for t in range(canvas.steps + 1):
        for rank in range(canvas.nranks):
            x, y = canvas.at(t, rank)
            out.append(f'<circle cx="{x}" cy="{y}" r="{_RADIUS}" fill="white" stroke="#444"/>')
            out.append(f'<text x="{x}" y="{y + 3.5}" text-anchor="middle" font-size="10">{rank}</text>')
    return out
