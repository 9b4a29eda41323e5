"""A job that runs epoch after epoch on a network that changes, and leaves the records that the executor would leave."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import UsageError
from jaxcoll.schedule import Schedule, Table
from jaxcoll.sim.fluid import Job, Result, simulate
from jaxcoll.sim.network import Network
from jaxcoll.sim.plan import Plan, plan
from jaxcoll.telemetry import RECEIVER, SENDER, Records, concatenate, empty_records

Floats = npt.NDArray[np.float64]

_KNOWN = 64  # results of epochs without chance that are kept


@dataclasses.dataclass(frozen=True)
class Phase:
    """From epoch `first` on, this network and these late ranks (rank -> seconds)."""

    first: int
    network: Network
    late: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Noise:
    """Log-normal spreads: of a whole epoch, of each edge's transfer beside it, of each rank's arrival (seconds)."""

    epoch: float = 0.0
    edge: float = 0.0
    arrival: float = 0.0


class World:
    """Runs (schedule, table) pairs; the same seed and calls give the same records.

    Inside an epoch the network stands still; it changes between epochs, by `phases`. Noise is put on what the model
    gives: on all times of an epoch by one factor, on each transfer by another (its waiting shrinks or grows against it,
    so that its end stays). Where pairs have several routes, each connection draws one anew in each epoch.

    Args:
        phases: what the network is, by epoch; the first must begin at epoch 0.
        gap: seconds between the end of an epoch and the start of the next (the job's computing).
    """

    def __init__(
        self,
        phases: Sequence[Phase] | Network,
        *,
        seed: int = 0,
        noise: Noise | None = None,
        gap: float = 0.0,
        comm: int = 1,
        site: int = 1,
    ):
        self.phases = [Phase(0, phases)] if isinstance(phases, Network) else sorted(phases, key=lambda p: p.first)
        if not self.phases or self.phases[0].first != 0:
            raise UsageError("the first phase must begin at epoch 0")
        self.epoch = 0
        self.clock = 0.0
        self._noise = noise or Noise()
        self._seed = seed
        self._gap = gap
        self._comm, self._site = comm, site
        self._known: dict[tuple[int, int], tuple[Job, Result]] = {}
        self._last: tuple[Schedule, Table, int, Plan] | None = None

    def phase(self, epoch: int) -> Phase:
        """The phase in force at `epoch`."""
        return [p for p in self.phases if p.first <= epoch][-1]

    def run(
        self, schedule: Schedule, table: Table, nbytes: int, epochs: int, *, program: int = 0
    ) -> tuple[Records, Floats]:
        """Runs `epochs` epochs; returns their records (both sides of each edge) and each epoch's time in seconds.

        The time is from the last rank's arrival to the end of the last edge.
        """
        flows = self._plan(schedule, table, nbytes)
        jobs = [self._job(flows, self.epoch + i) for i in range(epochs)]
        results = self._results(jobs)
        records: list[Records] = []
        times = np.empty(epochs)
        for i, (job, result) in enumerate(zip(jobs, results, strict=True)):
            rows, times[i], length = self._records(job, result, program, table.version)
            records.append(rows)
            self.clock += length + self._gap
            self.epoch += 1
        return concatenate(records), times

    def _plan(self, schedule: Schedule, table: Table, nbytes: int) -> Plan:
        """The plan of the call before, where it is the same: a tuned job asks epoch by epoch."""
        last = self._last
        if last is None or last[0] is not schedule or last[1] is not table or last[2] != nbytes:
            last = (schedule, table, nbytes, plan(schedule, table, nbytes))
            self._last = last
        return last[3]

    def _rng(self, epoch: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, epoch, purpose])

    def _job(self, flows: Plan, epoch: int) -> Job:
        phase = self.phase(epoch)
        network = phase.network
        arrive: Floats | None = None
        if phase.late or self._noise.arrival:
            rng = self._rng(epoch, 0)
            arrive = (
                rng.exponential(self._noise.arrival, network.nranks)
                if self._noise.arrival
                else np.zeros(network.nranks)
            )
            for rank, seconds in phase.late.items():
                arrive[rank] += seconds
        choice = None
        if network.choices > 1:
            # By pair, not by edge: the edges of a pair share a connection, and a connection has one hash.
            drawn = self._rng(epoch, 1).integers(network.choices, size=(network.nranks, network.nranks))
            choice = drawn[flows.src, flows.dst]
        return Job(flows, network, arrive, choice)

    def _results(self, jobs: Sequence[Job]) -> list[Result]:
        """Simulates each distinct job once: without chance in it, an epoch is the same as the one before."""
        fixed = [job.arrive is None and job.choice is None for job in jobs]
        keys = [
            (id(job.plan), id(job.network)) if still else (i, -1) for i, (job, still) in enumerate(zip(jobs, fixed))
        ]
        if len(self._known) > _KNOWN:
            self._known.clear()
        todo = {key: job for key, job in zip(keys, jobs) if key not in self._known}
        results = dict(zip(todo, simulate(list(todo.values())), strict=True))
        for key, still in zip(keys, fixed):
            if still and key in results:
                # The job stays beside its result: while it lives, no other plan or network can bear its ids.
                self._known[key] = (todo[key], results[key])
        return [results[key] if key in results else self._known[key][1] for key in keys]

    def _records(self, job: Job, result: Result, program: int, version: int) -> tuple[Records, float, float]:
        flows, n = job.plan, len(job.plan.src)
        rng = self._rng(self.epoch, 2)
        stretch = float(np.exp(self._noise.epoch * rng.standard_normal()))
        arrive = np.zeros(job.network.nranks) if job.arrive is None else job.arrive
        last = float(arrive.max())

        def warped(moment: Floats) -> Floats:
            # Late ranks are late by the clock, not by the network: only what comes after them is stretched.
            return np.where(moment > last, last + (moment - last) * stretch, moment)

        end, ready = warped(result.end), warped(result.ready)
        busy = result.busy * stretch * np.exp(self._noise.edge * rng.standard_normal(n))
        both = empty_records(2 * n)
        base = 1_700_000_000_000_000_000 + round(self.clock * 1e9)
        for side, rows in ((RECEIVER, both[:n]), (SENDER, both[n:])):
            begin = arrive[flows.dst] if side == RECEIVER else ready
            room = np.maximum(end - begin, 0.0)
            transfer = np.minimum(busy, room) if side == RECEIVER else busy
            wait = room - transfer if side == RECEIVER else np.maximum(arrive[flows.dst] - ready, 0.0)
            rows["start_ns"] = base + np.rint(begin * 1e9).astype(np.int64)
            rows["transfer_ns"] = np.rint(transfer * 1e9)
            rows["wait_ns"] = np.rint(wait * 1e9)
            rows["side"] = side
            rows["src"], rows["dst"], rows["graph"], rows["step"] = flows.src, flows.dst, flows.graph, flows.step
            rows["bytes"] = flows.size
        both["comm"], both["site"], both["launch"] = self._comm, self._site, self.epoch
        both["program"], both["version"] = program, version
        length = float(warped(np.array([result.total]))[0])
        return both, length - last, length
