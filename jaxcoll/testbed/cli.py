"""The command `jaxcoll testbed`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxcoll.errors import JaxcollError, UsageError
from jaxcoll.testbed import access, bench_cli, layout, plan, ranks, scenarios, state, table
from jaxcoll.testbed.flows import Flow
from jaxcoll.testbed.net import Testbed
from jaxcoll.testbed.options import connections, make_layout, network_options

_ABOUT = """Hosts with slow links and real traffic on this machine: network namespaces, veth, htb.

  jaxcoll testbed up --hosts 4 --outsiders 2               make one, and command it from the terminal
  jaxcoll testbed run --hosts 8 --p 2 --victim 3 train.py  run a program as one rank a host, two strangers beside it
  jaxcoll testbed bench --hosts 8 --p 0,2 --variants untuned,lax --json out.json
  jaxcoll testbed table --json-dir DIR --write BENCHMARKS.md   every scenario of the tuner, and the table of them all
  jaxcoll testbed clean                                    remove what a killed testbed has left

Runs as root, or as an ordinary user where user namespaces are allowed. Needs ip and tc (package iproute2)."""

_UP = """Commands (one a line; the end of the input takes the testbed down):
  rate LINK RATE [up|down]    change a link while it is used       rate h3 50Mbit up
  flow FROM TO [CONNECTIONS]  start a background flow              flow x0 h3 4
  stop                        end all background flows
  show                        links, rates, and what the flows get"""


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="jaxcoll testbed", description=_ABOUT, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="up|run|bench|table|clean")

    up = commands.add_parser("up", help="make a testbed and keep it", description=_UP, formatter_class=raw)
    network_options(up)
    up.add_argument("--outsiders", type=int, default=2, help="stations outside of the job (2)")

    run = commands.add_parser("run", help="run a program as ranks inside the hosts")
    network_options(run)
    run.add_argument("--p", type=int, default=0, help="background flows (0)")
    run.add_argument("--connections", type=connections, default=1, help="TCP connections of each background flow (1)")
    run.add_argument("--victim", type=int, help="the host they go to (0, or past all hosts on racks and spines)")
    run.add_argument("--burst", help="ON:OFF seconds: flows come and go (all the time)")
    run.add_argument("--output", choices=("prefix", "first"), default="prefix", help="show all ranks, or rank 0 alone")
    run.add_argument("--timeout", type=float, help="kill all ranks and fail after this many seconds")
    run.add_argument("program", help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")

    bench_cli.options(commands.add_parser("bench", help="compare tuned, untuned and jax.lax under congestion"))
    about = table.ABOUT + "\n\nScenarios:\n" + scenarios.listing()
    table.options(commands.add_parser("table", help="run all scenarios", description=about, formatter_class=raw))

    clean = commands.add_parser("clean", help="remove what killed testbeds have left")
    clean.add_argument("--kill", nargs="+", default=[], metavar="NAME", help="also end these testbeds if they run")
    return parser


def _show(bed: Testbed) -> None:
    for name, address in bed.layout.addresses.items():
        up, down = (layout.format_rate(bed.rates[name, way] or 0.0) for way in ("up", "down"))
        print(f"{name:>5}  {address:<12} sends {up}, receives {down}   ip netns exec {bed.namespace(name)} COMMAND")
    for link in bed.layout.links:
        if link.rate is not None and link.name not in bed.layout.addresses:
            rates = (layout.format_rate(bed.rates[link.name, way] or 0.0) for way in ("up", "down"))
            print(f"{link.name:>14}  {' up, '.join(rates)} down")
    sys.stdout.flush()


def _obey(bed: Testbed, words: Sequence[str], running: list[Any]) -> None:
    match words:
        case ["rate", link, rate]:
            bed.set_rate(link, layout.parse_rate(rate))
        case ["rate", link, rate, ("up" | "down") as direction]:
            bed.set_rate(link, layout.parse_rate(rate), direction)
        case ["flow", src, dst, *rest] if len(rest) < 2 and all(word.isdecimal() for word in rest):
            running.append(bed.start_flows([Flow(src, dst, int(rest[0]) if rest else 1)]))
        case ["stop"]:
            while running:
                running.pop().stop()
        case ["show"]:
            _show(bed)
            for flows in running:
                rate = flows.rates(time.monotonic() - 1.0)[0]
                print(
                    f"{flows.flows[0].src} -> {flows.flows[0].dst}: {layout.format_rate(round(rate, -4))}", flush=True
                )
        case _:
            raise UsageError(f"{' '.join(words)!r} is no command.\n{_UP}")


def _up(args: argparse.Namespace) -> int:
    with Testbed(make_layout(args, args.outsiders), args.name, congestion=args.congestion) as bed:
        _show(bed)
        if access.in_user_namespace():
            print(f"From another terminal: nsenter -t {_own_pid()} -U -n -m --preserve-credentials COMMAND")
        print(_UP, flush=True)
        running: list[Any] = []
        for line in sys.stdin:
            if line.split():
                try:
                    _obey(bed, line.split(), running)
                except JaxcollError as error:
                    print(error, flush=True)
    return 0


def _own_pid() -> str:
    return Path("/proc/self").readlink().name


def _flows(args: argparse.Namespace, bed: Testbed) -> list[Flow]:
    burst = None
    if args.burst:
        try:
            on, off = (float(part) for part in args.burst.split(":"))
        except ValueError:
            raise UsageError(f"--burst={args.burst} must be seconds on and off, such as 2:3.") from None
        burst = (on, off)
    found = plan.background(bed.layout, args.p, args.victim, args.connections)
    return [Flow(flow.src, flow.dst, flow.connections, burst) for flow in found]


def _run(args: argparse.Namespace) -> int:
    plan.check_victim(args.victim, args.hosts)
    outsiders = plan.outsiders_needed(args.topology, args.p)
    command = [sys.executable, args.program, *args.arguments]
    with Testbed(make_layout(args, outsiders), args.name, congestion=args.congestion) as bed:
        hosts = ranks.slots(bed.layout.hosts, args.ranks_per_host)
        with bed.start_flows(_flows(args, bed)), ranks.HostRanks(bed, command, hosts, output=args.output) as running:
            done = running.wait(args.timeout)
            if done.exit_code:
                bad = [rank for rank, code in enumerate(done.codes) if code]
                if args.output == "first":
                    print("\n".join(running.tail(rank) for rank in bad if rank), file=sys.stderr)
                print(f"jaxcoll testbed run: exit codes by rank: {done.codes}", file=sys.stderr)
            return done.exit_code


def _clean(args: argparse.Namespace) -> int:
    removed = state.clean(args.kill)
    print(f"Removed {len(removed)} namespaces: {', '.join(removed)}" if removed else "Nothing was left behind.")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command `jaxcoll testbed`. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    if args.command == "table" and args.only_write:
        return table.run(args)
    access.enter([sys.executable, "-m", "jaxcoll", "testbed", *words])
    commands = {"up": _up, "run": _run, "bench": bench_cli.run, "table": table.run, "clean": _clean}
    try:
        return commands[args.command](args)
    except TimeoutError as error:
        print(f"jaxcoll testbed: {error}", file=sys.stderr)
        return 124
