"""The gray failures of MCCL 6.1, as functions from topology to topology.

Each strikes one rank (rank 0 in the paper). Its links fall into two classes: *local* ones stay in its host (to a rank
of the host, or to a switch that serves this host alone), *network* ones leave it. A failure sets the total capacity of
a class, per direction, spread over the links of the class in proportion; where the network is made of direct links to
other hosts' ranks (an overlay), each is rounded to a whole number, at least 1, as the paper's overlay rounds its own.
"""

from __future__ import annotations

from fractions import Fraction

from jaxcoll.errors import TopologyError
from jaxcoll.topology.graph import Capacity, Topology, exact

LOCAL_AFTER_FAIL1 = 800
NETWORK_AFTER_FAIL2 = 50
LOCAL_AFTER_FAIL3, NETWORK_AFTER_FAIL3 = 50, 100


def fail(topology: Topology, kind: int, rank: int = 0) -> Topology:
    """Failure 1, 2 or 3 of MCCL 6.1 at `rank`; the paper's capacities in Gbit/s."""
    if kind == 1:
        return fail1(topology, rank)
    if kind == 2:
        return fail2(topology, rank)
    if kind == 3:
        return fail3(topology, rank)
    raise TopologyError(f"failure {kind!r} is unknown; give 1 (NVSwitch lanes), 2 (network link) or 3 (backup rank)")


def fail1(topology: Topology, rank: int = 0, to: Capacity = LOCAL_AFTER_FAIL1) -> Topology:
    """13 of the 18 lanes between the rank and its host's switch are gone: 2880 becomes `to`."""
    return _set_totals(topology, f"{topology.name}:fail1", rank, local=to)


def fail2(topology: Topology, rank: int = 0, to: Capacity = NETWORK_AFTER_FAIL2) -> Topology:
    """The rank's network link is degraded from 400 to `to`."""
    return _set_totals(topology, f"{topology.name}:fail2", rank, network=to)


def fail3(
    topology: Topology, rank: int = 0, local: Capacity = LOCAL_AFTER_FAIL3, network: Capacity = NETWORK_AFTER_FAIL3
) -> Topology:
    """The rank died and a spare in another rack stands in: `local` to the old host, `network` to all others.

    The extra microsecond of latency has no place in a capacitated graph. On overlays this gives the AllToAll bounds of
    the paper's Table 5 for failure 3, for all six sizes.
    """
    return _set_totals(topology, f"{topology.name}:fail3", rank, local=local, network=network)


def links_of(topology: Topology, rank: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(local, network) links of a rank, both directions of each."""
    if not 0 <= rank < topology.nranks:
        raise TopologyError(f"topology {topology.name!r} has ranks 0..{topology.nranks - 1}, not {rank}")
    served = topology.served()
    local: list[tuple[int, int]] = []
    network: list[tuple[int, int]] = []
    home = topology.hosts[rank]
    for src, dst in topology.capacity:
        if rank in (src, dst):
            peer = dst if src == rank else src
            inside = served[peer] == {home} if topology.is_switch(peer) else topology.hosts[peer] == home
            (local if inside else network).append((src, dst))
    return local, network


def _set_totals(
    topology: Topology, name: str, rank: int, local: Capacity | None = None, network: Capacity | None = None
) -> Topology:
    changes: dict[tuple[int, int], Capacity | None] = {}
    for text, links, total in zip(("local", "network"), links_of(topology, rank), (local, network), strict=True):
        if total is None:
            continue
        if not links:
            raise TopologyError(
                f"topology {topology.name!r}: rank {topology.nodes[rank]!r} has no {text} links to fail; "
                "choose another failure, or change links with Topology.with_capacity"
            )
        target = exact(total, f"failure of {topology.name!r}")
        for outward in (True, False):
            group = [link for link in links if (link[0] == rank) == outward]
            before = sum((topology.capacity[link] for link in group), Fraction(0))
            direct = text == "network" and not any(map(topology.is_switch, [n for link in group for n in link]))
            for link in group:
                share = target * topology.capacity[link] / before
                changes[link] = max(1, round(share)) if direct else share
    return topology.with_capacity(changes, name)
