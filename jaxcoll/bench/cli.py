"""The command `jaxcoll bench`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from jaxcoll import config
from jaxcoll.bench import table
from jaxcoll.bench.definitions import OPERATIONS, make_case, parse_sizes
from jaxcoll.bench.groups import Bench, Plan
from jaxcoll.bench.table import Row
from jaxcoll.errors import JaxcollError, UsageError

_ABOUT = """usage: jaxcoll bench [flags]

Times collectives as whole calls of a jitted program, and prints nccl-tests' table. Time is the median over the calls;
a call's time is the average over the processes. Every implementation is timed in turn, block by block, in one run, so
that their ratio means something. Exits with 1 when a value is wrong or an implementation fails. JAXCOLL_TUNER and
JAXCOLL_RUN_LOG of the environment count for nothing here: --peers=JAXCOLL_TUNER=on times the tuned program.

  jaxcoll bench --ranks 8 --peers lax                                psum, one process a rank, 4K to 64M
  jaxcoll bench --collective all_gather --sizes 160M --peers lax,mpi  20 MiB a rank (a size is the whole collective's)
  jaxcoll bench --sizes 4K --chain 16 --peers lax                    sixteen psums, one after the other, in one program
  jaxcoll bench --layout inproc --sizes 4K,4M,16M --peers lax        one process with a device a rank
  jaxcoll bench --sizes 4M,16M --peers copy                          against the memory: a program that only reads such
                                                                     an argument, and writes such a result
  jaxcoll bench --ranks 2,4,8,16 --sizes 1M --peers mpi              how cost grows with the number of ranks
  jaxcoll bench --sizes 4K,1M --peers JAXCOLL_RECORD=off             the same, with a setting changed, as the peer
"""


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    where: dict[str, Any] = {"flag_values": values, "module_name": "jaxcoll.bench"}
    flags.DEFINE_list("collective", ["psum"], f"Operations, comma separated: {', '.join(OPERATIONS)}; or all.", **where)
    flags.DEFINE_list("ranks", ["8"], "Number of ranks, or a comma list of numbers.", **where)
    flags.DEFINE_enum("layout", "procs", ["procs", "inproc"], "A process a rank, or a device a rank.", **where)
    flags.DEFINE_string(
        "sizes", "4K:64M", "A range from:to, or a comma list; bytes, or K, M, G (powers of 1024).", **where
    )
    flags.DEFINE_integer("factor", 2, "Step of a range of sizes.", lower_bound=2, **where)
    flags.DEFINE_list("dtype", ["float32"], "Element type, or a comma list of types.", **where)
    flags.DEFINE_string("impl", "jaxcoll", "The implementation under test: jaxcoll or lax.", **where)
    flags.DEFINE_list("peers", [], "Compare with: lax, mpi, copy, or JAXCOLL_NAME=value.", **where)
    flags.DEFINE_string("schedule", None, "The schedule for jaxcoll to use (its own choice otherwise).", **where)
    flags.DEFINE_enum("transport", None, ["auto", "inproc", "shm", "tcp"], "Force jaxcoll's transport.", **where)
    flags.DEFINE_integer("chain", 1, "Collectives in one program, each waiting for the last.", lower_bound=1, **where)
    flags.DEFINE_integer("iters", 20, "Timed calls of each implementation.", lower_bound=1, **where)
    flags.DEFINE_integer("warmup", 5, "Calls before those.", lower_bound=0, **where)
    flags.DEFINE_integer("blocks", 4, "Blocks that the timed calls are cut into.", lower_bound=1, **where)
    flags.DEFINE_float(
        "deadline", 600.0, "Seconds that any step may take before the run fails.", lower_bound=1.0, **where
    )
    flags.DEFINE_string("json", None, "Also write the results to this file.", **where)
    flags.DEFINE_bool("progress", True, "Say on stderr what is running.", **where)
    return values


class _Progress:
    """What runs now, on stderr: one line that changes on a terminal, else a line every ten seconds."""

    def __init__(self, on: bool):
        self._on, self._tty, self._last = on, sys.stderr.isatty(), time.monotonic()

    def show(self, text: str) -> None:
        """Show what begins now."""
        if self._on and self._tty:
            print(f"\r\x1b[K# {text}", end="", file=sys.stderr, flush=True)
        elif self._on and time.monotonic() - self._last > 10.0:
            print(f"# {text}", file=sys.stderr, flush=True)
            self._last = time.monotonic()

    def clear(self) -> None:
        """Make room for a line of the table."""
        if self._on and self._tty:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _rank_counts(texts: Sequence[str]) -> list[int]:
    try:
        counts = [int(text) for text in texts]
        if not counts or min(counts) < 1:
            raise ValueError
    except ValueError:
        raise UsageError(f"--ranks={','.join(texts)} must be whole numbers of 1 or more, comma separated.") from None
    return counts


def _implementations(values: Any) -> list[str]:
    if values.impl not in ("jaxcoll", "lax"):
        raise UsageError(f"--impl={values.impl} is unknown. Known: jaxcoll, lax.")
    for peer in values.peers:
        name, equals, text = peer.partition("=")
        if equals and name.startswith(config.PREFIX):
            config.parse(name, text)
        elif peer not in ("jaxcoll", "lax", "copy", "mpi"):
            raise UsageError(
                f"--peers={peer} is unknown. Known: lax, mpi, copy, or a setting such as JAXCOLL_RECORD=off."
            )
    return list(dict.fromkeys([values.impl, *values.peers]))


def _run(values: Any) -> list[Row]:
    impls = _implementations(values)
    collectives = list(OPERATIONS) if values.collective == ["all"] else values.collective
    sizes = parse_sizes(values.sizes, values.factor)
    plan = Plan(values.schedule, values.warmup, values.iters, values.blocks)
    env = {"JAXCOLL_TRANSPORT": values.transport} if values.transport else {}
    counts = _rank_counts(values.ranks)
    # All cases are made before anything starts: a mistake in the flags costs no time.
    cases = {
        (ranks, name): [make_case(name, ranks, size, dtype, values.chain) for dtype in values.dtype for size in sizes]
        for ranks in counts
        for name in collectives
    }
    progress, rows = _Progress(values.progress), []
    for ranks in counts:
        progress.show(f"starting {ranks} ranks")
        with Bench(impls, ranks, values.layout, env, values.deadline) as bench:
            for name in collectives:
                about = [f"schedule {values.schedule or 'auto'}, transport {values.transport or 'auto'}"]
                about += [
                    f"{values.iters} calls in {values.blocks} blocks, {values.warmup} to warm up, chain {values.chain}"
                ]
                progress.clear()
                print(table.header(name, ranks, values.layout, about), flush=True)
                rows += _run_cases(bench, cases[ranks, name], plan, progress)
    return rows


def _run_cases(bench: Bench, cases: Sequence[Any], plan: Plan, progress: _Progress) -> list[Row]:
    rows: list[Row] = []
    said: set[str] = set()
    for case in cases:
        label = f"{case.collective} {case.size} B"
        done, notes = bench.measure(case, plan, lambda text, label=label: progress.show(f"{label}, {text}"))
        progress.clear()
        for note in notes:
            if note not in said:
                print(f"# {note}")
        said.update(notes)
        for row in done:
            print(table.format_row(row, done[0] if row is not done[0] else None), flush=True)
        rows += done
    print(table.footer(cases[0].collective, rows), flush=True)
    return rows


def _parse(argv: Sequence[str]) -> Any:
    values = _flags()
    try:
        rest = values(["jaxcoll bench", *argv])[1:]
    except flags.Error as error:
        raise UsageError(f"{error}. See jaxcoll bench --help.") from None
    if rest:
        raise UsageError(f"{rest[0]!r} is no flag. See jaxcoll bench --help.")
    return values


def measure(argv: Sequence[str]) -> list[Row]:
    """What `jaxcoll bench` does for these flags: print the tables, and return their rows."""
    values = _parse(argv)
    if values.json:
        Path(values.json).open("a").close()  # what can't be written is said before the run, not after it
    rows = _run(values)
    if values.json:
        document = {"environment": table.environment(), "flags": list(argv), "results": [row.as_json() for row in rows]}
        try:
            Path(values.json).write_text(json.dumps(document, indent=1) + "\n")
        except OSError as error:
            raise JaxcollError(f"{values.json}: {error.strerror or error}") from error
    return rows


def main(argv: Sequence[str]) -> int:
    """The command `jaxcoll bench`. Returns the exit status: 0 if every value was right."""
    if any(word in ("-h", "--help", "-help") for word in argv):
        print(_ABOUT + "\nFlags:\n" + _flags().get_help())
        return 0
    rows = measure(argv)
    return 1 if not rows or any(row.nwrong for row in rows) else 0
