"""The best table for a network that is known: all swaps (or all orders) on the model, the first of them on the wire."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxcoll.errors import UsageError
from jaxcoll.schedule import Schedule, Table
from jaxcoll.sim import network
from jaxcoll.sim.fluid import Job, simulate
from jaxcoll.sim.plan import plan as plan_of
from jaxcoll.testbed.layout import Layout
from jaxcoll.tuner.transforms import Swap, swapped

ORDERED = 8
"""All orders of up to so many ranks are scored; 8 ranks have 5040, the first one held."""

_AT_ONCE = 512
# What a transfer takes before its first byte: the same for all tables, so it need not be exact.
_ALPHA = 3e-4


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A table, how it was made, its modelled seconds, and whether it is what the schedule starts with."""

    table: Table
    words: str
    seconds: float
    start: bool = False


def modelled(layout: Layout, rank_hosts: Sequence[str], flows: int, victim: int | None) -> network.Network:
    """The flow model of a layout with `flows` strangers (into `victim`, or through the middle), one rank a host."""
    rates = {link.name: (link.rate or 0.0) / 8 for link in layout.links}
    at = [layout.hosts.index(host) for host in rank_hosts]
    if layout.name == "star":
        net = network.star(len(at), [rates[host] for host in rank_hosts], alpha=_ALPHA)
    else:
        sides = sorted(set(layout.groups[host] for host in layout.hosts))
        groups = [[r for r, host in enumerate(rank_hosts) if layout.groups[host] == side] for side in sides]
        middle = rates["spine"] if layout.name == "racks" else rates["leaf0-spine0"]
        net = network.racks(groups, rates[rank_hosts[0]], middle, alpha=_ALPHA)
    if not flows:
        return net
    if victim is not None:
        return net.congest(at.index(victim), flows)
    if layout.name == "star":
        return net.congest(at.index(0), flows)
    base = 3 * len(at)  # after the hosts' own links come, by side, the one up and the one down
    return dataclasses.replace(net, strangers=(network.Stranger((base, base + 3), flows),))


def _swaps(schedule: Schedule) -> Iterator[Swap]:
    n = schedule.nranks
    graphs = range(len(schedule.graphs)) if len(schedule.graphs) > 1 else ()
    for a, b in itertools.combinations(range(n), 2):
        yield Swap(None, None, a, b)
        for g in graphs:
            yield Swap(g, None, a, b)


def _orders(schedule: Schedule) -> Iterator[tuple[Table, str]]:
    """Every order of the ranks but for the first one's place: turned round, most patterns are the same."""
    shape = Table.identity(schedule).vertex.shape
    for rest in itertools.permutations(range(1, schedule.nranks)):
        order = (0, *rest)
        vertex = np.broadcast_to(np.array(order, np.int16), shape).copy()
        yield Table(order, vertex), f"order {' '.join(map(str, order))}"


def _score(schedule: Schedule, net: network.Network, nbytes: int, tables: Sequence[Table]) -> list[float]:
    out: list[float] = []
    for i in range(0, len(tables), _AT_ONCE):
        jobs = [Job(plan_of(schedule, table, nbytes), net) for table in tables[i : i + _AT_ONCE]]
        out += [result.total for result in simulate(jobs, timed=False)]
    return out


def scored(schedule: Schedule, net: network.Network, nbytes: int, orders: bool) -> list[Candidate]:
    """All candidates, the best by the model first: the start; with `orders` every order of the ranks, else every global
    and chunk-local swap, and a second one after the best of those. Raises UsageError for orders of too many ranks."""
    home = Table.identity(schedule)
    if orders:
        if schedule.nranks > ORDERED:
            raise UsageError(f"All orders of {schedule.nranks} ranks are too many to try; take at most {ORDERED}.")
        # A change of the ranks' order as a whole keeps every pattern right; to verify 5040 would take minutes.
        return _candidates(schedule, net, nbytes, list(_orders(schedule)))
    found = _candidates(schedule, net, nbytes, [(home, "as it starts"), *_swapped(schedule, home, "")])
    more = _candidates(schedule, net, nbytes, _swapped(schedule, found[0].table, f"{found[0].words}, "))
    return sorted([*found, *more], key=lambda c: c.seconds)


def _swapped(schedule: Schedule, table: Table, before: str) -> list[tuple[Table, str]]:
    made = [(swapped(schedule, table, swap), before + swap.text(schedule)) for swap in _swaps(schedule)]
    return [(after, words) for after, words in made if after is not None]


def _candidates(
    schedule: Schedule, net: network.Network, nbytes: int, made: Sequence[tuple[Table, str]]
) -> list[Candidate]:
    times = _score(schedule, net, nbytes, [table for table, _ in made])
    start = Table.identity(schedule).vertex
    found = [Candidate(t, words, s, np.array_equal(t.vertex, start)) for (t, words), s in zip(made, times, strict=True)]
    return sorted(found, key=lambda c: c.seconds)


def search(
    candidates: Sequence[Candidate], tries: int, run: Callable[[Table], float]
) -> tuple[Candidate, dict[str, Any]]:
    """Tries the start and the `tries` best candidates on the wire. Returns the fastest, and what was tried as data.

    run: brings a table into force and returns its seconds for an epoch.
    """
    chosen = list(candidates[:tries])
    if not any(candidate.start for candidate in chosen):
        chosen += [candidate for candidate in candidates if candidate.start][:1]
    times = [run(candidate.table) for candidate in chosen]
    best = min(range(len(chosen)), key=times.__getitem__)
    tried = [
        {"what": c.words, "model_ms": round(1e3 * c.seconds, 2), "measured_ms": round(1e3 * t, 2)}
        for c, t in zip(chosen, times, strict=True)
    ]
    return chosen[best], {"scored": len(candidates), "tried": tried, "took": chosen[best].words}
