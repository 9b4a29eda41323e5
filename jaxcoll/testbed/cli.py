"""The command `jaxcoll testbed`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxcoll import config
from jaxcoll.errors import JaxcollError, UsageError
from jaxcoll.testbed import access, bench, layout, ranks, result, state
from jaxcoll.testbed.flows import Flow
from jaxcoll.testbed.net import Testbed

_ABOUT = """Hosts with slow links and real traffic on this machine: network namespaces, veth, htb.

  jaxcoll testbed up --hosts 4 --outsiders 2               make one, and command it from the terminal
  jaxcoll testbed run --hosts 8 --p 2 --victim 3 train.py  run a program as one rank a host, two strangers beside it
  jaxcoll testbed bench --hosts 8 --p 0,2 --variants untuned,lax --json out.json
  jaxcoll testbed clean                                    remove what a killed testbed has left

Runs as root, or as an ordinary user where user namespaces are allowed. Needs ip and tc (package iproute2)."""

_UP = """Commands (one a line; the end of the input takes the testbed down):
  rate LINK RATE [up|down]    change a link while it is used       rate h3 50Mbit up
  flow FROM TO [CONNECTIONS]  start a background flow              flow x0 h3 4
  stop                        end all background flows
  show                        links, rates, and what the flows get"""


def _rate(text: str) -> float:
    try:
        return layout.parse_rate(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    try:
        return config.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers, comma separated") from None
    if min(numbers) < 0 or max(numbers) > layout.MOST_STATIONS // 2:
        raise argparse.ArgumentTypeError(f"{text!r} must be from 0 to {layout.MOST_STATIONS // 2}")
    return numbers


def _from_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of 1 or more")
    return int(text)


def _network_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--hosts", type=_from_one, default=8, help="hosts for ranks (8)")
    add("--ranks-per-host", type=_from_one, default=1, help="rank processes on each host (1)")
    add("--topology", choices=("star", "racks", "spines"), default="star", help="how they are wired (star)")
    add("--link", type=_rate, default=200e6, help="rate of each host's link, both ways (200Mbit)")
    add("--spine", type=_rate, help="rate of the link between racks (twice --link), or of a leaf to a spine (--link)")
    add("--width", type=_from_one, default=4, help="number of spines (4)")
    add("--fair", choices=("peer", "none"), default="peer", help="peer: equal shares a peer; none: connections compete")
    add("--congestion", default="cubic", help="TCP's congestion control in the data network (cubic)")
    add("--name", help="name of this testbed, part of its namespaces' names (made from the process id)")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="jaxcoll testbed", description=_ABOUT, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="up|run|bench|clean")

    up = commands.add_parser("up", help="make a testbed and keep it", description=_UP, formatter_class=raw)
    _network_options(up)
    up.add_argument("--outsiders", type=int, default=2, help="stations outside of the job (2)")

    run = commands.add_parser("run", help="run a program as ranks inside the hosts")
    _network_options(run)
    run.add_argument("--p", type=int, default=0, help="background flows (0)")
    run.add_argument("--connections", type=_from_one, default=1, help="TCP connections of each background flow (1)")
    run.add_argument("--victim", type=int, help="the host they go to (0, or past all hosts on racks and spines)")
    run.add_argument("--burst", help="ON:OFF seconds: flows come and go (all the time)")
    run.add_argument("--output", choices=("prefix", "first"), default="prefix", help="show all ranks, or rank 0 alone")
    run.add_argument("--timeout", type=float, help="kill all ranks and fail after this many seconds")
    run.add_argument("program", help="a Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")

    _bench_options(commands.add_parser("bench", help="compare tuned, untuned and jax.lax under congestion"))

    clean = commands.add_parser("clean", help="remove what killed testbeds have left")
    clean.add_argument("--kill", nargs="+", default=[], metavar="NAME", help="also end these testbeds if they run")
    return parser


def _bench_options(parser: argparse.ArgumentParser) -> None:
    _network_options(parser)
    add = parser.add_argument
    add("--p", type=_numbers, default=(2,), help="background flows, or a comma list of numbers to try in turn (2)")
    add("--connections", type=_from_one, default=1, help="TCP connections of each background flow (1)")
    add("--victim", type=int, help="host that they congest (drawn among those that the schedule loads most)")
    add("--schedule", default="dual_tree", help="schedule of jaxcoll; auto: its own choice (dual_tree)")
    add("--size", type=_size, default=4 << 20, help="bytes a rank (4M)")
    add("--variants", default="tuned,untuned,lax", help="what to compare (tuned,untuned,lax)")
    add("--tuner", default="on", help="JAXCOLL_TUNER of the variant tuned: on, swaps or react-paper (on)")
    add("--epochs", type=_from_one, default=60, help="timed calls of each variant (60)")
    add("--block", type=_from_one, default=10, help="calls before the next variant's turn (10)")
    add("--placements", type=_from_one, default=3, help="places of the congestion (3)")
    add("--warmup", type=_from_one, default=3, help="calls before the congestion begins (3)")
    add("--settle", type=int, default=1, help="calls without the clock at the head of each block (1)")
    add("--shuffle", action="store_true", help="deal the ranks to the hosts anew for each placement")
    add("--seed", type=int, default=0, help="seed of all drawing (0)")
    add("--deadline", type=float, default=600.0, help="seconds that a block or a start may take (600)")
    add("--json", type=Path, help="write the results to this file")


def _layout(args: argparse.Namespace, outsiders: int) -> layout.Layout:
    fair = args.fair == "peer"
    if args.topology == "star":
        return layout.star(args.hosts, outsiders, args.link, fair=fair)
    if args.topology == "racks":
        return layout.racks(args.hosts, outsiders, args.link, args.spine, fair=fair)
    return layout.spines(args.hosts, outsiders, args.link, args.spine, width=args.width, fair=fair)


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
    with Testbed(_layout(args, args.outsiders), args.name, congestion=args.congestion) as bed:
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
    found = bench.background(bed.layout, args.p, args.victim, args.connections)
    return [Flow(flow.src, flow.dst, flow.connections, burst) for flow in found]


def _run(args: argparse.Namespace) -> int:
    bench.check_victim(args.victim, args.hosts)
    outsiders = bench.outsiders_needed(args.topology, args.p)
    command = [sys.executable, args.program, *args.arguments]
    with Testbed(_layout(args, outsiders), args.name, congestion=args.congestion) as bed:
        hosts = ranks.slots(bed.layout.hosts, args.ranks_per_host)
        with bed.start_flows(_flows(args, bed)), ranks.HostRanks(bed, command, hosts, output=args.output) as running:
            done = running.wait(args.timeout)
            if done.exit_code:
                bad = [rank for rank, code in enumerate(done.codes) if code]
                if args.output == "first":
                    print("\n".join(running.tail(rank) for rank in bad if rank), file=sys.stderr)
                print(f"jaxcoll testbed run: exit codes by rank: {done.codes}", file=sys.stderr)
            return done.exit_code


def _plan(args: argparse.Namespace) -> bench.Plan:
    return bench.Plan(
        flows=args.p,
        victim=args.victim,
        connections=args.connections,
        schedule=None if args.schedule == "auto" else args.schedule,
        size=args.size,
        variants=tuple(args.variants.split(",")),
        epochs=args.epochs,
        block=args.block,
        placements=args.placements,
        warmup=args.warmup,
        settle=args.settle,
        seed=args.seed,
        ranks_per_host=args.ranks_per_host,
        shuffle=args.shuffle,
        deadline=args.deadline,
        tuner=args.tuner,
    )


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    plain = {key: value for key, value in vars(args).items() if key not in ("command", "json", "name")}
    return plain | {"p": list(args.p), "python": sys.version.split()[0], "inside": access.in_user_namespace()}


def _bench(args: argparse.Namespace) -> int:
    plan = _plan(args)
    bench.check(plan, args.hosts)
    say = _progress()
    outsiders = bench.outsiders_needed(args.topology, max(plan.flows))
    with Testbed(_layout(args, outsiders), args.name, congestion=args.congestion) as bed:
        print(f"# psum of {config.format_size(plan.size)}B float32, {args.hosts} hosts, {args.topology}, ", end="")
        print(f"links of {layout.format_rate(args.link)}, schedule {args.schedule}\n{result.HEAD}", flush=True)
        rows, totals = bench.measure(bed, plan, say, lambda row: print(row, flush=True))
    ratios: dict[str, dict[str, float]] = {}
    for count in plan.flows:
        for slow, fast in zip(plan.variants[1:], [plan.variants[0]] * len(plan.variants)):
            ratios[f"p={count}: {slow}/{fast}"] = bench.ratio(rows, count, slow, fast)
    for name, by_kind in ratios.items():
        print(f"# {name}:", *(f"{kind} {value:.3f}" for kind, value in by_kind.items()))
    print(
        f"# swaps {totals.swaps}, reverts {totals.reverts}, compilations after the first {totals.compilations}, ",
        end="",
    )
    print(f"wrong {totals.wrong}")
    if args.json is not None:
        args.json.write_text(json.dumps(result.as_json(rows, totals, _settings(args), ratios), indent=1) + "\n")
    return 1 if totals.wrong else 0


def _progress() -> Callable[[str], None]:
    # One line on stderr every ten seconds at most; the table goes to stdout.
    last = 0.0

    def say(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > 10.0:
            print(f"# {text}", file=sys.stderr, flush=True)
            last = time.monotonic()

    return say


def _clean(args: argparse.Namespace) -> int:
    removed = state.clean(args.kill)
    print(f"Removed {len(removed)} namespaces: {', '.join(removed)}" if removed else "Nothing was left behind.")
    return 0


def _end_by_exception() -> None:
    # A plain SIGTERM would end Python without its `with` blocks, and leave the namespaces to the next start.
    def leave(signum: int, _: Any) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, leave)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `jaxcoll testbed`. Returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(words)
    access.enter([sys.executable, "-m", "jaxcoll", "testbed", *words])
    _end_by_exception()
    commands = {"up": _up, "run": _run, "bench": _bench, "clean": _clean}
    try:
        return commands[args.command](args)
    except TimeoutError as error:
        print(f"jaxcoll testbed: {error}", file=sys.stderr)
        return 124
