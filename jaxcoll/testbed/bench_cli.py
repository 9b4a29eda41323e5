"""The command `jaxcoll testbed bench`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxcoll import config
from jaxcoll.errors import UsageError
from jaxcoll.testbed import access, bench, layout, result
from jaxcoll.testbed.net import Testbed
from jaxcoll.testbed.options import (
    connections,
    from_one,
    from_zero,
    late,
    make_layout,
    network_options,
    numbers,
    rounds,
    size,
    slow,
    width,
)
from jaxcoll.testbed.plan import Plan, Trouble, check, outsiders_needed

_VARIANTS = (
    "tuned: see --tuner; on, swaps, react-paper: that tuner; untuned; lax: jax.lax; quiet: untuned, before the "
    "trouble; best: the best table found by trying them"
)


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    network_options(parser)
    add = parser.add_argument
    add("--p", type=numbers, default=(2,), help="background flows, or a comma list of numbers to try in turn (2)")
    add("--connections", type=connections, default=1, help="TCP connections of each background flow (1)")
    add("--victim", type=int, help="host that they congest (drawn among those that the schedule loads most)")
    add("--schedule", default="dual_tree", help="schedule of jaxcoll; auto: its own choice (dual_tree)")
    add("--size", type=size, default=4 << 20, help="bytes a rank (4M)")
    add("--variants", default="tuned,untuned,lax", help=f"what to compare (tuned,untuned,lax); {_VARIANTS}")
    add("--tuner", help="JAXCOLL_TUNER of the variant tuned: on, swaps or react-paper (on)")
    add("--epochs", type=from_one, default=60, help="timed calls of each variant (60)")
    add("--block", type=from_one, default=10, help="calls before the next variant's turn (10)")
    add("--placements", type=from_one, default=3, help="places of the congestion (3)")
    add("--warmup", type=from_one, default=3, help="calls before the congestion begins (3)")
    add("--settle", type=from_zero, default=1, help="calls without the clock at the head of each block (1)")
    add("--shuffle", action="store_true", help="deal the ranks to the hosts anew for each placement")
    add("--tries", type=from_one, help="tables tried on the wire for the variant best (5)")
    add("--late", type=late, metavar="RANK:TIME", help="a rank that is late in every epoch: 3:50ms")
    add("--slow", type=slow, metavar="LINK:WAY:RATE", help="a link that turns slow: h3:up:50Mbit")
    add("--come-and-go", type=rounds, metavar="ON:OFF:TIMES", help="seconds with the trouble, without, how often")
    add("--seed", type=int, default=0, help="seed of all drawing (0)")
    add("--deadline", type=float, default=600.0, help="seconds that a block or a start may take (600)")
    add("--json", type=Path, help="write the results to this file")


def _plan(args: argparse.Namespace) -> Plan:
    """What the options ask for. UsageError for one that none of the variants has a use for."""
    variants = tuple(args.variants.split(","))
    for option, variant in (("tuner", "tuned"), ("tries", "best")):
        if getattr(args, option) is not None and variant not in variants:
            raise UsageError(
                f"--{option} is for the variant `{variant}`, which isn't among --variants {args.variants}."
            )
    return Plan(
        flows=args.p,
        victim=args.victim,
        connections=args.connections,
        schedule=None if args.schedule == "auto" else args.schedule,
        size=args.size,
        variants=variants,
        epochs=args.epochs,
        block=args.block,
        placements=args.placements,
        warmup=args.warmup,
        settle=args.settle,
        seed=args.seed,
        ranks_per_host=args.ranks_per_host,
        shuffle=args.shuffle,
        deadline=args.deadline,
        tuner=args.tuner or "on",
        tries=args.tries or 5,
        trouble=Trouble(args.late, args.slow, args.come_and_go),
    )


def _settings(args: argparse.Namespace, plan: Plan, seconds: float) -> dict[str, Any]:
    plain = {key: value for key, value in vars(args).items() if key not in ("command", "json", "name")}
    more = {"python": sys.version.split()[0], "inside": access.in_user_namespace(), "took_s": round(seconds, 1)}
    used = {"p": list(args.p), "width": width(args), "tuner": plan.tuner, "tries": plan.tries}
    return plain | used | more


def _ratios(plan: Plan, rows: list[result.Row]) -> dict[str, dict[str, float]]:
    """By how much each variant is faster than the untuned one, and the tuned ones than jax.lax."""
    if plan.trouble.rounds is not None:
        return {}
    pairs = [("untuned", v) for v in plan.variants if v != "untuned" and "untuned" in plan.variants]
    pairs += [("lax", v) for v in plan.variants if plan.is_tuned(v) and "lax" in plan.variants]
    return {f"p={p}: {slow}/{fast}": bench.ratio(rows, p, slow, fast) for p in plan.flows for slow, fast in pairs}


def run(args: argparse.Namespace) -> int:
    """Carries the command out. Returns the exit status: 1 if a result was wrong."""
    plan, began = _plan(args), time.monotonic()
    check(plan, args.hosts, args.topology, width(args))
    network = make_layout(args, outsiders_needed(args.topology, max(plan.flows)))
    if args.json is not None:
        args.json.open("a").close()  # what can't be written is told now, not after the measurement
    with Testbed(network, args.name, congestion=args.congestion) as bed:
        print(f"# psum of {config.format_size(plan.size)}B float32, {args.hosts} hosts, {args.topology}, ", end="")
        print(f"links of {layout.format_rate(args.link)}, schedule {args.schedule}\n{result.HEAD}", flush=True)
        rows, totals = bench.measure(bed, plan, _progress(), lambda row: print(row, flush=True))
    for found in totals.found:
        print(found)
    for found in totals.best:
        print(f"# best, p={found['p']}, placement {found['placement']}: {found['scored']} scored; tried:")
        for one in found["tried"]:
            print(f"#   {one['what']}: {one['measured_ms']} ms (model {one['model_ms']})")
    ratios = _ratios(plan, rows)
    for name, by_kind in ratios.items():
        print(f"# {name}:", *(f"{kind} {value:.3f}" for kind, value in by_kind.items()))
    data = result.as_json(rows, totals, _settings(args, plan, time.monotonic() - began), ratios)
    counts = f"swaps {data['swaps']}, reverts {data['reverts']}, compilations after the first {totals.compilations}"
    print(f"# {counts}, wrong {totals.wrong}")
    if args.json is not None:
        args.json.write_text(json.dumps(data, indent=1) + "\n")
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
