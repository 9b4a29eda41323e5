"""The small commands: `jaxcoll draw` and `jaxcoll explain`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxcoll.errors import ScheduleError, UsageError


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _known() -> str:
    from jaxcoll import schedule

    rows: list[str] = []
    for name, builder in schedule.builders().items():
        kinds = ", ".join(kind.name.lower() for kind in builder.kinds)
        rows.append(f"  {name:<20} {kinds}")
        rows += [f"      -p {param}=...  {help}" for param, help in builder.params.items()]
    return "\n".join(["schedules and the collectives that they do:", *rows])


def _draw_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxcoll draw",
        description="Draw a schedule: positions down, steps across, an arrow an edge, a colour a chunk graph.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_known(),
    )
    parser.add_argument("schedule", help="a schedule's name, or a file (.json, .jxc, .xml)")
    parser.add_argument("--ranks", type=int, help="for a name: number of ranks (8)")
    parser.add_argument("--kind", help="for a name: the collective (the first that this schedule does)")
    parser.add_argument(
        "-p",
        "--param",
        type=_parameter,
        action="append",
        metavar="NAME=VALUE",
        help="for a name: one of its parameters",
    )
    parser.add_argument("-o", "--output", type=Path, help="a .svg, or .json, .jxc or .xml to save the schedule itself")
    return parser


def draw_main(argv: Sequence[str]) -> int:
    """The command `jaxcoll draw`. Returns the exit status: 1 for a schedule that is drawn but doesn't verify."""
    from jaxcoll import schedule
    from jaxcoll.schedule.builders import REGISTRY
    from jaxcoll.schedule.files import load_file, save_file

    args = _draw_parser().parse_args(argv)
    builders = schedule.builders()
    if args.schedule in builders:
        kind = builders[args.schedule].kinds[0] if args.kind is None else args.kind
        ranks = 8 if args.ranks is None else args.ranks
        drawn = REGISTRY.build(args.schedule, kind, ranks, dict(args.param or ()))  # takes parameters of any name
    elif Path(args.schedule).suffix:
        for option, value in (("--ranks", args.ranks), ("--kind", args.kind), ("--param", args.param)):
            if value is not None:
                raise UsageError(f"{option} is for a schedule's name; {args.schedule} is a file, which says it all")
        drawn = load_file(args.schedule)
    else:
        raise ScheduleError(f"unknown schedule {args.schedule!r}; known are {', '.join(builders)}, or a file's name")
    if args.output is None:
        print(schedule.draw_svg(drawn))
    elif args.output.suffix == ".svg":
        args.output.write_text(schedule.draw_svg(drawn))
    else:
        save_file(drawn, args.output)
    edges = sum(len(graph.edges) for graph in drawn.graphs)
    about = f"{drawn.name}: {drawn.collective.kind.name.lower()}, {drawn.collective.nranks} ranks, {drawn.steps} steps"
    print(f"{about}, {len(drawn.graphs)} chunk graphs, {edges} edges", file=sys.stderr)
    findings = schedule.verify(drawn)
    for finding in findings:
        print(f"{finding.code}: {finding.message}", file=sys.stderr)
    return 1 if findings else 0


def explain_main(argv: Sequence[str]) -> int:
    """The command `jaxcoll explain`. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="jaxcoll explain",
        description="The schedules considered for an operation, what they should cost here, and which is taken.",
        epilog="Between processes: jaxcoll launch -n 8 --output first -m jaxcoll explain psum 4M",
    )
    parser.add_argument("operation", help="psum, all_gather, ...")
    parser.add_argument("size", help="bytes of one rank's whole input or output, the larger; K, M and G are understood")
    parser.add_argument("--devices", type=int, default=8, help="devices, in one process (8)")
    args = parser.parse_args(argv)
    if args.devices < 1:
        raise UsageError(f"--devices={args.devices} must be 1 or more.")
    import jaxcoll
    from jaxcoll import config, launch

    with config.override(tuner="off", run_log=""):  # nothing runs here that could be tuned
        launch.initialize(devices=args.devices)
        print(jaxcoll.explain(args.operation, args.size))
    return 0
