"""Links, routes and other people's traffic: the network that the flow model shares out.

Resources are numbered: for host h, `h` is what it sends over, `hosts + h` what it receives over, `2 * hosts + h` its
memory (edges inside one host); further links follow. A route is the list of resources that a flow occupies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from jaxcoll.errors import UsageError

Connection = Literal["pair", "edge"]
"""Whether all edges from one rank to another share one connection (one fair share), or each has its own."""

Direction = str
"""\"outgoing\" or \"incoming\", seen from the host."""


@dataclasses.dataclass(frozen=True)
class Stranger:
    """`count` flows of others over `path` (resources) that take their fair share, each at most `cap` bytes/s."""

    path: tuple[int, ...]
    count: float
    cap: float = math.inf


@dataclasses.dataclass(frozen=True)
class Network:
    """Capacities in bytes/s, routes by pair of ranks, strangers, and the latency `alpha` (s) of starting an edge.

    A `connection` belongs to a "pair" of ranks, whose edges then share one fair share, or to each "edge".

    `routes` is int [choices][ranks][ranks][hops], padded with -1: where there are several choices (ECMP), every flow
    takes one of them, drawn anew in each epoch by whoever runs the model.
    """

    host: tuple[int, ...]
    capacity: tuple[float, ...]
    routes: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    strangers: tuple[Stranger, ...] = ()
    alpha: float = 20e-6
    connection: Connection = "pair"

    def __post_init__(self) -> None:
        low = [(r, c) for r, c in enumerate(self.capacity) if not c > 0]
        if low:
            raise UsageError(f"resource {low[0][0]} has capacity {low[0][1]}; it must be above 0 bytes/s")
        self.routes.setflags(write=False)

    @property
    def nranks(self) -> int:
        """Ranks of the job."""
        return len(self.host)

    @property
    def hosts(self) -> int:
        """Hosts of the job."""
        return max(self.host) + 1

    @property
    def choices(self) -> int:
        """Alternative routes of a pair."""
        return int(self.routes.shape[0])

    def side(self, host: int, direction: Direction) -> int:
        """The resource over which `host` sends ("outgoing") or receives ("incoming")."""
        if not 0 <= host < self.hosts:
            raise UsageError(f"there is no host {host}; hosts are 0..{self.hosts - 1}")
        if direction not in ("outgoing", "incoming"):
            raise UsageError(f'direction {direction!r} is neither "outgoing" nor "incoming"')
        return host if direction == "outgoing" else self.hosts + host

    def congest(self, host: int, count: float, direction: Direction = "incoming", cap: float = math.inf) -> Network:
        """Adds `count` strangers at one side of a host."""
        if count <= 0:
            return self
        stranger = Stranger((self.side(host, direction),), count, cap)
        return dataclasses.replace(self, strangers=(*self.strangers, stranger))

    def scale(self, resource: int, factor: float) -> Network:
        """One resource with `factor` times its capacity."""
        capacity = list(self.capacity)
        capacity[resource] *= factor
        return dataclasses.replace(self, capacity=tuple(capacity))

    def slow(self, host: int, direction: Direction, factor: float) -> Network:
        """One side of a host with `factor` times its capacity."""
        return self.scale(self.side(host, direction), factor)

    def limit_pairs(self, pairs: Sequence[tuple[int, int]], rate: float) -> Network:
        """One more link of `rate` bytes/s that all flows between these (src, dst) ranks share."""
        link = len(self.capacity)
        routes = np.concatenate([self.routes, np.full((*self.routes.shape[:3], 1), -1)], axis=3)
        for a, b in pairs:
            routes[:, a, b, -1] = link
        return dataclasses.replace(self, capacity=(*self.capacity, rate), routes=routes)

    def with_alpha(self, alpha: float) -> Network:
        """The same network with another latency."""
        return dataclasses.replace(self, alpha=alpha)


def star(
    hosts: int,
    rate: float | Sequence[float],
    *,
    ranks_per_host: int = 1,
    local: float | None = None,
    alpha: float = 20e-6,
) -> Network:
    """Hosts on one switch that never blocks; `rate` bytes/s each way (or one for each host), `local` inside a host."""
    rates = [float(rate)] * hosts if isinstance(rate, (int, float)) else [float(r) for r in rate]
    if len(rates) != hosts:
        raise UsageError(f"{len(rates)} rates for {hosts} hosts; give one rate, or one for each host")
    inside = local if local is not None else 10 * max(rates)
    host = tuple(h for h in range(hosts) for _ in range(ranks_per_host))
    capacity = (*rates, *rates, *([float(inside)] * hosts))
    return Network(host, capacity, _edge_routes(host, {}, hosts), alpha=alpha)


def racks(groups: Sequence[Sequence[int]], rate: float, uplink: float, *, alpha: float = 20e-6) -> Network:
    """Racks of hosts (one rank each); every rack sends and receives over one link of `uplink` bytes/s each way."""
    return spines(groups, rate, uplink, count=1, alpha=alpha)


def spines(groups: Sequence[Sequence[int]], rate: float, uplink: float, *, count: int, alpha: float = 20e-6) -> Network:
    """Leaf switches with `count` spines; each leaf has a link of `uplink` bytes/s each way to every spine."""
    hosts = sum(len(group) for group in groups)
    if sorted(h for group in groups for h in group) != list(range(hosts)):
        raise UsageError(f"groups {groups} must name each of 0..{hosts - 1} once")
    rack = {h: g for g, group in enumerate(groups) for h in group}
    base, n = 3 * hosts, len(groups)
    capacity = [rate] * (2 * hosts) + [10 * rate] * hosts + [uplink] * (2 * n * count)
    middle = {
        (a, b): [(base + 2 * (rack[a] * count + s), base + 2 * (rack[b] * count + s) + 1) for s in range(count)]
        for a in range(hosts)
        for b in range(hosts)
        if rack[a] != rack[b]
    }
    host = tuple(range(hosts))
    return Network(host, tuple(capacity), _edge_routes(host, middle, hosts), alpha=alpha)


def _edge_routes(
    host: Sequence[int], middle: Mapping[tuple[int, int], Sequence[tuple[int, ...]]], hosts: int
) -> npt.NDArray[np.int64]:
    """Routes with each pair's own ends, and the links in the middle by pair of hosts and choice."""
    choices = max((len(options) for options in middle.values()), default=1)
    n, hops = len(host), 2 + max((len(path) for options in middle.values() for path in options), default=0)
    routes = np.full((choices, n, n, hops), -1, np.int64)
    for a in range(n):
        for b in range(n):
            if host[a] == host[b]:
                routes[:, a, b, 0] = 2 * hosts + host[a]
                continue
            options = middle.get((host[a], host[b]), [()])
            for c in range(choices):
                path = (host[a], hosts + host[b], *options[c % len(options)])
                routes[c, a, b, : len(path)] = path
    return routes
