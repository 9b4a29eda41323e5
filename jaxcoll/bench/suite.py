"""The benchmark's standing set: what jaxcoll must reach against its peers, as rows that anybody can run again.

python -m jaxcoll.bench.suite                      all rows; a table in Markdown, and how each stands to its target
python -m jaxcoll.bench.suite chain inproc         some rows
python -m jaxcoll.bench.suite --write BENCHMARKS.md   all rows, and puts the tables in that file, between its two marks
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxcoll import config
from jaxcoll.bench import cli, table
from jaxcoll.bench.table import Row
from jaxcoll.errors import JaxcollError, UsageError

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Target:
    """At `size` bytes, `peer` must take at least `ratio` times as long as jaxcoll."""

    size: int
    peer: str
    ratio: float


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of the set: a command of `jaxcoll bench`, and its targets.

    extra_bytes: the most memory that a process may take
    beyond its arguments and results.
    """

    name: str
    title: str
    flags: tuple[str, ...]
    targets: tuple[Target, ...] = ()
    extra_bytes: int | None = None


def _against(peer: str, **ratios: float) -> tuple[Target, ...]:
    return tuple(Target(config.parse_size(size.removeprefix("s")), peer, ratio) for size, ratio in ratios.items())


ENTRIES = (
    Entry(
        "psum",
        "psum, a process a rank, against jax.lax (Gloo) and Open MPI",
        ("--sizes=4K,1M,4M,20M", "--peers=lax,mpi", "--iters=100"),
        (*_against("lax", s4K=40, s1M=8, s20M=4), *_against("mpi", s1M=0.8, s4M=1, s20M=1)),
    ),
    Entry(
        "chain",
        "sixteen psums in one program, each waiting for the last",
        ("--sizes=4K", "--chain=16", "--peers=lax,mpi", "--iters=60"),
        _against("lax", s4K=100),
    ),
    Entry(
        "all_gather",
        "all_gather, a process a rank (a size is the whole: 8M is 1 MiB a rank)",
        ("--collective=all_gather", "--sizes=8M,32M,160M", "--peers=lax,mpi", "--iters=16"),
        (*_against("lax", s160M=8), *_against("mpi", s8M=0.8, s32M=1, s160M=1)),
    ),
    Entry(
        "tcp",
        "psum over tcp on loopback",
        ("--transport=tcp", "--sizes=4K,64K,1M,20M", "--peers=lax", "--iters=60"),
        _against("lax", s4K=5, s64K=5, s1M=5, s20M=1.2),
    ),
    Entry(
        "inproc",
        "psum, one process with a device a rank",
        ("--layout=inproc", "--sizes=4K,4M,16M", "--peers=lax,copy", "--iters=60"),
        (*_against("lax", s4K=1, s4M=1.5, s16M=1.2), *_against("copy", s4M=1 / 1.15, s16M=1 / 1.15)),
    ),
    Entry("ranks", "psum by number of ranks", ("--ranks=2,4,8,16", "--sizes=4K,1M", "--peers=mpi")),
    Entry(
        "record",
        "the cost of recording every edge (the second peer does, too: two equal groups)",
        ("--sizes=4K,1M", "--peers=JAXCOLL_RECORD=off,JAXCOLL_RECORD=on", "--iters=400", "--blocks=40"),
        _against("JAXCOLL_RECORD=off", s4K=1 / 1.03, s1M=1 / 1.01),
    ),
    Entry("memory", "memory beyond arguments and results", ("--sizes=64M", "--iters=3"), (), 16 * _MIB),
)


def _microseconds(value: float) -> str:
    return f"{value:.1f} us" if value < 1000 else f"{value / 1000:.2f} ms"


def lines_of(entry: Entry, rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """The entry's table in Markdown, and a line for each target missed."""
    main = {(row.case.ranks, row.case.size): row for row in rows if row.impl == "jaxcoll"}
    peers = list(dict.fromkeys(row.impl for row in rows if row.impl != "jaxcoll"))
    by_peer = {(row.impl, row.case.ranks, row.case.size): row for row in rows}
    lines = [
        "| ranks | size | jaxcoll |" + "".join(f" {peer} | ratio | target |" for peer in peers) + " extra memory |"
    ]
    lines.append("|" + "---|" * (4 + 3 * len(peers)))
    missed: list[str] = []
    for (ranks, size), row in main.items():
        cells = [str(ranks), config.format_size(size), _microseconds(row.timing.median)]
        for peer in peers:
            other = by_peer.get((peer, ranks, size))
            wanted = next((t.ratio for t in entry.targets if (t.size, t.peer) == (size, peer)), None)
            ratio = other.timing.median / row.timing.median if other else float("nan")
            cells += [_microseconds(other.timing.median) if other else "", f"{ratio:.2f}x"]
            cells.append("" if wanted is None else f"{wanted:.3g}x, {'met' if ratio >= wanted else 'MISSED'}")
            if wanted is not None and not ratio >= wanted:
                missed.append(f"{entry.name}: {config.format_size(size)} against {peer}: {ratio:.2f}x of {wanted:.3g}x")
        extra = row.extra_bytes
        cells.append("" if extra is None else f"{extra / _MIB:.1f} MiB")
        if entry.extra_bytes is not None and (extra is None or extra > entry.extra_bytes):
            missed.append(
                f"{entry.name}: {config.format_size(size)}: {cells[-1] or 'unknown'} beyond arguments and results"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return lines, missed


def run(entries: Sequence[Entry]) -> tuple[list[str], list[str]]:
    """Run them. Returns the report in Markdown, and what missed its target or failed."""
    system = table.environment()
    about = ", ".join(f"{name} {value}" for name, value in system.items() if value is not None)
    report, missed = [f"Measured {datetime.date.today().isoformat()}: {about}.", ""], list[str]()
    for entry in entries:
        report += [f"### {entry.title}", "", f"    jaxcoll bench {' '.join(entry.flags)}", ""]
        try:
            rows = cli.measure(entry.flags)
        except JaxcollError as error:
            report += [f"Failed: {error}", ""]
            missed.append(f"{entry.name}: {error}")
            continue
        lines, short = lines_of(entry, rows)
        wrong = sum(row.nwrong for row in rows)
        report += [*lines, "", *([f"{wrong} WRONG VALUES", ""] if wrong else [])]
        missed += short + ([f"{entry.name}: {wrong} wrong values"] if wrong else [])
    return report, missed


def put_into(document: str, report: Sequence[str]) -> str:
    """`document` with the report between its two marks. Raises UsageError if they aren't there."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"the file has no lines {BEGIN} and {END}")
    return head + begin + "\n\n" + "\n".join(report).strip() + "\n\n" + end + tail


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 1 if a target was missed."""
    names = [entry.name for entry in ENTRIES]
    parser = argparse.ArgumentParser(prog="python -m jaxcoll.bench.suite", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)} (all)")
    parser.add_argument("--write", type=Path, help="put the tables into this file, between its two marks")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    if args.write:  # before the run, which takes long
        if args.names:
            parser.error("--write replaces all tables in the file: it can't go with the names of some rows")
        try:
            put_into(args.write.read_text(), [])
        except (OSError, UsageError) as error:
            parser.error(f"--write: {error}")
    report, missed = run([entry for entry in ENTRIES if not args.names or entry.name in args.names])
    print("\n".join(report))
    if args.write:
        args.write.write_text(put_into(args.write.read_text(), report))
    print("\n".join(f"MISSED {line}" for line in missed) or "all targets met", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
