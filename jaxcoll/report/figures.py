"""Small charts as SVG text: no script, no outside file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Apart for most kinds of colour vision, and in grey.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8c6bb1")
_INK, _FAINT = "#444", "#ddd"
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 14, 42
_ODD = 2.5  # times the 90th percentile: what is higher would press the rest flat
_MANY = 3000  # points drawn of a line; of more, every so many-th


@dataclasses.dataclass(frozen=True, eq=False)
class Line:
    """A named series. `stepped` draws stairs; `dots` draws points in place of a line."""

    name: str
    x: Floats
    y: Floats
    stepped: bool = False
    dots: bool = False


@dataclasses.dataclass(frozen=True)
class Mark:
    """A vertical line at `x` with a tooltip."""

    x: float
    text: str
    colour: str = "#c00"


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers that cover [low, high], about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 5, 10) if m * size >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclasses.dataclass(frozen=True)
class _Frame:
    width: int
    height: int
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        right, bottom = self.width - _RIGHT, self.height - _BOTTOM
        return _LEFT + across * (right - _LEFT), bottom - up * (bottom - _TOP)

    def axes(self, xlabel: str, ylabel: str) -> list[str]:
        out: list[str] = []
        (left, bottom), (right, top) = self.at(self.x[0], self.y[0]), self.at(self.x[1], self.y[1])
        for value in ticks(*self.y):
            _, y = self.at(self.x[0], value)
            out.append(f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_FAINT}"/>')
            out.append(f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
        for value in ticks(*self.x, count=8):
            x, _ = self.at(value, self.y[0])
            out.append(f'<text x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{value:g}</text>')
        out.append(f'<path d="M{left:.1f} {top:.1f}V{bottom:.1f}H{right:.1f}" fill="none" stroke="{_INK}"/>')
        middle = (left + right) / 2
        out.append(f'<text x="{middle:.1f}" y="{bottom + 34:.1f}" text-anchor="middle">{escape(xlabel)}</text>')
        turn = f'transform="translate(14 {(top + bottom) / 2:.1f}) rotate(-90)"'
        out.append(f'<text {turn} text-anchor="middle">{escape(ylabel)}</text>')
        return out


def _open(width: int, height: int, title: str, kind: str) -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = f'font-family="sans-serif" font-size="12" fill="{_INK}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="figure {kind}" role="img" {size} {style}>'
        f"<title>{escape(title)}</title>"
    )


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    marks: Sequence[Mark] = (),
    width: int = 920,
    height: int = 270,
) -> str:
    """Lines over common axes; y from 0 to the most, unless it is an odd one: then it is drawn at the rim, and told."""
    lines = [line for line in lines if len(line.x)]
    every = np.concatenate([line.x for line in lines]) if lines else np.array([0.0, 1.0])
    values = np.concatenate([line.y for line in lines]) if lines else np.array([1.0])
    usual = min(float(np.percentile(values, 99.5)), _ODD * float(np.percentile(values, 90)))
    top = 1.08 * usual or 1.0
    frame = _Frame(width, height, (float(every.min()), float(every.max())), (0.0, top))
    out = [_open(width, height, title, "line"), *frame.axes(xlabel, ylabel)]
    for mark in marks:
        x, high = frame.at(min(max(mark.x, frame.x[0]), frame.x[1]), top)
        _, low = frame.at(frame.x[0], 0)
        line = f'x1="{x:.1f}" x2="{x:.1f}" y1="{high:.1f}" y2="{low:.1f}"'
        tip = f"<title>{escape(mark.text)}</title>"
        out.append(f'<line class="mark" {line} stroke="{mark.colour}" stroke-dasharray="3 3">{tip}</line>')
    for i, line in enumerate(lines):
        out.append(_path(frame, line, COLOURS[i % len(COLOURS)], top))
    if (values > top).any():
        told = f"{int((values > top).sum())} above, up to {values.max():,.0f}"
        out.append(f'<text x="{width - _RIGHT}" y="{_TOP - 3}" text-anchor="end">{told}</text>')
    out += _legend([(line.name, COLOURS[i % len(COLOURS)]) for i, line in enumerate(lines)], width)
    return "\n".join([*out, "</svg>"])


def _path(frame: _Frame, line: Line, colour: str, top: float) -> str:
    keep = slice(None, None, max(1, len(line.x) // _MANY))
    points = [frame.at(float(x), min(float(y), top)) for x, y in zip(line.x[keep], line.y[keep], strict=True)]
    if line.dots:
        d = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in points)
        return f'<path class="series" d="{d}" stroke="{colour}" stroke-width="3" stroke-linecap="round" fill="none"/>'
    d = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for x, y in points[1:]:
        d += f"H{x:.1f}V{y:.1f}" if line.stepped else f"L{x:.1f} {y:.1f}"
    return f'<path class="series" d="{d}" stroke="{colour}" stroke-width="1.6" fill="none"/>'


def _legend(names: Sequence[tuple[str, str]], width: int) -> list[str]:
    out: list[str] = []
    for i, (name, colour) in enumerate(names if len(names) > 1 else []):
        y = _TOP + 12 + 16 * i
        out.append(f'<text x="{width - _RIGHT - 20}" y="{y}" text-anchor="end">{escape(name)}</text>')
        x = width - _RIGHT - 15
        out.append(f'<line x1="{x}" x2="{x + 13}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>')
    return out


def cdf_line(name: str, values: Floats) -> Line:
    """The distribution of `values` as a stepped line."""
    x = np.sort(values)
    return Line(name, x, np.arange(1, len(x) + 1) / max(1, len(x)), stepped=True)


def heatmap(matrix: Floats, *, title: str, unit: str, top: float) -> str:
    """A square matrix by [src][dst]: dark is high, `top` the darkest, white with a cross is nothing seen."""
    n = len(matrix)
    cell = max(14, min(38, 400 // max(1, n)))
    left, head = 44, 46
    width, height = left + n * cell + 12, head + n * cell + 12
    out = [_open(width, height, title, "heat")]
    out.append(f'<text x="{left + n * cell / 2:.0f}" y="14" text-anchor="middle">to rank</text>')
    out.append(
        f'<text transform="translate(12 {head + n * cell / 2:.0f}) rotate(-90)" text-anchor="middle">from</text>'
    )
    for i in range(n):
        out.append(f'<text x="{left + (i + 0.5) * cell:.1f}" y="{head - 6}" text-anchor="middle">{i}</text>')
        out.append(f'<text x="{left - 6}" y="{head + (i + 0.5) * cell + 4:.1f}" text-anchor="end">{i}</text>')
    for a in range(n):
        for b in range(n):
            out.append(_cell(matrix[a, b], a, b, left + b * cell, head + a * cell, cell, unit, top))
    return "\n".join([*out, "</svg>"])


def _cell(value: float, a: int, b: int, x: int, y: int, size: int, unit: str, top: float) -> str:
    at = f'x="{x}" y="{y}" width="{size}" height="{size}"'
    if np.isnan(value):
        return f'<rect {at} fill="#fff" stroke="#eee"><title>{a} to {b}: nothing seen</title></rect>'
    share = min(1.0, value / top) if top > 0 else 0.0
    fill = f"hsl(205,70%,{94 - 62 * share:.0f}%)"
    shown = f"{value:.2g}"
    text = ""
    if size >= 26:
        ink = "#fff" if share > 0.55 else _INK
        middle = f'x="{x + size / 2:.1f}" y="{y + size / 2 + 3.5:.1f}"'
        text = f'<text {middle} text-anchor="middle" font-size="9" fill="{ink}">{shown}</text>'
    tip = f"<title>{a} to {b}: {shown} {unit}</title>"
    return f'<rect {at} fill="{fill}" stroke="#fff">{tip}</rect>{text}'
