"""Wires that the flow model doesn't know: full token buckets, luck and lost packets; flows that collide."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxcoll.sim import Job, Network, Noise, Phase, World, racks, spines
from jaxcoll.sim.fluid import Result
from jaxcoll.sim.network import Stranger
from jaxcoll.telemetry import Records, group_epochs
from jaxcoll.tuner import Config, Decision, ScheduleSet, init, step
from jaxcoll.tuner.study import RATE

BURST, FAST, LUCK, LOSS, AGAIN_S = 65536, 10, 0.3, 0.1, 0.2


def spine(racked: Sequence[Sequence[int]], uplink: float, strangers: float) -> Network:
    """Two racks of four, and strangers on the way from the first to the second."""
    network = racks(racked, RATE, uplink, alpha=3e-4)
    way = Stranger((24, 27), strangers)  # the racks' links come after three resources of each of eight hosts
    return dataclasses.replace(network, strangers=(way,)) if strangers else network


class Wire(World):
    """Runs schedules of one lane. Inside a rack BURST bytes of a message go FAST times as fast; a transfer across takes
    log-normally longer or shorter, and one in ten is sent again after AGAIN_S while there are strangers."""

    def __init__(self, phases: Sequence[Phase], racked: Sequence[Sequence[int]], seed: int):
        super().__init__(phases, seed=seed, noise=Noise(epoch=0.05, edge=0.05, arrival=1e-3), gap=0.02)
        self._rack = np.array([next(i for i, rack in enumerate(racked) if rank in rack) for rank in range(8)])

    def _records(self, job: Job, result: Result, program: int, version: int) -> tuple[Records, float, float]:
        flows, network = job.plan, job.network
        rng = np.random.default_rng([self._seed, self.epoch, 7])
        across = self._rack[flows.src] != self._rack[flows.dst]
        saved = np.minimum(BURST, flows.size) / RATE * (1 - 1 / FAST)
        inside = np.maximum(result.busy - saved, flows.size / (RATE * FAST))
        busy = np.where(across, result.busy * np.exp(LUCK * rng.standard_normal(len(across))), inside)
        if network.strangers:
            busy += across * (rng.random(len(across)) < LOSS) * AGAIN_S
        arrive = np.zeros(network.nranks) if job.arrive is None else job.arrive
        ready, end = arrive[flows.src], np.zeros(len(busy))
        for edge in np.argsort(flows.step, kind="stable").tolist():
            ready[edge] = max([ready[edge], *end[flows.parent[flows.child == edge]]])
            end[edge] = max(ready[edge], arrive[flows.dst[edge]]) + network.alpha + busy[edge]
        wired = Result(ready, ready, end, busy, float(end.max()))
        return super()._records(job, wired, program, version)


def wandering(seed: int, epochs: int, quiet: int = 3) -> World:
    """Two racks of four over four spines of half a host's rate. Every pair has one of them for good, and so have two
    strangers from the first rack to the second, whose weight wanders, so that one batch takes up to twice the next."""
    rng, count = np.random.default_rng(seed), 4
    network = spines([[0, 1, 2, 3], [4, 5, 6, 7]], RATE, RATE / 2, count=count, alpha=3e-4)
    choice = rng.integers(count, size=(8, 8))
    routes = np.take_along_axis(network.routes, choice[None, :, :, None], axis=0)
    network = dataclasses.replace(network, routes=routes)
    ways = [(24 + 2 * spine, 25 + 2 * (count + spine)) for spine in rng.choice(count, 2).tolist()]
    phases, weight = [Phase(0, network)], np.full(2, 1.2)
    for epoch in range(quiet, epochs):
        strangers = tuple(Stranger(way, 1.5 * float(np.exp(w))) for way, w in zip(ways, weight, strict=True))
        phases.append(Phase(epoch, dataclasses.replace(network, strangers=strangers)))
        weight = 0.85 * weight + 0.5 * rng.standard_normal(2)
    return World(phases, seed=seed, noise=Noise(epoch=0.1, edge=0.1, arrival=1e-3), gap=0.02)


def drive_apart(
    spec: ScheduleSet, start: World, others: World, epochs: int
) -> tuple[list[tuple[int, Decision]], Config]:
    """Runs the job with the tuner where the start runs in one world and every other program in another: what no model
    can know. Returns (epoch, decision) of each, and what is in force at the end."""
    state, current, taken = init(spec), spec.home, list[tuple[int, Decision]]()
    for epoch in range(epochs):
        here = start if current.program == spec.start else others
        here.epoch, here.clock = max(start.epoch, others.epoch), max(start.clock, others.clock)
        program = spec.by_id[current.program]
        records, _ = here.run(program.schedule, current.table, spec.nbytes, 1, program=program.id)
        state, decision, why = step(state, group_epochs(records))
        if decision is not None:
            assert decision.reason == why
            taken.append((epoch, decision))
            current = Config(decision.program, decision.table)
    return taken, current
