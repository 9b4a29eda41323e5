"""A run log as one page: what the tuner saw, did and gained.

JAXCOLL_TUNER=on JAXCOLL_RUN_LOG=run.jsonl python train.py
jaxcoll report run.jsonl -o report.html
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from jaxcoll.errors import UsageError


def write(source: str | Path, target: str | Path, title: str | None = None) -> None:
    """Writes the page of a run log. UsageError if the log can't be read or the page can't be written."""
    from jaxcoll.report.page import page
    from jaxcoll.report.run import load

    text = page(load(source), title or f"Run {Path(source).stem}")
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{target} can't be written: {error.strerror}") from error


def export(source: str | Path, trace: Path | None, metrics: Path | None, lines: Path | None) -> None:
    """The records of a run log as trace events, as Prometheus text, as JSON lines: as whichever has a file to go to."""
    if trace is None and metrics is None and lines is None:
        return

    from jaxcoll.report.run import load
    from jaxcoll.telemetry import chrome_trace, concatenate, prometheus, write_jsonl

    runs = load(source)
    records = [concatenate(p.epoch.records for p in run.points) for run in runs]
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace(concatenate(records))), encoding="utf-8")
    if lines is not None:
        with lines.open("w", encoding="utf-8") as out:
            write_jsonl(out, concatenate(records))
    if metrics is not None:
        specs = [run.spec for run in runs]
        kinds = [spec.programs[0].schedule.kind.label for spec in specs]
        parts = [
            prometheus(r, spec.nranks, collective=kind, key=spec.key)
            for r, spec, kind in zip(records, specs, kinds, strict=True)
        ]
        metrics.write_text(_merged(parts), encoding="utf-8")


def _merged(parts: Sequence[str]) -> str:
    """Prometheus texts of several sets as one: a metric's samples must stand together, under one heading."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for line in "".join(parts).splitlines():
        if line.startswith("#"):
            head = heads.setdefault(line.split()[2], [])
            head += [line] if line not in head else []
        else:
            samples.setdefault(line.partition("{")[0].partition(" ")[0], []).append(line)
    return "".join(f"{line}\n" for name, head in heads.items() for line in (*head, *samples.get(name, [])))


def main(argv: Sequence[str]) -> int:
    """The command `jaxcoll report`. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="jaxcoll report", description="Make one self-contained page out of a run log."
    )
    parser.add_argument("run", type=Path, help="the file that JAXCOLL_RUN_LOG named")
    parser.add_argument("-o", "--output", type=Path, help="the page (default: beside the log, .html)")
    parser.add_argument("--title", help="its heading")
    parser.add_argument("--trace", type=Path, help="also write the edges for ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--prometheus", type=Path, help="also write the run's metrics as Prometheus text")
    parser.add_argument("--records", type=Path, help="also write the edges' records as JSON lines")
    args = parser.parse_args(argv)
    if args.run.is_dir():
        raise UsageError(f"{args.run} is a folder; name the run log, the file that JAXCOLL_RUN_LOG named")
    target = args.output or args.run.with_suffix(".html")
    write(args.run, target, args.title)
    print(target)
    export(args.run, args.trace, args.prometheus, args.records)
    return 0


__all__ = ["export", "main", "write"]
