"""Both policies in simulation, in numbers: `python -m jaxcoll.tuner.study [--seeds 3] [--epochs 60] [--markdown FILE]`.

Every line runs one scenario untuned and tuned with the same seed and the same noise, and prints the ratio of the times.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jaxcoll.schedule import Kind, build
from jaxcoll.sim import Job, Network, Noise, Phase, World, plan, racks, simulate, spines, star
from jaxcoll.telemetry import Records, concatenate, group_epochs
from jaxcoll.tuner.params import POLICIES, Policy
from jaxcoll.tuner.setup import Setup
from jaxcoll.tuner.tuner import State, step
from jaxcoll.tuner.types import Config, Decision, Program, ScheduleSet

Floats = npt.NDArray[np.float64]

RATE = 25e6
"""200 Mbit/s, in bytes/s."""
NBYTES = 4_000_000
LANES = 8
NOISE = Noise(epoch=0.02, edge=0.03)


@dataclasses.dataclass(frozen=True)
class Taken:
    """One call of `step` that decided something: after how many epochs of the set, and what."""

    epochs: int
    decision: Decision


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """Seconds by epoch, the decisions, the last state, and all records."""

    seconds: Floats
    taken: tuple[Taken, ...]
    state: State
    records: Records


def all_reduce_set(start: str, nranks: int = 8, *, alone: bool = False, nbytes: int = NBYTES) -> ScheduleSet:
    """The usual AllReduce schedules for a power of two of ranks, starting on `start`; `alone`: that one only."""
    made: list[tuple[str, str, dict[str, object]]] = [
        ("dual_tree", "dual_tree", {"pipeline": LANES}),
        ("ring", "ring", {}),
        ("halving_doubling", "halving_doubling", {}),
        ("direct", "direct", {"pipeline": LANES}),
        ("direct but one", "direct", {"pipeline": LANES, "shares": [0] + [1] * (nranks - 1)}),
        ("direct but two", "direct", {"pipeline": LANES, "shares": [0, 0] + [1] * (nranks - 2)}),
    ]
    programs = [
        Program(i, build(name, Kind.ALL_REDUCE, nranks, **params), label)
        for i, (label, name, params) in enumerate(made, 1)
        if not alone or label == start
    ]
    first = next(p.id for p in programs if p.label == start)
    return ScheduleSet(f"all_reduce of {nbytes} bytes", tuple(programs), nbytes, first)


def drive(setup: Setup, world: World, epochs: int, *, delay: int = 0) -> Run:
    """Runs the job epoch by epoch with the tuner; a decision takes force `delay` epochs later."""
    spec, state = setup.spec, setup.init()
    current = spec.home
    seconds: list[float] = []
    taken: list[Taken] = []
    kept: list[Records] = []
    waiting: list[tuple[int, Config]] = []
    for i in range(epochs):
        while waiting and waiting[0][0] <= i:
            current = waiting.pop(0)[1]
        schedule = spec.by_id[current.program].schedule
        records, times = world.run(schedule, current.table, spec.nbytes, 1, program=current.program)
        seconds.append(float(times[0]))
        kept.append(records)
        state, decision, _ = step(state, group_epochs(records))
        if decision is not None:
            taken.append(Taken(i + 1, decision))
            waiting.append((i + 1 + delay, Config(decision.program, decision.table)))
    return Run(np.array(seconds), tuple(taken), state, concatenate(kept))


def untuned(spec: ScheduleSet, world: World, epochs: int) -> Floats:
    """Seconds by epoch of the start, left as it is."""
    home = spec.home
    return world.run(spec.by_id[home.program].schedule, home.table, spec.nbytes, epochs, program=home.program)[1]


def best_swapped(spec: ScheduleSet, network: Network) -> float:
    """Modelled seconds of the best table with one chunk-local swap of the start, or none: by trying them all."""
    schedule, table = spec.by_id[spec.start].schedule, spec.home.table
    graphs, n = range(len(schedule.graphs)), spec.nranks
    tables = [table, *(table.swap_graph(g, a, b) for g in graphs for a in range(n) for b in range(a))]
    return min(r.total for r in simulate([Job(plan(schedule, t, spec.nbytes), network) for t in tables], timed=False))


@dataclasses.dataclass(frozen=True, eq=False)
class Scenario:
    """A named situation: the set, and the network over time."""

    name: str
    spec: ScheduleSet
    phases: tuple[Phase, ...]
    epochs: int
    gap: float = 0.0

    def world(self, seed: int) -> World:
        """The job's world, with its noise."""
        return World(self.phases, seed=seed, noise=NOISE, gap=self.gap)


def scenarios(epochs: int) -> list[Scenario]:
    """The situations of the study."""
    net = star(8, RATE, alpha=1e-4)
    tree, ring = all_reduce_set("dual_tree"), all_reduce_set("ring")
    swaps = all_reduce_set("dual_tree", alone=True)
    found = [
        Scenario(f"dual tree, swaps alone, p = {p}", swaps, (Phase(0, net.congest(3, p)),), epochs) for p in (0, 1, 2)
    ]
    found += [
        Scenario(f"free choice from the dual tree, p = {p}", tree, (Phase(0, net.congest(3, p)),), epochs)
        for p in (0, 1, 2)
    ]
    found += [
        Scenario(f"free choice from the ring, p = {p}", ring, (Phase(0, net.congest(3, p)),), epochs) for p in (0, 2)
    ]
    found.append(Scenario("outgoing side of a host at 0.4", tree, (Phase(0, net.slow(2, "outgoing", 0.4)),), epochs))
    found.append(Scenario("one rank 50 ms late", tree, (Phase(0, net, {5: 0.05}),), epochs))
    groups = [[0, 1, 5, 7], [2, 3, 4, 6]]
    thin = racks(groups, RATE, RATE / 2, alpha=1e-4)
    found.append(
        Scenario("ring over two racks, thin link", all_reduce_set("ring", alone=True), (Phase(0, thin),), epochs)
    )
    ecmp = spines(groups, RATE, RATE, count=4, alpha=1e-4)
    found.append(Scenario("ECMP over four spines", tree, (Phase(0, ecmp),), epochs, gap=0.3))
    return [*found, come_and_go(tree)]


def come_and_go(spec: ScheduleSet, times: int = 3, quiet: int = 60, busy: int = 60) -> Scenario:
    """Congestion (p = 2 at host 3) that comes and goes."""
    net = star(8, RATE, alpha=1e-4)
    phases = [Phase(0, net)]
    for i in range(times):
        first = quiet // 2 + i * (quiet + busy)
        phases += [Phase(first, net.congest(3, 2)), Phase(first + busy, net)]
    return Scenario(
        f"congestion that comes and goes {times} times", spec, tuple(phases), times * (quiet + busy), gap=0.5
    )


def _row(scenario: Scenario, policy: Policy, seeds: Sequence[int]) -> str:
    ratios: list[tuple[float, float, float]] = []
    swaps: list[int] = []
    took = time.process_time()
    for seed in seeds:
        run = drive(Setup(scenario.spec, policy, seed), scenario.world(seed), scenario.epochs)
        base = untuned(scenario.spec, scenario.world(seed), scenario.epochs)
        p95 = float(np.percentile(base, 95) / np.percentile(run.seconds, 95))
        last = float(base[-12:].mean() / run.seconds[-12:].mean())
        ratios.append((float(base.mean() / run.seconds.mean()), p95, last))
        swaps.append(len(run.taken))
    cpu = (time.process_time() - took) / (len(seeds) * scenario.epochs)
    mean, p95, last = np.array(ratios).mean(axis=0)
    worst = min(r[0] for r in ratios)
    cells = [scenario.name, policy, f"{mean:.3f}", f"{worst:.3f}", f"{p95:.3f}", f"{last:.3f}", f"{np.mean(swaps):.1f}"]
    return "| " + " | ".join([*cells, f"{cpu * 1e3:.0f}"]) + " |"


COLUMNS = ("scenario", "policy", "mean", "worst seed", "p95", "last 12", "decisions", "CPU ms/epoch")
HEADER = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|"


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m jaxcoll.tuner.study", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each line (3)")
    parser.add_argument("--epochs", type=int, default=60, help="epochs of most scenarios (60)")
    parser.add_argument("--only", default="", help="only scenarios whose name holds this")
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    args = parser.parse_args(argv)
    lines = [HEADER]
    print(HEADER, flush=True)
    for scenario in scenarios(args.epochs):
        for policy in POLICIES if args.only in scenario.name else ():
            lines.append(_row(scenario, policy, range(args.seeds)))
            print(lines[-1], flush=True)
    if args.markdown is not None:
        args.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
