"""A run log as one page: what the tuner saw, did and gained.

JAXCOLL_TUNER=on JAXCOLL_RUN_LOG=run.jsonl python train.py
jaxcoll report run.jsonl -o report.html
"""

from __future__ import annotations

import argparse
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


def main(argv: Sequence[str]) -> int:
    """The command `jaxcoll report`. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="jaxcoll report", description="Make one self-contained page out of a run log."
    )
    parser.add_argument("run", type=Path, help="the file that JAXCOLL_RUN_LOG named")
    parser.add_argument("-o", "--output", type=Path, help="the page (default: beside the log, .html)")
    parser.add_argument("--title", help="its heading")
    args = parser.parse_args(argv)
    target = args.output or args.run.with_suffix(".html")
    write(args.run, target, args.title)
    print(target)
    return 0


__all__ = ["main", "write"]
