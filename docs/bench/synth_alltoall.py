"""Figures of all_to_all synthesis.

`python docs/bench/synth_alltoall.py [--hosts 2,4,8,16,32,64] [--part growth|noisy|arcs] [--svg FILE]`

Prints Markdown tables. Times are wall-clock times; the solve is single-threaded. --cpu: the process's CPU time.
"""

from __future__ import annotations

import argparse
import math
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


def without_symmetry(hosts: list[int]) -> None:
    head()
    for n in hosts:
        result = alltoall.all_to_all(noisy(n, 1))
        print(row(f"1x{n}x8, noisy", result, Fraction(1)), flush=True)


def arcs(hosts: list[int]) -> None:
    print("| case | arc LP | its seconds | here: bound | rounded | seconds, rounding included |")
    print("|---|---|---|---|---|---|")
    for n in hosts:
        for label, topology in ((f"1x{n}x8 Fail 2", fail(overlay(1, n, 8), 2)), (f"1x{n}x8 noisy", noisy(n, 1))):
            began = time.process_time()
            oracle = arc_lp.solve(Net.from_topology(topology), solver="ipm")
            taken = time.process_time() - began
            result = alltoall.all_to_all(topology, build=False)
            mine = sum(result.seconds.values())
            print(
                f"| {label} | {oracle.throughput:.4f} | {taken:.2f} | {result.bound:.4f} | "
                f"{float(result.throughput):.4f} | {mine:.2f} |",
                flush=True,
            )


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
    parser.add_argument("--part", choices=("growth", "noisy", "arcs", "fig8"), default="growth")
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
        {"noisy": without_symmetry, "arcs": arcs, "fig8": fig8}[args.part](hosts)


if __name__ == "__main__":
    main()
