"""The report's page: text and figures of every set, in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from jaxcoll.report.figures import Line, Mark, cdf_line, heatmap, line_chart
from jaxcoll.report.run import Made, Point, SetRun
from jaxcoll.schedule import draw_svg
from jaxcoll.version import __version__

RED, PALE = "#d00000", "#f2a0a0"
_EDGES = 600  # a pattern with more edges is not drawn: nobody could read it
_WHEN = {
    "before": "Just before the first swap",
    "after": "At the end, under the last table",
    "untouched": "At the end; no swap was made",
}
_WINDOW = {"before": "before the first swap", "after": "under the last table", "untouched": "no swap was made"}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#222;background:#fff;max-width:1000px;margin:2em auto;padding:0 1em}
h1{font-size:1.6em}
h2{font-size:1.25em;margin-top:2.2em;border-bottom:1px solid #ddd}
h3{font-size:1.05em;margin-bottom:.3em}
figure{margin:0 0 1em;overflow-x:auto}figcaption{color:#555;font-size:.92em}
.pair{display:flex;flex-wrap:wrap;gap:1.5em}table{border-collapse:collapse;width:100%;font-size:.92em}
td,th{text-align:left;padding:.3em .6em;border-bottom:1px solid #eee;vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}.no{color:#a00}svg{max-width:100%;height:auto}
"""


def page(runs: Sequence[SetRun], title: str) -> str:
    """The whole page as HTML."""
    body = "\n".join(_set(run, i) for i, run in enumerate(runs))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{_overview(runs)}
{body}
<p><small>jaxcoll {__version__}</small></p>
</body></html>
"""


def _overview(runs: Sequence[SetRun]) -> str:
    rows: list[str] = []
    for i, run in enumerate(runs):
        before = _median_ms(run.trigger()) if run.swaps else None
        after = _median_ms(run.after() if run.swaps else run.before())
        change = f"{after / before:.2f}x" if before and after else ""
        cells = [_ms(before), _ms(after), change, str(len(run.swaps) - run.reverts), str(run.reverts)]
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        rows.append(f'<tr><td><a href="#set{i}">{escape(run.spec.key)}</a></td>{numbers}</tr>')
    names = ("at the first swap", "at the end", "ratio", "swaps", "reverts")
    head = "".join(f'<th class="n">{name}</th>' for name in names)
    return f"<table><tr><th>collective</th>{head}</tr>{''.join(rows)}</table>"


def _median_ms(points: Sequence[Point]) -> float | None:
    return float(np.median([p.seconds for p in points])) * 1e3 if points else None


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} ms"


def _set(run: SetRun, number: int) -> str:
    parts = [f'<h2 id="set{number}">{escape(run.spec.key)}</h2>', _says(run)]
    marks = [Mark(m.at, f"version {m.decision.version}: {m.decision.reason}") for m in run.swaps]
    start, step = run.steps()
    if len(step):
        chart = line_chart(
            [Line("step", start, step * 1e3)], title="Step time", xlabel="seconds", ylabel="step, ms", marks=marks
        )
        parts.append(_figure(chart, "Time from one step to the next; a dashed line is a swap."))
    x, y = np.array([p.start for p in run.points]), np.array([p.seconds for p in run.points]) * 1e3
    chart = line_chart(
        [Line("collective", x, y, dots=True)], title="Collective time", xlabel="seconds", ylabel="ms", marks=marks
    )
    parts.append(_figure(chart, "Time of the collective, without the waiting for late ranks."))
    parts += [_distribution(run), _maps(run), _patterns(run, number), _log(run)]
    return "\n".join(parts)


def _says(run: SetRun) -> str:
    failed = len(run.made) - len(run.swaps)
    more = f", {failed} that couldn't be brought into force" if failed else ""
    moves = f"{_counted(len(run.swaps) - run.reverts, 'swap')} and {_counted(run.reverts, 'revert')}"
    stall = max((m.stall_s for m in run.swaps), default=0.0)
    held = f" The longest stall by a swap was {stall * 1e3:.3f} ms." if run.swaps else ""
    return (
        f"<p>Policy {escape(run.policy)}: {moves} in {len(run.points)} epochs{more}. "
        f"{run.spec.nranks} ranks, {run.spec.nbytes} bytes a block.{held}</p>"
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _named(run: SetRun, before: list[Point]) -> list[tuple[str, list[Point]]]:
    """What a figure has to show, each part with its name in `_WHEN`; `before`: epochs before the first swap."""
    if not run.swaps:
        return [("untouched", before)]
    return [(name, points) for name, points in (("before", before), ("after", run.after())) if points]


def _distribution(run: SetRun) -> str:
    named = _named(run, run.before())
    lines = [cdf_line(name, np.array([p.seconds for p in points]) * 1e3) for name, points in named]
    chart = line_chart(lines, title="Distribution", xlabel="collective, ms", ylabel="share of epochs", width=560)
    words = " and ".join(_WINDOW[name] for name, _ in named)
    return _figure(chart, f"Distribution of the collective's time: {words}.")


def _maps(run: SetRun) -> str:
    shown = _named(run, run.trigger())
    matrices = [run.throughput(points) / 1e6 for _, points in shown]
    seen = np.concatenate([m[~np.isnan(m)] for m in matrices])
    top = float(np.percentile(seen, 95)) if len(seen) else 1.0
    figures = [
        _figure(heatmap(m, title=f"Throughput {name}", unit="MB/s", top=top), f"{_WHEN[name]}: median MB/s of an edge")
        for (name, _), m in zip(shown, matrices, strict=True)
    ]
    return f'<h3>Throughput between ranks</h3><div class="pair">{"".join(figures)}</div>'


def _patterns(run: SetRun, number: int) -> str:
    figures: list[str] = []
    for name, points in _named(run, run.trigger()):
        config = points[-1].config
        program = run.spec.by_id[config.program]
        if len(program.schedule.edges) > _EDGES:
            figures.append(
                f"<p>{name}: {escape(program.name)}, {len(program.schedule.edges)} edges, too many to draw.</p>"
            )
            continue
        steady, erratic = run.congested(points)
        red = {**{edge: RED for edge in steady}, **{edge: PALE for edge in erratic}}
        svg = draw_svg(program.schedule, config.table, highlight=red, title=f"{program.name}, {name}")
        # Two drawings on a page must not share the names of their arrow heads.
        svg = svg.replace("arrow-", f"s{number}-{name}-arrow-").replace("<svg ", '<svg class="figure pattern" ', 1)
        figures.append(
            _figure(
                svg,
                f"{_WHEN[name]}: {len(steady)} steady congested edges in red, {len(erratic)} erratic ones in pale red",
            )
        )
    return f"<h3>Pattern</h3>{''.join(figures)}"


def _log(run: SetRun) -> str:
    if not run.made:
        return "<h3>Decisions</h3><p>None.</p>"
    head = (
        "<tr><th class='n'>at</th><th>what</th><th>why</th><th class='n'>expected</th><th class='n'>measured</th></tr>"
    )
    return f"<h3>Decisions</h3><table class='log'>{head}{''.join(_row(m) for m in run.made)}</table>"


def _row(made: Made) -> str:
    d = made.decision
    what = f"{d.action}, version {d.version}"
    if not made.committed:
        what += f'<br><span class="no">not in force: {escape(made.refusal)}</span>'
    measured = "" if made.measured is None else f"{made.measured:.2f}x"
    return (
        f"<tr><td class='n'>{made.at:.1f} s</td><td>{what}</td><td>{escape(d.reason)}</td>"
        f"<td class='n'>{d.expected:.2f}x</td><td class='n'>{measured}</td></tr>"
    )
