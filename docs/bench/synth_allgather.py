# ruff: noqa: E402
"""The figures of docs/bench/synth_allgather.md.

    python docs/bench/synth_allgather.py times    cold and warm times, three phases apart, and their growth
    python docs/bench/synth_allgather.py warm     512 ranks: cold and warm in turn
    python docs/bench/synth_allgather.py bound    rate against the max-flow bound, builders and 200 random networks
    python docs/bench/synth_allgather.py fig1     MCCL Fig. 1: one link at 400/200/100/50, ratio to NCCL's rings
    python docs/bench/synth_allgather.py plot     the growth of the phases: reads the table of `times`, writes SVG
    python docs/bench/synth_allgather.py fig8     MCCL Fig. 8a: AllGather, failures 1-3, ratio to NCCL's rings
    python docs/bench/synth_allgather.py latency  MCCL appendix C: switch removal by LP against in proportion

Times are wall-clock times (a solve is single-threaded); --cpu for those of the process's CPU, on a busy machine.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from pathlib import Path

for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # before numpy is imported
    os.environ.setdefault(_variable, "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import jaxcoll.synth.result as result_module
from jaxcoll.schedule import Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule, Table
from jaxcoll.sim import Network, plan, simulate_one
from jaxcoll.synth import SynthResult, all_gather, native
from jaxcoll.synth.evaluate import neighbours, pair_route, rate
from jaxcoll.synth.forest import History, Wish, solve
from jaxcoll.synth.result import Clock
from jaxcoll.synth.trees import depths
from jaxcoll.topology import Topology, fail, parse
from jaxcoll.topology.failures import fail2

REPEATS = 5
PHASES = ("rate", "switches", "trees", "schedule")
MESSAGE = 128 * 2**20  # bytes a rank, as in the paper
ALPHA = 1e-6


def rings(topology: Topology) -> Schedule:
    """NCCL's AllGather on rails: a ring per rail, which enters a host on its rail and leaves it on the next."""
    hosts = max(topology.hosts) + 1
    ranks = topology.nranks // hosts
    count = topology.nranks
    chunks = tuple(Chunk(home, None) for home in range(count) for _ in range(ranks))
    graphs: list[ChunkGraph] = []
    for ring in range(ranks):
        order: list[int] = []
        for host in range(hosts):
            inside = [(ring + i) % ranks for i in range(ranks)]
            inside = [inside[0], *inside[2:], inside[1]]  # in on rail `ring`, out on the next one
            order += [host * ranks + r for r in (inside if host % 2 == 0 else inside[::-1])]
        edges = [
            Edge(step, order[i], order[(i + 1) % count], Op.COPY, (order[(i - step) % count] * ranks + ring,))
            for step in range(count - 1)
            for i in range(count)
        ]
        graphs.append(ChunkGraph(tuple(edges), f"ring{ring}"))
    return Schedule("rings", Collective(Kind.ALL_GATHER, count), count - 1, chunks, tuple(graphs), 1)


def flow_network(topology: Topology) -> Network:
    """The topology for the flow simulator: a resource per link, bytes/s."""
    links = {link: i for i, link in enumerate(topology.capacity)}
    capacity = tuple(float(amount) * 1e9 / 8 for amount in topology.capacity.values())
    near, count = neighbours(topology), topology.nranks
    ways = {(a, b): pair_route(topology, a, b, near) for a in range(count) for b in range(count) if a != b}
    routes = np.full((1, count, count, max(map(len, ways.values()))), -1, np.int64)
    for (a, b), way in ways.items():
        routes[0, a, b, : len(way)] = [links[link] for link in way]
    return Network(topology.hosts, capacity, routes, alpha=ALPHA)


def simulated(schedule: Schedule, topology: Topology) -> float:
    """Algorithm bandwidth in Gbit/s of one execution with MESSAGE bytes a rank."""
    table = Table.identity(schedule)
    total = simulate_one(plan(schedule, table, MESSAGE), flow_network(topology)).total
    return topology.nranks * MESSAGE * 8 / total / 1e9


def timed(topology: Topology, warm: History | None = None) -> tuple[dict[str, float], float, SynthResult]:
    """Median seconds of each phase and of the whole call, and the result."""
    runs: list[dict[str, float]] = []
    result = None
    for _ in range(REPEATS):
        began = time.perf_counter()
        result = all_gather(topology, warm=warm)
        runs.append({**result.seconds, "total": time.perf_counter() - began})
    assert result is not None
    seconds = {name: statistics.median(run.get(name, 0.0) for run in runs) for name in (*PHASES, "total")}
    return seconds, seconds.pop("total"), result


def header(*columns: str) -> None:
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns), flush=True)


def times() -> None:
    """Cold and warm, per phase."""
    header(
        "network",
        "ranks",
        "start",
        "rate s",
        "switches s",
        "trees s",
        "schedule s",
        "whole call s",
        "warm is faster",
        "k",
        "trees",
        "depth",
    )
    for kind in ("rail", "overlay"):
        for hosts in (2, 4, 8, 16, 32, 64):
            base = parse(f"{kind}:1x{hosts}x8")
            cold = row(base, "cold")
            for failure in (1, 2, 3):
                broken = fail(base, failure)
                first = row(broken, "cold")
                row(broken, "warm", cold[1], first[0])


def warm() -> None:
    """512 ranks: cold and warm solves of the same broken network in turn, medians of nine whole calls."""
    header("network", "cold s", "warm s", "warm is faster")
    for kind in ("rail", "overlay"):
        base = parse(f"{kind}:1x64x8")
        history = all_gather(base).warm
        for failure in (1, 2):
            broken = fail(base, failure)
            seconds: tuple[list[float], list[float]] = ([], [])
            for _ in range(9):
                for runs, start in zip(seconds, (None, history), strict=True):
                    began = time.perf_counter()
                    all_gather(broken, warm=start)
                    runs.append(time.perf_counter() - began)
            cold, again = map(statistics.median, seconds)
            print(f"| {broken.name} | {cold:.4f} | {again:.4f} | {cold / again:.2f}x |", flush=True)


def row(topology: Topology, how: str, warm: History | None = None, cold: float = 0.0) -> tuple[float, History]:
    seconds, total, result = timed(topology, warm)
    details = result.details
    cells = [f"{seconds[phase]:.4f}" for phase in seconds]
    ratio = f"{cold / total:.1f}x" if cold else ""
    print(
        f"| {topology.name} | {topology.nranks} | {how} | {' | '.join(cells)} | {total:.4f} | {ratio} | "
        f"{details['trees_per_rank']} | {details['distinct_trees']} | {result.depth} |",
        flush=True,
    )
    assert result.throughput == result.bound
    return total, result.warm


def bound() -> None:
    """Exactness."""
    from tests.synth.networks import built, random_network

    networks = built() + [random_network(seed) for seed in range(200)]
    exact = sum(forest.rate == forest.bound for forest in (solve(net, Wish(), Clock()) for net in networks))
    print(f"{exact} of {len(networks)} networks: rate equal to the bound, as fractions")


def fig1() -> None:
    """One link at 400, 200, 100, 50."""
    base = parse("rail:1x2x8")
    ring, static = rings(base), all_gather(base).schedule
    header("link of rank 0", "ring, Gbit/s", "static trees", "re-optimised", "static / ring", "re-optimised / ring")
    for value in (400, 200, 100, 50):
        net = base if value == 400 else fail2(base, 0, value)
        again = all_gather(net).schedule
        for name, measure in (("model", lambda s, net: 16 * float(rate(s, net))), ("simulated", simulated)):
            a, b, c = (measure(schedule, net) for schedule in (ring, static, again))
            print(f"| {value} ({name}) | {a:.0f} | {b:.0f} | {c:.0f} | {b / a:.2f} | {c / a:.2f} |", flush=True)


def fig8() -> None:
    """Failures 1-3, ratio to rings on the same broken network."""
    header("network", "failure", "ring, Gbit/s", "static / ring", "re-optimised / ring", "re-optimised / static")
    for hosts in (2, 4, 8, 16, 32):
        base = parse(f"rail:1x{hosts}x8")
        ring, static = rings(base), all_gather(base)
        for failure in (0, 1, 2, 3):
            net = fail(base, failure) if failure else base
            again = all_gather(net, warm=static.warm)
            a, b, c = (float(base.nranks * rate(s, net)) for s in (ring, static.schedule, again.schedule))
            print(
                f"| {base.name} | {failure or 'none'} | {a:.0f} | {b / a:.2f} | {c / a:.2f} | {c / b:.2f} |", flush=True
            )


def latency() -> None:
    """Both ways of switch removal: seconds of the phase (median), and how deep the trees get."""
    importlib.import_module("scipy.optimize")  # what it costs is not the phase's
    header("network", "in proportion: s", "deepest", "mean", "LP: s", "deepest", "mean")
    for spec in ("dgx_a100:2", "dgx_a100:4", "dgx_a100:8", "mi250:4", "rail:2x4x8"):
        net, cells = parse(spec), list[str]()
        for by_lp in (False, True):
            clocks = [Clock() for _ in range(REPEATS)]
            forest = [solve(net, Wish(latency=by_lp), clock) for clock in clocks][-1]
            seconds = [clock.seconds["switches"] for clock in clocks]
            assert forest.rate == forest.bound
            depth = depths(forest.trees, net.nranks).max(axis=1)
            mean = float(np.average(depth, weights=[tree.count for tree in forest.trees]))
            cells += [f"{statistics.median(seconds):.4f}", str(depth.max()), f"{mean:.2f}"]
        print(f"| {spec} | {' | '.join(cells)} |", flush=True)


def plot() -> None:
    """The growth of every phase, cold, from the table of `times` on standard input, as SVG on standard output."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in sys.stdin if line.startswith("| rail")]
    width, height, left, top = 640, 400, 70, 30
    marks: list[str] = []

    def place(ranks: float, seconds: float) -> tuple[float, float]:
        x = left + (np.log2(ranks) - 4) / 5 * (width - left - 150)
        return x, top + (1 - (np.log10(seconds) + 4) / 5) * (height - 2 * top)

    for power in range(-4, 2):
        y = place(16, 10.0**power)[1]
        marks.append(f'<line x1="{left}" y1="{y:.1f}" x2="{width - 150}" y2="{y:.1f}" stroke="#ddd"/>')
        marks.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power} s</text>')
    for ranks in (16, 32, 64, 128, 256, 512):
        marks.append(f'<text x="{place(ranks, 1e-4)[0]:.1f}" y="{height - 8}" text-anchor="middle">{ranks}</text>')
    series = [("", 3, "rate", "#1b6ca8"), ("", 4, "switches", "#2a9d4a"), ("", 5, "trees", "#c0392b")]
    series += [("", 6, "schedule", "#8e44ad")]
    series += [(":fail2", column, f"{name}, failure 2", colour) for _, column, name, colour in series]
    for number, (suffix, column, name, colour) in enumerate(series):
        dash = ' stroke-dasharray="5 4"' if suffix else ""
        chosen = [row for row in rows if row[2] == "cold" and row[0].endswith("x8" + suffix)]
        points = " ".join("{:.1f},{:.1f}".format(*place(int(r[1]), max(1e-4, float(r[column])))) for r in chosen)
        marks.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        y = top + 20 * number
        marks.append(f'<line x1="{width - 140}" y1="{y}" x2="{width - 115}" y2="{y}" stroke="{colour}"{dash}/>')
        marks.append(f'<text x="{width - 108}" y="{y + 4}">{name}</text>')
    font = 'font-family="sans-serif" font-size="12"'
    print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {font}>')
    print("\n".join(['<rect width="100%" height="100%" fill="white"/>', *marks, "</svg>"]))


PARTS = {f.__name__: f for f in (times, warm, bound, fig1, plot, fig8, latency)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--cpu", action="store_true", help="seconds of the process's CPU instead of the wall clock's")
    args = parser.parse_args()
    if args.cpu:
        result_module.time.perf_counter = time.process_time  # type: ignore[assignment]
    if args.part != "plot":
        print(f"<!-- native engine: {'yes' if native.load() else 'no'} -->")
    PARTS[args.part]()
