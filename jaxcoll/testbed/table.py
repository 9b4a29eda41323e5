"""The command `jaxcoll testbed table`: runs scenarios one by one, and writes what they show as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxcoll.errors import MALFORMED, UsageError
from jaxcoll.launch import bound
from jaxcoll.testbed.scenarios import SCENARIOS, Reading, Result, Scenario

BEGIN, END = "<!-- testbed: begin -->", "<!-- testbed: end -->"

ABOUT = """Runs every scenario as a `jaxcoll testbed bench` of its own, keeps its results in DIR/NAME.json and its
output in DIR/NAME.log, and writes the table of them all between the two `testbed` marks of a file, where what it has
no results of stays as it was. A scenario that fails is named in the table and in the exit status; the others go on. One
whose results are there isn't run again, unless they are of other options, which count for nothing."""

# A scenario that takes so many times as long as reckoned is ended.
_PATIENCE = 4.0
# From the request to end to the kill.
_END_S = 30.0


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add = parser.add_argument
    add("--json-dir", type=Path, required=True, help="folder for the results")
    add("--write", type=Path, metavar="FILE", help="put the table between the marks of this file (else it is printed)")
    add("--only", nargs="+", default=[], metavar="NAME", help="these scenarios alone; a part of a name will do")
    add("--again", action="store_true", help="run scenarios whose results are there too")
    add("--only-write", action="store_true", help="run nothing: make the table of the results that are there")
    add("--extra", default="", metavar="OPTIONS", help="options of `bench` that every scenario gets, for a short trial")


def _chosen(names: Sequence[str]) -> list[Scenario]:
    found = [s for s in SCENARIOS if not names or any(name in s.name for name in names)]
    if not found:
        raise UsageError(f"--only {' '.join(names)} is no scenario. Known: {', '.join(s.name for s in SCENARIOS)}.")
    return found


def command(scenario: Scenario, extra: str = "") -> str:
    """The line that runs a scenario."""
    return f"jaxcoll testbed bench {_words(scenario, extra)}"


def _words(scenario: Scenario, extra: str) -> str:
    return " ".join([*scenario.words.split(), *extra.split()])


def _results(scenario: Scenario, folder: Path, extra: str) -> dict[str, Any] | None:
    """What the folder has of a scenario. None where it has nothing, or what other options made, which is said."""
    file = folder / f"{scenario.name}.json"
    if not file.exists():
        return None
    try:
        data: dict[str, Any] = json.loads(file.read_text())
        if data.get("words") == _words(scenario, extra):
            return data
    except MALFORMED as error:
        raise UsageError(f"{file} is damaged: {error}; remove it to run the scenario again") from error
    made_by = f"by other options ({data['words']})" if "words" in data else "by options that it doesn't tell"
    _say(f"{scenario.name}: {file} was made {made_by}: taken as not run")
    return None


class _Clock:
    """Says how long it will take: the reckoned times, corrected by how the scenarios so far compare with theirs."""

    def __init__(self, scenarios: Sequence[Scenario]):
        self._left = sum(s.seconds for s in scenarios)
        self._reckoned = self._taken = 0.0

    def done(self, scenario: Scenario, seconds: float) -> None:
        self._left -= scenario.seconds
        self._reckoned += scenario.seconds
        self._taken += seconds

    def text(self, reckoned: float | None = None) -> str:
        factor = self._taken / self._reckoned if self._reckoned else 1.0
        minutes = (self._left if reckoned is None else reckoned) * factor / 60
        return f"about {max(1, round(minutes))} min"


def _run_one(scenario: Scenario, folder: Path, extra: str) -> str | None:
    """Runs a scenario. Returns why it failed, or None."""
    file, part = folder / f"{scenario.name}.json", folder / f"{scenario.name}.part"
    part.unlink(missing_ok=True)
    words = _words(scenario, extra)
    line = [sys.executable, "-m", "jaxcoll", "testbed", "bench", *words.split(), "--json", str(part)]
    with (folder / f"{scenario.name}.log").open("w") as log:
        call = subprocess.Popen(bound(line), stdout=log, stderr=log)
        try:
            status = call.wait(_PATIENCE * scenario.seconds)
        except subprocess.TimeoutExpired:
            return f"it took more than {_PATIENCE * scenario.seconds:.0f} s"
        finally:
            if call.poll() is None:
                call.terminate()
                try:
                    call.wait(_END_S)
                except subprocess.TimeoutExpired:  # the next testbed removes what it leaves
                    call.kill()
                    call.wait()
    if status:
        lines = (folder / f"{scenario.name}.log").read_text(errors="replace").strip().splitlines()
        return f"exit status {status}: {lines[-1] if lines else 'it said nothing'}"
    part.write_text(json.dumps({**json.loads(part.read_text()), "words": words}, indent=1) + "\n")
    part.replace(file)
    return None


def _say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def _run_all(scenarios: Sequence[Scenario], folder: Path, again: bool, extra: str) -> dict[str, str]:
    """Runs what is missing. Returns the failures, by name."""
    wanted = [s for s in scenarios if again or _results(s, folder, extra) is None]
    clock, failed = _Clock(wanted), dict[str, str]()
    for i, scenario in enumerate(wanted, 1):
        _say(f"{i} of {len(wanted)}: {scenario.name}, {clock.text(scenario.seconds)}; all the rest {clock.text()}")
        began = time.monotonic()
        why = _run_one(scenario, folder, extra)
        took = time.monotonic() - began
        clock.done(scenario, took)
        if why is not None:
            failed[scenario.name] = why
        _say(f"{scenario.name}: {'FAILED: ' + why if why else 'done'}, {took:.0f} s")
    return failed


@dataclasses.dataclass(frozen=True)
class Line:
    """One reading of one scenario: its value, or why there is none."""

    scenario: Scenario
    reading: Reading
    value: float | None
    trouble: str = ""

    def __str__(self) -> str:
        target = self.reading.target
        if self.value is None:
            return f"| | {self.reading.what} | {target} | {self.trouble} |"
        met = self.reading.met(self.value)
        verdict = "" if met is None else ", met" if met else ", MISSED"
        return f"| | {self.reading.what} | {target} | {self.value:.3g}{verdict} |"


def read(scenario: Scenario, data: dict[str, Any]) -> list[Line]:
    """All readings of a scenario's results."""
    out: list[Line] = []
    for reading in scenario.readings:
        try:
            out.append(Line(scenario, reading, reading.read(Result(data))))
        except (KeyError, ZeroDivisionError, ValueError) as error:
            out.append(Line(scenario, reading, None, f"not measured ({type(error).__name__}: {error})"))
    return out


def _head(scenario: Scenario, data: dict[str, Any]) -> str:
    starved = max((r["starved_ms"] / r["mean_ms"] for r in data["results"]), default=0.0)
    facts = f"{data['swaps']} swaps, {data['reverts']} reverts, {data['compilations_after_first']} compilations after "
    facts += f"the first, {data['wrong']} wrong; without a core {starved:.0%} of the time at most"
    return f"| **{scenario.about}** | {facts} | | |"


def _earlier(text: str) -> tuple[dict[str, list[str]], set[str]]:
    """What a table made before holds: the lines of each scenario, by what it is about, and the commands."""
    rows: dict[str, list[str]] = {}
    block: list[str] = []
    commands: set[str] = set()
    for line in text[max(0, text.find(BEGIN)) : text.find(END)].splitlines():
        if line.startswith("| **"):
            block = rows.setdefault(line.split("**")[1], [])
        if line.startswith("| "):
            block.append(line)
        elif line.startswith("    jaxcoll "):
            commands.add(line)
    return rows, commands


def make(
    scenarios: Sequence[Scenario], folder: Path, failed: dict[str, str], extra: str = "", earlier: str = ""
) -> str:
    """The table, as Markdown, with the commands under it. Scenarios without results of theirs are as in the text
    `earlier`."""
    lines = ["| scenario | reading | target | measured |", "|---|---|---|---|"]
    rows_before, commands_before = _earlier(earlier)
    commands: list[str] = []
    for scenario in scenarios:
        line = f"    {command(scenario, extra)}"
        data = None if scenario.name in failed else _results(scenario, folder, extra)
        if data is not None:
            lines += [_head(scenario, data), *map(str, read(scenario, data))]
            commands.append(line)
        elif scenario.name not in failed and scenario.about in rows_before:
            lines += rows_before[scenario.about]
            commands += [line] if line in commands_before else []
        else:
            lines.append(f"| **{scenario.about}** | not measured: {failed.get(scenario.name, 'not run')} | | |")
    lines += ["", 'Ratios are of means over the placements; "this" is the variant named before the colon.', ""]
    return "\n".join([*lines, *commands])


def put(text: str, table: str) -> str:
    """`text` with the table between its marks. Raises UsageError if they aren't there."""
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 or end < begin:
        raise UsageError(f"the file has no two lines {BEGIN} and {END} to write between")
    return f"{text[: begin + len(BEGIN)]}\n{table}\n{text[end:]}"


def run(args: argparse.Namespace) -> int:
    """Carries the command out. Returns the exit status: 1 if a scenario failed."""
    scenarios = _chosen(args.only)
    if args.write is not None:
        put(args.write.read_text(), "")  # a file without marks is refused before an hour has passed
    args.json_dir.mkdir(parents=True, exist_ok=True)
    failed = {} if args.only_write else _run_all(scenarios, args.json_dir, args.again, args.extra)
    if args.write is None:
        print(make(scenarios, args.json_dir, failed, args.extra))
    else:
        text = args.write.read_text()
        args.write.write_text(put(text, make(SCENARIOS, args.json_dir, failed, args.extra, text)))
    return 1 if failed else 0
