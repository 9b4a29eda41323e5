"""`jaxcoll synth` and `jaxcoll verify`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxcoll.errors import MALFORMED, UsageError
from jaxcoll.schedule import Schedule, bit_equal, load_file, save_file, verify
from jaxcoll.schedule.files import check_writable
from jaxcoll.synth import allgather, history
from jaxcoll.synth.imports import foreign_reader, loads_foreign
from jaxcoll.synth.result import Status, SynthResult
from jaxcoll.topology import Topology, fail, parse

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
TREES = {
    "all_gather": allgather.all_gather,
    "reduce_scatter": allgather.reduce_scatter,
    "all_reduce": allgather.all_reduce,
}
BAR_AFTER_S = 1.0
BAR_WIDTH = 30
SHOWN_FINDINGS = 20


class ProgressBar:
    """One line on a terminal, once a solve has taken a second; nothing elsewhere."""

    def __init__(self, stream: Any):
        self._stream, self._start, self._shown = stream, time.perf_counter(), 0.0
        self._alive = bool(stream.isatty())

    def __call__(self, phase: str, done: float | None) -> bool:
        now = time.perf_counter()
        if self._alive and now - self._start > BAR_AFTER_S and now - self._shown > 0.1:
            self._shown = now
            filled = int(BAR_WIDTH * done) if done is not None else 0
            bar = "#" * filled + "." * (BAR_WIDTH - filled)
            share = f"{done:4.0%}" if done is not None else "   ?"
            self._stream.write(f"\r{phase:<10} [{bar}] {share} {now - self._start:6.1f} s")
            self._stream.flush()
        return True

    def close(self) -> None:
        """Wipes the line."""
        if self._shown:
            self._stream.write("\r" + " " * (BAR_WIDTH + 30) + "\r")
            self._stream.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxcoll synth",
        description="Make a throughput-optimal schedule for a network.",
        epilog="Topologies: rail:SxHxN, overlay:SxHxN, ring:N, star:N, torus:AxB, fattree:K, dgx_a100:H, mi250:H, "
        "or a .json file.",
    )
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("--topology", required=True, metavar="SPEC", help="a network by name, or a .json file")
    parser.add_argument(
        "--fail", type=int, action="append", default=[], metavar="K", help="failure 1, 2 or 3 at rank 0"
    )
    parser.add_argument("--warm", metavar="FILE", help="start from FILE if it exists, and keep it up to date")
    parser.add_argument("--latency", action="store_true", help="prefer shallow: LP switch removal, fewest steps")
    parser.add_argument("--chunks", type=int, metavar="K", help="trees per rank, or most chunks per pair (all_to_all)")
    parser.add_argument("--max-depth", type=int, metavar="D", help="no tree deeper than D")
    parser.add_argument("--lanes", type=int, metavar="L", help="pipeline lanes of the schedule")
    parser.add_argument("--time-limit", type=float, metavar="S", help="the best found within S seconds")
    parser.add_argument("--json", metavar="FILE", help="write the result's numbers as JSON ('-': to standard output)")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the schedule: .json, .jxc or .xml (MSCCL)")
    return parser


def synth_main(argv: Sequence[str]) -> int:
    """Runs `jaxcoll synth`. Exit status 0, or 1 when there is no such schedule."""
    args = _parser().parse_args(list(argv))
    if args.output:
        check_writable(args.output)
    topology = parse(args.topology)
    for kind in args.fail:
        topology = fail(topology, kind)
    bar = ProgressBar(sys.stderr)
    try:
        result = _solve(args, topology, bar)
    finally:
        bar.close()
    if args.output and result.schedule is not None:  # first: what comes after can fail without losing it
        save_file(result.schedule, args.output)
    warm = _warm_text(args.collective, result.warm)
    if args.warm and warm is not None:
        _write(args.warm, warm)
    if args.json:
        _write(args.json, result.to_json() + "\n")
    if args.json != "-":
        print(describe(result, topology))
    return 1 if result.schedule is None else 0


def _solve(args: argparse.Namespace, topology: Topology, bar: ProgressBar) -> SynthResult:
    if args.collective == "all_to_all":
        return _all_to_all(args, topology, bar)
    solve: Callable[..., SynthResult] = TREES[args.collective]
    return solve(
        topology,
        chunks=args.chunks,
        max_depth=args.max_depth,
        latency=args.latency,
        lanes=args.lanes,
        warm=_read_warm(args, topology),
        time_limit=args.time_limit,
        progress=bar,
    )


def _all_to_all(args: argparse.Namespace, topology: Topology, bar: ProgressBar) -> SynthResult:
    from jaxcoll.synth import alltoall, alltoall_warm  # needs highspy, which the others do without

    for name in ("max_depth", "lanes"):
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} is for tree packing; all_to_all has --latency (fewest steps)")
    warm = None
    if args.warm and Path(args.warm).exists():
        warm = alltoall_warm.load(args.warm)
        _same_nodes(args.warm, warm.net.names, warm.net.ranks, topology)
    return alltoall.all_to_all(
        topology,
        steps="min" if args.latency else None,
        warm=warm,
        time_limit=args.time_limit,
        progress=bar,
        **({} if args.chunks is None else {"chunks": args.chunks}),
    )


def _same_nodes(path: str, names: Sequence[str], ranks: int, topology: Topology) -> None:
    """Raises UsageError where the warm start is of another network."""
    if (tuple(names), ranks) != (topology.nodes, topology.nranks):
        raise UsageError(
            f"{path}: a warm start of another network ({ranks} ranks, {len(names)} nodes, {topology.name!r} has "
            f"{topology.nranks} and {len(topology.nodes)}, or other names); give another --warm file, or a new name"
        )


def _read_warm(args: argparse.Namespace, topology: Topology) -> Any:
    """The history in --warm; for all_reduce a pair, either of which may be None."""
    warm = _load_warm(args)
    for part in warm if isinstance(warm, tuple) else [warm]:
        if part is not None:
            _same_nodes(args.warm, part.nodes, part.nranks, topology)
    return warm


def _load_warm(args: argparse.Namespace) -> Any:
    if not args.warm or not Path(args.warm).exists():
        return None
    return history.load_pair(args.warm) if args.collective == "all_reduce" else history.load(args.warm)


def _warm_text(collective: str, warm: Any) -> str | None:
    """For the file in --warm; None where the solve left nothing, as one does that a time limit ended early."""
    if warm is None or warm == (None, None):
        return None
    if collective == "all_to_all":
        from jaxcoll.synth import alltoall_warm

        return alltoall_warm.warm_to_json(warm)
    return history.pair_to_json(warm) if collective == "all_reduce" else history.warm_to_json(warm)


def _write(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: can't be written: {error}") from None


def describe(result: SynthResult, topology: Topology) -> str:
    """The result for people."""
    if result.status is Status.INFEASIBLE:
        return f"{result.collective} on {topology.name}: no schedule: {result.why}"
    unit = f"{topology.unit} per {'pair' if result.collective == 'all_to_all' else 'rank'}"
    lines = [
        f"{result.collective} on {topology.name}: {result.ranks} ranks, {result.status}",
        f"  throughput {float(result.throughput):.6g} {unit}   (bound {float(result.bound):.6g}, "
        f"gap {result.gap:.2%})" + (f"   {result.why}" if result.why else ""),
        f"  depth      {result.depth}",
        f"  steps      {result.steps}",
    ]
    total = sum(result.seconds.values())
    phases = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in result.seconds.items())
    lines.append(f"  seconds    {total:.3f} ({phases})")
    return "\n".join(lines)


def verify_main(argv: Sequence[str]) -> int:
    """Runs `jaxcoll verify FILE`: 0 and a line about the schedule, or 1 and what is wrong with it."""
    parser = argparse.ArgumentParser(
        prog="jaxcoll verify",
        description="Check that a schedule computes its collective, and the same bits on all ranks.",
        epilog="Files: .json, .jxc, .xml (MSCCL); also SCCL .msccl.json and TE-CCL .json.",
    )
    parser.add_argument("file")
    args = parser.parse_args(list(argv))
    schedule = load_any(args.file)
    findings = verify(schedule)
    if not findings:
        print(
            f"{args.file}: valid {schedule.kind.label} over {schedule.nranks} ranks, {schedule.steps} steps, "
            f"{len(schedule.graphs)} chunk graphs, {len(schedule.edges)} edges"
        )
        if bit_equal(schedule):
            return 0
        print(f"{args.file}: but its ranks add in different orders, so that their results differ in the last bits")
        return 1
    for finding in findings[:SHOWN_FINDINGS]:
        print(f"{args.file}: {finding.code}: {finding.message}")
    if len(findings) > SHOWN_FINDINGS:
        print(f"{args.file}: and {len(findings) - SHOWN_FINDINGS} more findings")
    return 1


def load_any(path: str) -> Schedule:
    """A schedule in the common forms, or of a foreign synthesiser."""
    if path.endswith(".json"):
        try:
            text = Path(path).read_text(encoding="utf-8")
            data = json.loads(text)
        except (OSError, *MALFORMED):
            return load_file(path)  # it says what is wrong with the file
        if foreign_reader(data) is not None:
            return loads_foreign(text, path)
    return load_file(path)
