"""Figures of all_to_all synthesis.

`python docs/bench/synth_alltoall.py [--hosts 2,4,8,16,32,64] [--part growth|noisy|arcs|fig8|warm] [--svg FILE]`

Prints Markdown tables. Times are wall-clock times; the solve is single-threaded. --cpu: the process's CPU time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Generator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import numpy as np

from jaxcoll.synth import SynthResult, alltoall, arc_lp
from jaxcoll.synth.alltoall_net import Net
from jaxcoll.synth.evaluate import rate
from jaxcoll.synth.result import Clock
from jaxcoll.topology import Topology
from jaxcoll.topology.builders import overlay
from jaxcoll.topology.failures import fail

PHASES = ("network", "bound", "rounding", "schedule")


class ProcessorClock(Clock):
    """Counts processor time instead of wall-clock time."""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        began, before = time.process_time(), self.seconds.get(name, 0.0)
        with super().phase(name):
            yield
        self.seconds[name] = before + time.process_time() - began


def row(label: str, result: SynthResult, unit: Fraction) -> str:
    times = " | ".join(f"{result.seconds[p]:.2f}" for p in PHASES)
    total = sum(result.seconds.values())
    best = float(result.throughput) / result.details["chunk_bound"]
    return (
        f"| {label} | {float(result.bound):.4f} | {float(result.bound) / float(unit):.4f} | "
        f"{float(result.throughput):.4f} | {100 * result.gap:.2f} % | {100 * (1 - best):.2f} % | "
        f"{result.details['chunks']} | {result.depth} | {times} | {total:.2f} |"
    )


def head() -> None:
    print("| case | bound | / gcd | rounded | gap to bound | gap to chunk bound | chunks | depth | ", end="")
    print(" | ".join(PHASES), "| total s |")
    print("|---" * 13 + "|")


def noisy(hosts: int, seed: int) -> Topology:
    """The overlay with up to 30 % taken off every directed link, each by its own amount: no symmetry is left."""
    base, rng = overlay(1, hosts, 8), np.random.default_rng(seed)
    less = {k: Fraction(int(100 * float(c) * (1 - 0.3 * rng.random())), 100) for k, c in base.capacity.items()}
    return base.with_capacity(less, f"{base.name}:noisy")


def growth(hosts: list[int]) -> dict[str, list[tuple[int, float]]]:
    head()
    lines: dict[str, list[tuple[int, float]]] = {}
    for n in hosts:
        base = overlay(1, n, 8)
        warm = None
        for failure in range(4):
            topology = fail(base, failure) if failure else base
            unit = topology.unit_capacity()
            cold = alltoall.all_to_all(topology)
            print(row(f"1x{n}x8 {f'Fail {failure}' if failure else 'base'}, cold", cold, unit), flush=True)
            if failure:
                again = alltoall.all_to_all(topology, warm=warm)
                print(row(f"1x{n}x8 Fail {failure}, warm", again, unit), flush=True)
                lines.setdefault(f"warm, fail {failure}", []).append((8 * n, sum(again.seconds.values())))
            else:
                warm = cold.warm
                for phase in PHASES:
                    lines.setdefault(phase, []).append((8 * n, cold.seconds[phase]))
                lines.setdefault("cold, base", []).append((8 * n, sum(cold.seconds.values())))
    return lines


def lost(hosts: int, share: float, seed: int) -> Topology:
    """The overlay with this share of its directed rail links gone."""
    base, rng = overlay(1, hosts, 8), np.random.default_rng(seed)
    ranks, names = base.nranks, base.nodes
    left = [
        (names[u], names[v], c) for (u, v), c in base.capacity.items() if max(u, v) >= ranks or rng.random() >= share
    ]
    return Topology.of(f"{base.name}:lost", names[:ranks], names[ranks:], left)


def cycles(ranks: int, seed: int) -> Topology:
    """The sum of four random cycles through all ranks, 50 to 100 a link: no set of ranks is a bottleneck."""
    rng, capacity = np.random.default_rng(seed), dict[tuple[int, int], int]()
    for _ in range(4):
        ring = rng.permutation(ranks).tolist()
        for u, v in zip(ring, ring[1:] + ring[:1], strict=True):
            capacity[u, v] = capacity.get((u, v), 0) + int(rng.integers(50, 101))
    names = [f"r{i}" for i in range(ranks)]
    return Topology.of("cycles", names, [], [(names[u], names[v], c) for (u, v), c in capacity.items()])


def without_symmetry(hosts: list[int]) -> None:
    head()
    for n in hosts:
        for seed in (1, 2, 3):
            result = alltoall.all_to_all(noisy(n, seed))
            print(row(f"1x{n}x8, noisy {seed}", result, Fraction(1)), flush=True)
        result = alltoall.all_to_all(lost(n, 0.05, 1))
        print(row(f"1x{n}x8, 5 % of the links lost", result, Fraction(1)), flush=True)


def arcs(hosts: list[int]) -> None:
    """Both solvers in turn on the same networks; above 128 ranks the arc LP is left out."""
    print("| case | arc LP | its seconds | here: LP | bound | rounded | seconds: LP | whole, rounding included |")
    print("|---|---|---|---|---|---|---|---|")
    for n in hosts:
        cases = [(f"1x{n}x8 Fail 2", fail(overlay(1, n, 8), 2)), (f"1x{n}x8 noisy 1", noisy(n, 1))]
        cases += [(f"1x{n}x8 noisy 2", noisy(n, 2))]
        if n <= 8:
            cases += [(f"1x{n}x8 5 % lost", lost(n, 0.05, 1)), (f"{8 * n} ranks, cycles", cycles(8 * n, 1))]
        for label, topology in cases:
            theirs = "| |"
            if n <= 16:
                began = time.process_time()
                oracle = arc_lp.solve(Net.from_topology(topology), solver="ipm")
                theirs = f"{oracle.throughput:.4f} | {time.process_time() - began:.2f} |"
            result = alltoall.all_to_all(topology, build=False)
            solved = f"{result.details['lp_rate']:.4f}" if result.details["lp_rate"] else "none needed"
            print(
                f"| {label} | {theirs} {solved} | {result.bound:.4f} | {float(result.throughput):.4f} | "
                f"{result.seconds['bound']:.2f} | {sum(result.seconds.values()):.2f} |",
                flush=True,
            )


def warm(hosts: list[int]) -> None:
    """First solve and warm ones in turn, medians of five, wall clock."""
    print("| network | first solve s | warm: Fail 1 s | Fail 2 s | Fail 3 s | times faster |")
    print("|---|---|---|---|---|---|")
    for n in hosts:
        base = overlay(1, n, 8)
        seconds: dict[int, list[float]] = {0: [], 1: [], 2: [], 3: []}
        for _ in range(5):
            began = time.perf_counter()
            first = alltoall.all_to_all(base)
            seconds[0].append(time.perf_counter() - began)
            for failure in (1, 2, 3):
                net = fail(base, failure)
                began = time.perf_counter()
                alltoall.all_to_all(net, warm=first.warm)
                seconds[failure].append(time.perf_counter() - began)
        middle = {failure: statistics.median(runs) for failure, runs in seconds.items()}
        cells = " | ".join(f"{value:.4f}" for value in middle.values())
        ratios = ", ".join(f"{middle[0] / middle[failure]:.1f}x" for failure in (1, 2, 3))
        print(f"| 1x{n}x8 | {cells} | {ratios} |", flush=True)


def fig8(hosts: list[int]) -> None:
    """Failures 1-3: the schedule of the unbroken network, and one made for the broken one (warm), on the broken one."""
    print("| network | failure | static, Gbit/s a pair | re-optimised | re-optimised / static |")
    print("|---|---|---|---|---|")
    for n in hosts:
        base = overlay(1, n, 8)
        static = alltoall.all_to_all(base)
        assert static.schedule is not None
        for failure in (1, 2, 3):
            net = fail(base, failure)
            again = alltoall.all_to_all(net, warm=static.warm)
            before = float(rate(static.schedule, net))
            after = float(again.throughput)
            print(f"| 1x{n}x8 | {failure} | {before:.4f} | {after:.4f} | {after / before:.2f}x |", flush=True)


def plot(lines: dict[str, list[tuple[int, float]]], path: Path) -> None:
    """Log-log lines as SVG."""
    points = [p for line in lines.values() for p in line if p[1] > 0]
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y0, y1 = max(min(p[1] for p in points), 1e-3), max(p[1] for p in points)

    def at(x: float, y: float) -> tuple[float, float]:
        right = math.log(x / x0) / math.log(x1 / x0)
        return 60 + 420 * right, 360 - 320 * math.log(max(y, y0) / y0) / math.log(y1 / y0)

    colours = ("#1b6", "#06c", "#c60", "#909", "#222", "#c22", "#888", "#5a2")
    out = ['<svg xmlns="http://www.w3.org/2000/svg" width="660" height="400" font-family="sans-serif" font-size="12">']
    for x in sorted({p[0] for p in points}):
        px, py = at(x, y0)
        out.append(f'<text x="{px:.0f}" y="{py + 20:.0f}" text-anchor="middle">{x}</text>')
    for power in range(math.floor(math.log10(y0)), math.ceil(math.log10(y1)) + 1):
        if y0 <= 10**power <= y1:
            px, py = at(x0, 10**power)
            out.append(f'<path d="M60 {py:.0f}H480" stroke="#ddd"/><text x="52" y="{py + 4:.0f}" text-anchor="end">')
            out.append(f"{10**power:g} s</text>")
    for line, colour in zip(lines.values(), colours, strict=False):
        path_ = " ".join(f"{'M' if i == 0 else 'L'}{a:.1f} {b:.1f}" for i, (a, b) in enumerate(at(*p) for p in line))
        out.append(f'<path d="{path_}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for i, (name, colour) in enumerate(zip(lines, colours, strict=False)):
        out.append(f'<text x="500" y="{60 + 18 * i}" fill="{colour}">{name}</text>')
    path.write_text("\n".join([*out, '<text x="270" y="398" text-anchor="middle">ranks</text></svg>', ""]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="2,4,8,16,32,64")
    parser.add_argument("--part", choices=("growth", "noisy", "arcs", "fig8", "warm"), default="growth")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--cpu", action="store_true", help="the process's CPU time, for a busy machine")
    args = parser.parse_args()
    hosts = [int(h) for h in args.hosts.split(",")]
    if args.cpu:
        alltoall.Clock = ProcessorClock  # type: ignore[misc]
    if args.part == "growth":
        lines = growth(hosts)
        if args.svg:
            plot(lines, args.svg)
    else:
        {"noisy": without_symmetry, "arcs": arcs, "fig8": fig8, "warm": warm}[args.part](hosts)


if __name__ == "__main__":
    main()
