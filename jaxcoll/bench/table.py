"""The benchmark's output: nccl-tests' table, with the distribution and the implementation added, and the JSON form."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from jaxcoll.bench.definitions import Case, Timing, type_name
from jaxcoll.version import __version__

_HEAD = (
    "#       size         count      type   redop    root     time   algbw   busbw  #wrong      min      p99  impl\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)     (us)"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation's result for one case. extra_bytes: memory a process took beyond its input and output."""

    impl: str
    layout: str
    case: Case
    timing: Timing
    nwrong: int
    extra_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        """The row as it stands in the JSON file's "results"."""
        case, timing = self.case, self.timing
        return {
            "impl": self.impl,
            "collective": case.collective,
            "ranks": case.ranks,
            "layout": self.layout,
            "size_bytes": case.size,
            "count": case.count,
            "dtype": case.dtype,
            "chain": case.chain,
            "time_us": {"min": timing.min, "median": timing.median, "p99": timing.p99},
            "algbw_GBps": timing.algbw,
            "busbw_GBps": timing.busbw,
            "nwrong": self.nwrong,
            "extra_bytes": self.extra_bytes,
        }


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 100_000 else f"{value:.0f}"


def header(collective: str, ranks: int, layout: str, lines: Sequence[str]) -> str:
    """The comment lines above the rows; `lines` are put in the middle."""
    about = [f"# jaxcoll bench: {collective}, {ranks} ranks, layout {layout}", *(f"# {line}" for line in lines)]
    return "\n".join([*about, "#", _HEAD])


def format_row(row: Row, main: Row | None = None) -> str:
    """One line of the table; time is the median. A peer's line ends with how many times as long as `main` it took."""
    case, timing, operation = row.case, row.timing, row.case.operation
    ratio = f"  ({timing.median / main.timing.median:.2f}x {main.impl}'s time)" if main is not None else ""
    return (
        f"{case.size:12d}  {case.count:12d}  {type_name(case.dtype):>8}  {operation.redop:>6}  {operation.root:>6}"
        f"  {_number(timing.median):>7} {timing.algbw:7.3f} {timing.busbw:7.3f} {row.nwrong:7d}"
        f"  {_number(timing.min):>7}  {_number(timing.p99):>7}  {row.impl}{ratio}"
    )


def footer(collective: str, rows: Sequence[Row]) -> str:
    """The closing lines: wrong values over all rows, and the average bus bandwidth of each implementation."""
    wrong = sum(row.nwrong for row in rows)
    lines = [f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"]
    for impl in dict.fromkeys(row.impl for row in rows):
        values = [row.timing.busbw for row in rows if row.impl == impl]
        lines.append(f"# Avg bus bandwidth    : {sum(values) / len(values):.4f}  {impl}")
    return "\n".join([*lines, "#", f"# Collective test concluded: {collective}"])


def environment() -> dict[str, Any]:
    """What a reader of the JSON needs to know of the machine: versions, cores, system."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    versions = {name: version(name) for name in ("jax", "jaxlib", "numpy", "mpi4py")}
    cores = len(os.sched_getaffinity(0))
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": cores,
        "jaxcoll": __version__,
        **versions,
    }
