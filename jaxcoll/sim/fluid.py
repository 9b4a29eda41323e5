"""Flow-level simulation: every edge is a fluid, links are shared max-min fair, dependencies gate the fluids.

Rates change only when an edge starts, ends, or catches up with the edge that feeds it, so the model jumps from one such
event to the next. Many executions (other tables, other networks, other routes) run side by side in the same arrays.

Pipelining: with L lanes an edge starts when each edge that feeds it has brought its first lane, and stays one lane
behind while that one runs ("starved": its rate is then the feeder's). This is the limit of many small lanes; lanes are
not discrete, so a burst inside a lane is smoothed out. With one lane it is exact.

Edges that use one connection are served first come first served; those that become ready at once share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import UsageError
from jaxcoll.sim import native
from jaxcoll.sim.network import Network
from jaxcoll.sim.plan import Plan

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_EPS = 1e-9
_PLAY = 0.25
_NEVER = "an edge can never start: its schedule waits for something that no edge brings; run check()"


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One execution: a plan on a network, ranks that arrive at `arrive` seconds, routes `choice` by edge."""

    plan: Plan
    network: Network
    arrive: Floats | None = None
    choice: Ints | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Result:
    """Seconds, one entry an edge: `ready` (sender has its first lane), `start` and `end` of sending, `busy`.

    `busy` is what the edge would have needed at the share that its links offered, without waiting for its feeders: what
    an executor measures that times each lane by itself. `total` is when the last edge ended.
    """

    ready: Floats
    start: Floats
    end: Floats
    busy: Floats
    total: float


def simulate(jobs: Sequence[Job], timed: bool = True) -> list[Result]:
    """Runs all jobs; they don't share anything but the arrays. Without `timed`, `busy` is left out (zero): cheaper."""
    return _Engine(jobs, timed).run() if jobs else []


def simulate_one(plan: Plan, network: Network, arrive: Floats | None = None) -> Result:
    """Runs one execution."""
    return simulate([Job(plan, network, arrive)])[0]


class _Engine:
    """Edges of all jobs, then all strangers, in flat arrays; resources of all jobs likewise, the last one unlimited."""

    def __init__(self, jobs: Sequence[Job], timed: bool):
        self.jobs, self.timed = jobs, timed
        plans = [job.plan for job in jobs]
        counts = np.array([len(p.src) for p in plans], np.int64)
        self.offset = _starts(counts)
        resources = _starts([len(job.network.capacity) for job in jobs])
        self.resources = resources
        self.edges = int(self.offset[-1])
        unlimited = int(resources[-1])
        self.owner = np.concatenate([np.repeat(np.arange(len(jobs)), np.diff(resources)), [0]])
        self.capacity = np.concatenate([*[np.asarray(job.network.capacity) for job in jobs], [np.inf]])
        self._strangers(resources)
        hops = max(job.network.routes.shape[3] for job in jobs)
        hops = max([hops, *(len(path) for path in self.stranger_paths)])
        self.path = np.full((self.edges + len(self.stranger_paths), hops), unlimited, np.int64)
        for j, job in enumerate(jobs):
            self._fill_paths(j, job, int(resources[j]))
        for i, path in enumerate(self.stranger_paths):
            self.path[self.edges + i, : len(path)] = path
        self.job = np.concatenate([np.repeat(np.arange(len(jobs)), counts), self.stranger_job]).astype(np.int64)
        self.size = np.concatenate([p.size for p in plans])
        self.lags = np.array([1.0 / p.lanes for p in plans])
        self.lag = np.repeat(self.lags, counts)
        self.alpha = np.repeat([job.network.alpha for job in jobs], counts) * (self.size > 0)
        self.child = np.concatenate([p.child + o for p, o in zip(plans, self.offset, strict=False)])
        self.parent = np.concatenate([p.parent + o for p, o in zip(plans, self.offset, strict=False)])
        self._connections()
        self._arrivals()

    def _connections(self) -> None:
        found: list[Ints] = []
        base = 0
        for job in self.jobs:
            n, edges = job.network.nranks, len(job.plan.src)
            pair = job.plan.src * n + job.plan.dst
            own = pair if job.network.connection == "pair" else np.arange(edges)
            found.append(own + base)
            base += max(n * n, edges)
        _, self.connection = np.unique(np.concatenate(found), return_inverse=True)
        self.connections = int(self.connection.max()) + 1 if len(self.connection) else 0

    def _strangers(self, resources: Ints) -> None:
        found = [(j, s) for j, job in enumerate(self.jobs) for s in job.network.strangers]
        self.stranger_paths = [tuple(int(resources[j]) + r for r in s.path) for j, s in found]
        self.stranger_job = np.array([j for j, _ in found], np.int64)
        self.stranger_weight = np.array([s.count for _, s in found], np.float64)
        self.stranger_cap = np.array([s.count * s.cap for _, s in found], np.float64)

    def _fill_paths(self, j: int, job: Job, base: int) -> None:
        plan, network = job.plan, job.network
        if len(plan.src) and int(max(plan.src.max(), plan.dst.max())) >= network.nranks:
            raise UsageError(f"the schedule has more ranks than the network's {network.nranks}")
        choice = np.zeros(len(plan.src), np.int64) if job.choice is None else job.choice % network.choices
        route = network.routes[choice, plan.src, plan.dst]
        rows = slice(int(self.offset[j]), int(self.offset[j + 1]))
        part = self.path[rows, : route.shape[1]]
        self.path[rows, : route.shape[1]] = np.where(route >= 0, route + base, part)

    def _arrivals(self) -> None:
        gates: list[Floats] = []
        sender: list[Floats] = []
        for job in self.jobs:
            arrive = np.zeros(job.network.nranks) if job.arrive is None else np.asarray(job.arrive, np.float64)
            sender.append(arrive[job.plan.src])
            gates.append(np.maximum(arrive[job.plan.src], arrive[job.plan.dst]))
        self.ready = np.concatenate(sender)
        self.gate = np.concatenate(gates)

    def run(self) -> list[Result]:
        if not self._run_native():
            self._run_here()
        return [self._result(j) for j in range(len(self.jobs))]

    def _run_native(self) -> bool:
        """The same in the library, some twenty times as fast. False where there is none."""
        n = self.edges
        self.start, self.end, self.busy = np.zeros(n), np.zeros(n), np.zeros(n)
        strangers = [len(job.network.strangers) for job in self.jobs]
        status = native.run(
            jobs=len(self.jobs), hops=self.path.shape[1], timed=int(self.timed), edge_start=self.offset,
            dep_start=_starts([len(job.plan.child) for job in self.jobs]), stranger_start=_starts(strangers),
            resource_start=self.resources, path=self.path, capacity=self.capacity, lag=self.lags, size=self.size,
            alpha=self.alpha, gate=self.gate, connection=self.connection, child=self.child, parent=self.parent,
            stranger_weight=self.stranger_weight, stranger_cap=self.stranger_cap, ready=self.ready, start=self.start,
            end=self.end, busy=self.busy,
        )  # fmt: skip
        if status == 1:
            raise UsageError(_NEVER)
        if status not in (None, 0):
            raise UsageError(
                "the flow model can't take these jobs: an edge or a route is out of range, or too little memory"
            )
        return status == 0

    def _run_here(self) -> None:
        n = self.edges
        self.frac = np.zeros(n)
        self.done = np.zeros(n, bool)
        self.busy = np.zeros(n)
        self.end = np.zeros(n)
        self.start = np.full(n, np.inf)
        self.clock = np.zeros(len(self.jobs))
        self.tied = np.zeros(len(self.child), bool)
        self.blocked = np.zeros(n, bool)
        self.blocked[self.child] = True
        free = ~self.blocked
        self.start[free] = self.gate[free] + self.alpha[free]
        self._release()
        while not self.done.all():
            self._event()

    def _result(self, j: int) -> Result:
        rows = slice(int(self.offset[j]), int(self.offset[j + 1]))
        end = self.end[rows]
        total = float(end.max()) if len(end) else 0.0
        return Result(self.ready[rows], self.start[rows], end, self.busy[rows], total)

    def _release(self) -> None:
        """Starts what has its first lanes and finishes what carries nothing, until nothing changes."""
        while True:
            now = self.clock[self.job[: self.edges]]
            empty = ~self.done & ~self.blocked & (self.size <= 0) & (self.start <= now + _EPS * (1 + now))
            self.end[empty] = now[empty]
            self.frac[empty] = 1.0
            self.done |= empty
            lacking = ~self.done[self.parent] & (self.frac[self.parent] < self.lag[self.child] * (1 - 1e-7))
            still = np.zeros(self.edges, bool)
            still[self.child[lacking]] = True
            opened = self.blocked & ~still
            if not opened.any():
                if not empty.any():
                    return
                continue
            self.ready[opened] = np.maximum(self.ready[opened], now[opened])
            self.start[opened] = np.maximum(self.gate[opened], now[opened]) + self.alpha[opened]
            self.blocked &= ~opened

    def _event(self) -> None:
        now = self.clock[self.job[: self.edges]]
        active = ~self.done & ~self.blocked & (self.start <= now * (1 + _EPS) + 1e-15)
        live = ~self.done[self.parent] & active[self.child]
        child, parent = self.child[live], self.parent[live]
        gap = self.frac[parent] - self.lag[child] - self.frac[child]
        # A starved edge stays so until it has fallen behind by a part of a lane: its share of a connection depends on
        # whether it is starved, and without this play it would change sides at every instant.
        starved = (gap <= _EPS) | (self.tied[live] & (gap <= _PLAY * self.lag[child]))
        self.tied[live] = starved
        sending = self._queue(active, child[starved], parent[starved])
        both = sending[child] & sending[parent] & starved
        rate, offered = self._rates(sending, child[both], parent[both])
        speed = rate / np.maximum(self.size, 1e-300)
        step = self._next(active, now, speed, child[~starved], parent[~starved], gap[~starved])
        dt = step[self.job[: self.edges]]
        moved = sending & (rate > 0)
        self.frac[moved] += speed[moved] * dt[moved]
        if self.timed:
            self.busy[moved] += dt[moved] * rate[moved] / offered[moved]
        self.clock += step
        finished = moved & (self.frac >= 1 - 1e-9)
        self.frac[finished] = 1.0
        self.end[finished] = (now + dt)[finished]
        self.done |= finished
        self._release()

    def _next(self, active: Bools, now: Floats, speed: Floats, child: Ints, parent: Ints, gap: Floats) -> Floats:
        """Seconds until the next event of each job; 0 for a job that is over."""
        job = self.job[: self.edges]
        step = np.full(len(self.jobs), np.inf)
        going = np.flatnonzero(active & (speed > 0))
        _lower(step, job[going], (1 - self.frac[going]) / speed[going])
        timed = np.flatnonzero(~self.done & ~self.blocked & ~active)
        _lower(step, job[timed], self.start[timed] - now[timed])
        closing = speed[child] - speed[parent]
        shut = closing > 1e-12 * np.maximum(speed[child], 1e-300)
        _lower(step, job[child[shut]], gap[shut] / closing[shut])
        waits = self.blocked[self.child] & ~self.done[self.parent] & (speed[self.parent] > 0)
        wanted = self.lag[self.child[waits]] - self.frac[self.parent[waits]]
        opening = wanted > 0
        which = self.parent[waits][opening]
        _lower(step, job[which], wanted[opening] / speed[which])
        over = np.ones(len(self.jobs), bool)
        over[job[~self.done]] = False
        step[over] = 0.0
        if not np.isfinite(step).all():
            raise UsageError(_NEVER)
        return step

    def _queue(self, active: Bools, child: Ints, parent: Ints) -> Bools:
        """The active edges that send: a connection serves its edges in the order in which they became ready.

        A starved edge is served as it comes, since its lanes are ready one by one. What hangs on a waiting edge waits.
        """
        starved = np.zeros(self.edges, bool)
        starved[child] = True
        hungry = np.flatnonzero(active & ~starved)
        connection = self.connection[hungry]
        first = np.full(self.connections, np.inf)
        np.minimum.at(first, connection, self.ready[hungry])
        late = hungry[self.ready[hungry] > first[connection] * (1 + _EPS) + 1e-12]
        sending = active.copy()
        sending[late] = False
        while True:
            stuck = child[sending[child] & ~sending[parent]]
            if not len(stuck):
                return sending
            sending[stuck] = False

    def _rates(self, active: Bools, child: Ints, parent: Ints) -> tuple[Floats, Floats]:
        """Max-min rates of the active edges (0 elsewhere), and the rate that each edge's links would offer it."""
        edges = np.flatnonzero(active)
        flows = np.concatenate([edges, np.arange(self.edges, len(self.path))])
        where = np.full(len(self.path), -1, np.int64)
        where[flows] = np.arange(len(flows))
        child, parent = where[child], where[parent]
        fill = _Filling(
            path=self.path[flows],
            capacity=self.capacity,
            job=self.job[flows],
            owner=self.owner,
            njobs=len(self.jobs),
            edges=len(edges),
            cap=np.concatenate([np.full(len(edges), np.inf), self.stranger_cap]),
            child=child,
            parent=parent,
            ratio=self.size[edges[child]] / self.size[edges[parent]],
        )
        _, connection, count = np.unique(self.connection[edges], return_inverse=True, return_counts=True)
        share = 1.0 / count[connection]
        x, full = fill.rates(np.concatenate([share, self.stranger_weight]))
        # What a starved edge leaves of its connection's share goes to the other edges of that connection.
        hungry = np.zeros(len(edges), bool)
        hungry[child] = True
        for _ in range(3 if (hungry & (share < 1)).any() else 0):
            share = _lend(share, x[: len(edges)], hungry, connection)
            x, full = fill.rates(np.concatenate([share, self.stranger_weight]))
        rate, offered = np.zeros(self.edges), np.ones(self.edges)
        rate[edges] = x[: len(edges)]
        if self.timed:
            units = np.concatenate([np.ones(len(edges)), self.stranger_weight])
            offered[edges] = _offered(fill, x, units, full)[: len(edges)]
        return rate, offered


def _lend(share: Floats, x: Floats, hungry: Bools, connection: Ints) -> Floats:
    """Shares by connection once more: starved edges claim what they use, the others split the rest."""
    size = int(connection.max()) + 1
    level = np.zeros(size)
    np.maximum.at(level, connection, np.where(hungry, 0.0, x / share))
    with np.errstate(divide="ignore", invalid="ignore"):
        used = np.where(hungry & (level[connection] > 0), np.minimum(x / level[connection], share), 0.0)
    keep = hungry & (used <= 0)  # a connection with starved edges alone stays as it is
    rest = 1.0 - np.bincount(connection, np.where(keep, share, used), size)
    full = np.bincount(connection, np.where(hungry, 0.0, 1.0), size)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(hungry, share, np.maximum(rest[connection] / full[connection], share))


def _couple(weight: Floats, child: Ints, parent: Ints, ratio: Floats) -> None:
    """A starved edge that carries less than its feeder moves slower in proportion; chains settle after a few rounds."""
    if not (ratio < 1 - 1e-12).any():
        return
    for _ in range(len(weight)):
        before = weight[child]
        np.minimum.at(weight, child, ratio * weight[parent])
        if np.array_equal(before, weight[child]):
            return


@dataclasses.dataclass
class _Filling:
    """Progressive filling: all rates rise together (times weight); a full link, a cap or a feeder stops a flow."""

    path: Ints
    capacity: Floats
    job: Ints
    owner: Ints
    """The job of each resource."""
    njobs: int
    edges: int
    """How many of the flows are edges, sorted by job; strangers follow."""
    cap: Floats
    child: Ints
    parent: Ints
    ratio: Floats

    def rates(self, weight: Floats) -> tuple[Floats, Floats]:
        """The rate of each flow, bytes/s, and by resource the rate at which it was full (infinite: it isn't)."""
        weight = weight.copy()
        _couple(weight, self.child, self.parent, self.ratio)
        cap = self.cap.copy()
        x = np.zeros(len(weight))
        rising = np.ones(len(weight), bool)
        flat, hops, size = self.path.reshape(-1), self.path.shape[1], len(self.capacity)
        full = np.full(size, np.inf)
        while rising.any():
            used = np.bincount(flat, np.repeat(np.where(rising, 0.0, x), hops), size)
            claim = np.bincount(flat, np.repeat(np.where(rising, weight, 0.0), hops), size)
            with np.errstate(divide="ignore", invalid="ignore"):
                level = np.where(claim > 0, np.maximum(self.capacity - used, 0.0) / claim, np.inf)
            limit = np.minimum(level[self.path].min(axis=1), cap / weight)
            limit[~rising] = np.inf
            lowest = np.full(self.njobs, np.inf)
            _lower(lowest, self.job[: self.edges], limit[: self.edges])
            np.minimum.at(lowest, self.job[self.edges :], limit[self.edges :])
            full = np.minimum(full, np.where(level <= lowest[self.owner] * (1 + _EPS), level, np.inf))
            stop = rising & (limit <= lowest[self.job] * (1 + _EPS))
            x[stop] = weight[stop] * lowest[self.job[stop]]
            rising &= ~stop
            self._freeze_fed(x, rising, weight, cap)
        return x, full

    def _freeze_fed(self, x: Floats, rising: Bools, weight: Floats, cap: Floats) -> None:
        """Edges starved by a feeder that has just stopped stop with it, down the chain."""
        while True:
            fed = rising[self.child] & ~rising[self.parent]
            if not fed.any():
                return
            child, feeder = self.child[fed], self.parent[fed]
            np.minimum.at(cap, child, self.ratio[fed] * x[feeder])
            stop = child[cap[child] / weight[child] <= x[feeder] / weight[feeder] * (1 + _EPS)]
            if not len(stop):
                return
            x[stop] = cap[stop]
            rising[stop] = False


def _offered(fill: _Filling, x: Floats, units: Floats, full: Floats) -> Floats:
    """What its links would give each flow: the share at which a full link stopped, else its own rate and the spare."""
    each = x / units
    hops = fill.path.shape[1]
    used = np.bincount(fill.path.reshape(-1), np.repeat(x, hops), len(fill.capacity))
    spare = np.maximum(fill.capacity - used, 0.0)
    level = full[fill.path]
    return np.maximum(np.where(np.isinf(level), each[:, None] + spare[fill.path], level).min(axis=1), 1e-300)


def _starts(counts: Sequence[int] | Ints) -> Ints:
    """Where each of some parts begins that lie one after the other, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _lower(out: Floats, group: Ints, values: Floats) -> None:
    """out[g] = min(out[g], values of group g); `group` is sorted."""
    if len(group):
        starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
        which = group[starts]
        out[which] = np.minimum(out[which], np.minimum.reduceat(values, starts))
