"""Watch a tuned job while it runs: times, who is slow, what was swapped. Run it where process 0 runs.

jaxcoll top              the job started last
jaxcoll top --pid 4711   the one whose process 0 this is
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxcoll.errors import UsageError
from jaxcoll.steering import board
from jaxcoll.tuner import Verdict

_DECISIONS = 8
_WIDE = 24  # ranks whose matrix still fits a terminal


def _rich(name: str) -> Any:
    try:
        return importlib.import_module(f"rich.{name}")
    except ModuleNotFoundError:
        raise UsageError("jaxcoll top needs rich: pip install 'jaxcoll[tuner]'") from None


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def sets_table(sets: Sequence[Mapping[str, Any]]) -> Any:
    """One row a set: its schedule, times and swaps."""
    table = _rich("table").Table(expand=True)
    for name in ("collective", "schedule", "version"):
        table.add_column(name, overflow="fold")  # a name's end is what tells it from others
    for name in ("epochs", "median ms", "p95 ms", "swaps", "reverts"):
        table.add_column(name, justify="right")
    for s in sets:
        times = (_number(s["median_ms"]), _number(s["p95_ms"]))
        numbers = (str(s["epochs"]), *times, str(s["swaps"]), str(s["reverts"]))
        table.add_row(s["key"], s["program"] or "-", str(s["version"]), *numbers)
    return table


def heat_table(matrix: Sequence[Sequence[float | None]]) -> Any:
    """Throughput by pair, MB/s: green is quick, red is slow against the quickest."""
    text = _rich("text").Text
    table = _rich("table").Table(title="MB/s from row to column", show_header=True, pad_edge=False)
    table.add_column("")
    for rank in range(len(matrix)):
        table.add_column(str(rank), justify="right")
    top = max((v for row in matrix for v in row if v is not None), default=1.0)
    for rank, row in enumerate(matrix):
        cells = [text("." if v is None else f"{v / 1e6:.3g}", style=_shade(v, top)) for v in row]
        table.add_row(str(rank), *cells)
    return table


def _shade(value: float | None, top: float) -> str:
    if value is None:
        return "dim"
    share = value / top if top else 0.0
    return "green" if share > 0.7 else "yellow" if share > 0.4 else "bold red"


def view(status: Mapping[str, Any]) -> Any:
    """All of it, for a terminal."""
    group, panel = _rich("console").Group, _rich("panel").Panel
    escape = _rich("markup").escape
    head = f"policy {status['policy']}, {status['state']}: {status['swaps']} swaps, {status['reverts']} reverts"
    sets = sorted(status["sets"], key=lambda s: -(s["median_ms"] or 0) * s["epochs"])
    parts: list[Any] = [escape(head), sets_table(sets)]
    if sets and sets[0]["throughput"] and len(sets[0]["throughput"]) <= _WIDE:
        parts.append(heat_table(sets[0]["throughput"]))
    findings = [f"{s['key']}: {line}" for s in sets for line in s["findings"]]
    parts.append(
        panel(escape("\n".join(findings)) or "nobody is slow or late", title="who is slow", title_align="left")
    )
    made = [_line(d) for d in reversed(status["decisions"][-_DECISIONS:])]
    parts.append(panel(escape("\n".join(made)) or "none yet", title="decisions", title_align="left"))
    return group(*parts)


def _line(decision: Mapping[str, Any]) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(decision["time"]))
    failed = "" if decision["committed"] else f" (not in force: {decision['refusal']})"
    judged = ""
    if "measured" in decision:
        judged = f"; {Verdict(decision['version'], decision['measured'], decision['kept']).text()}"
    return f"{at} {decision['action']} {decision['version']}: {decision['reason']}{judged}{failed}"


def find(pid: int | None) -> Path:
    """The status file of a job. UsageError if there is none."""
    found = board.running()
    if pid is not None and pid not in found:
        known = ", ".join(map(str, found)) or "none"
        raise UsageError(f"no tuned job of process {pid} runs here; there are: {known}")
    if not found:
        raise UsageError("no tuned job of yours runs on this machine; start one with JAXCOLL_TUNER=on, and look here "
                         "where its process 0 runs")  # fmt: skip
    return found[pid] if pid is not None else next(iter(found.values()))


def main(argv: Sequence[str]) -> int:
    """The command `jaxcoll top`. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="jaxcoll top",
        description="Watch a tuned job while it runs.",
        epilog="Start the job with JAXCOLL_TUNER=on (or jaxcoll.tune() in the program), "
        "and run this where its process 0 runs, as the same user.",
    )
    parser.add_argument("--pid", type=int, help="process 0 of the job (default: the job started last)")
    parser.add_argument("--once", action="store_true", help="print once and end")
    args = parser.parse_args(argv)
    path = find(args.pid)
    console = _rich("console").Console()
    status = board.read(path)
    if args.once:
        if status is not None:
            console.print(view(status))
        return 0 if status is not None else 1
    with _rich("live").Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while status is not None:
            live.update(view(status), refresh=True)
            time.sleep(1.0)
            status = board.read(path)
    console.print("the job has ended, or no longer tunes")
    return 0
