"""What rate a schedule reaches on a network: the busiest link decides, for messages so long that latency vanishes.

This is the question before any re-synthesis: how slow is the present schedule on the network as it is now measured,
and how much faster could it be (the bound)? Exact, and independent of how the schedule was made: every pair of ranks
takes one route here. Trees that spread a pair over several switches at once (ranks of one DGX host over NVSwitch and
InfiniBand) reach their full rate only where the network routes them so (`forest.routes`).
"""

from __future__ import annotations

from collections import deque
from fractions import Fraction

import numpy as np

from jaxcoll.errors import TopologyError
from jaxcoll.schedule.ir import Schedule
from jaxcoll.topology.graph import Topology

Link = tuple[int, int]


def pair_route(topology: Topology, src: int, dst: int, near: dict[int, list[int]] | None = None) -> list[Link]:
    """The links from rank to rank: fewest hops through switches alone; through other ranks where there is no such way.

    Between equally short ways the wider first hop wins, then the lower node.
    """
    near = neighbours(topology) if near is None else near
    for through_ranks in (False, True):
        came: dict[int, int] = {src: src}
        queue = deque([src])
        while queue and dst not in came:
            node = queue.popleft()
            if node != src and not through_ranks and not topology.is_switch(node):
                continue
            for head in near.get(node, ()):
                if head not in came:
                    came[head] = node
                    queue.append(head)
        if dst in came:
            path: list[Link] = []
            while dst != src:
                path.append((came[dst], dst))
                dst = came[dst]
            return path[::-1]
    raise TopologyError(f"{topology.name!r} has no way from {topology.nodes[src]!r} to {topology.nodes[dst]!r}")


def neighbours(topology: Topology) -> dict[int, list[int]]:
    """Per node, where its links lead, the widest first."""
    near: dict[int, list[int]] = {}
    for (tail, head), _ in sorted(topology.capacity.items(), key=lambda item: (-item[1], item[0])):
        near.setdefault(tail, []).append(head)
    return near


def link_loads(schedule: Schedule, topology: Topology) -> dict[Link, Fraction]:
    """Blocks that cross each link in one execution (a block: what one rank contributes to, or gets of, the result).

    For all_reduce, reduce and broadcast a block is 1/ranks of the vector, so that rates compare with all_gather's.
    """
    if schedule.nranks != topology.nranks:
        raise TopologyError(f"a schedule of {schedule.nranks} ranks on {topology.nranks} ranks of {topology.name!r}")
    size = _chunk_sizes(schedule)
    between: dict[Link, Fraction] = {}
    for edge in schedule.edges:
        pair = (edge.src, edge.dst)
        between[pair] = between.get(pair, Fraction(0)) + sum((size[chunk] for chunk in edge.chunks), Fraction(0))
    near = neighbours(topology)
    load: dict[Link, Fraction] = {}
    for (src, dst), amount in between.items():
        for link in pair_route(topology, src, dst, near):
            load[link] = load.get(link, Fraction(0)) + amount
    return load


def rate(schedule: Schedule, topology: Topology) -> Fraction:
    """Blocks per rank and second times a block's size, in the topology's unit; compare with a result's `throughput`."""
    load = link_loads(schedule, topology)
    if not load:
        return Fraction(0)
    return 1 / max(amount / topology.capacity[link] for link, amount in load.items())


def _chunk_sizes(schedule: Schedule) -> list[Fraction]:
    """Each chunk's part of its block, in blocks as `link_loads` counts them."""
    size = [Fraction(0)] * len(schedule.chunks)
    for ids in schedule.blocks.values():
        total = int(np.sum([schedule.chunks[i].weight for i in ids]))
        whole = 1 if schedule.kind.has_src or schedule.kind.has_dst else schedule.nranks
        for i in ids:
            size[i] = Fraction(schedule.chunks[i].weight * whole, total)
    return size
