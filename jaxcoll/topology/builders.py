"""Networks by name: `parse("rail:1x4x8")`. Capacities in Gbit/s, one direction; every link runs both ways.

| spec | network |
|---|---|
| `rail:SxHxN` | S segments x H hosts x N ranks (MCCL 6.1): rank-NVSwitch 2880, rank-ToR 400, a ToR per rail |
| `overlay:SxHxN` | the same as MCCL 3.1's synthesisers see it: no ToRs, same-rail links of round(400 / (hosts - 1)) |
| `ring:N`, `star:N`, `torus:AxB[xC]`, `fattree:K` | every link 400; `@CAP` at the end changes that (`ring:8@100`) |
| `dgx_a100:H` | 8 ranks a host on NVSwitch (2400), a 200 NIC each, odd and even NICs on two switches |
| `mi250:H` | 16 dies a host, xGMI lanes of 400, from two hosts on one switch with 128 a die |
| a path ending in `.json` | `Topology.load` |
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from fractions import Fraction

from jaxcoll.errors import TopologyError
from jaxcoll.topology.graph import Topology

NVSWITCH, NETWORK = 2880, 400
A100_NVSWITCH, A100_NIC = 2400, 200
XGMI_LANE, MI250_NIC = 400, 128

# The dies of an MI250 host that are joined, with the number of xGMI lanes between them: four modules in a ladder per
# half, two halves; two dies of one module share four lanes.
_MI250_LANES = (
    (0, 1, 4), (2, 3, 4), (4, 5, 4), (6, 7, 4), (8, 9, 4), (10, 11, 4), (12, 13, 4), (14, 15, 4),
    (0, 4, 2), (3, 7, 2), (8, 12, 2), (11, 15, 2),
    (0, 8, 1), (1, 5, 1), (1, 9, 1), (1, 10, 1), (2, 6, 1), (2, 9, 1), (2, 10, 1), (3, 11, 1), (4, 6, 1), (5, 6, 1),
    (5, 7, 1), (9, 13, 1), (10, 14, 1), (12, 14, 1), (13, 14, 1), (13, 15, 1),
)  # fmt: skip

Edges = list[tuple[str, str, int | Fraction]]


def rail(segments: int, hosts: int, ranks: int) -> Topology:
    """S x H x N rail-optimised network of MCCL 6.1.

    With several segments the ToRs meet in one aggregation node. It stands for the H parallel aggregation switches that
    give every ToR as much capacity up as down: their flows are interchangeable, so one node carries the same.
    """
    names, groups, links = _hosts(segments * hosts, ranks, NVSWITCH)
    switches = [f"h{h}nv" for h in range(segments * hosts)]
    for segment, rail_ in itertools.product(range(segments), range(ranks)):
        tor = f"s{segment}tor{rail_}"
        switches.append(tor)
        links += [(f"h{segment * hosts + h}r{rail_}", tor, NETWORK) for h in range(hosts)]
        if segments > 1:
            links.append((tor, "agg", NETWORK * hosts))
    if segments > 1:
        switches.append("agg")
    if segments * hosts == 1:  # a ToR with one link leads nowhere
        switches, links = switches[:1], [link for link in links if link[1] == "h0nv"]
    return Topology.of(f"rail:{segments}x{hosts}x{ranks}", names, switches, links, hosts=groups, both_ways=True)


def overlay(segments: int, hosts: int, ranks: int) -> Topology:
    """The rail network as MCCL's synthesisers see it: direct links between the same rail of every two hosts."""
    total = segments * hosts
    names, groups, links = _hosts(total, ranks, NVSWITCH)
    capacity = round(NETWORK / (total - 1)) if total > 1 else 0
    if total > 1 and capacity == 0:
        raise TopologyError(f"overlay:{segments}x{hosts}x{ranks}: {NETWORK} over {total - 1} peers is 0; use rail:")
    for a, b in itertools.combinations(range(total), 2):
        links += [(f"h{a}r{r}", f"h{b}r{r}", capacity) for r in range(ranks)]
    switches = [f"h{h}nv" for h in range(total)]
    return Topology.of(f"overlay:{segments}x{hosts}x{ranks}", names, switches, links, hosts=groups, both_ways=True)


def _hosts(count: int, ranks: int, capacity: int) -> tuple[list[str], list[int], Edges]:
    """Rank names, their hosts, and their links to the switch of their host."""
    names = [f"h{h}r{r}" for h in range(count) for r in range(ranks)]
    links: Edges = [(f"h{h}r{r}", f"h{h}nv", capacity) for h in range(count) for r in range(ranks)]
    return names, [h for h in range(count) for _ in range(ranks)], links


def _flat(name: str, count: int, switches: list[str], links: Edges) -> Topology:
    return Topology.of(name, [f"r{r}" for r in range(count)], switches, links, hosts=range(count), both_ways=True)


def ring(count: int, capacity: Fraction = Fraction(NETWORK)) -> Topology:
    """N ranks in a circle, a link to each neighbour."""
    pairs = sorted({tuple(sorted((r, (r + 1) % count))) for r in range(count)} if count > 1 else [])
    return _flat(f"ring:{count}", count, [], [(f"r{a}", f"r{b}", capacity) for a, b in pairs])


def star(count: int, capacity: Fraction = Fraction(NETWORK)) -> Topology:
    """N ranks on one switch."""
    return _flat(f"star:{count}", count, ["sw"], [(f"r{r}", "sw", capacity) for r in range(count)])


def torus(*sides: int, capacity: Fraction = Fraction(NETWORK)) -> Topology:
    """A grid with wrap-around; a side of 2 has one link, not two."""
    where = {cell: f"r{i}" for i, cell in enumerate(itertools.product(*map(range, sides)))}
    pairs: set[tuple[str, str]] = set()
    for cell, axis in itertools.product(where, range(len(sides))):
        other = (*cell[:axis], (cell[axis] + 1) % sides[axis], *cell[axis + 1 :])
        if other != cell and (where[other], where[cell]) not in pairs:
            pairs.add((where[cell], where[other]))
    return _flat(f"torus:{'x'.join(map(str, sides))}", len(where), [], [(a, b, capacity) for a, b in sorted(pairs)])


def fattree(arity: int, capacity: Fraction = Fraction(NETWORK)) -> Topology:
    """The K-ary fat-tree: K pods of K/2 edge and K/2 aggregation switches, (K/2)^2 cores, K^3/4 ranks."""
    if arity % 2:
        raise TopologyError(f"fattree:{arity}: K must be even")
    half = arity // 2
    links: Edges = []
    for pod, edge in itertools.product(range(arity), range(half)):
        links += [(f"r{(pod * half + edge) * half + i}", f"p{pod}e{edge}", capacity) for i in range(half)]
        links += [(f"p{pod}e{edge}", f"p{pod}a{a}", capacity) for a in range(half)]
    for pod, agg, core in itertools.product(range(arity), range(half), range(half)):
        links.append((f"p{pod}a{agg}", f"c{agg * half + core}", capacity))
    switches = [f"p{p}{kind}{i}" for p in range(arity) for kind in "ea" for i in range(half)]
    switches += [f"c{i}" for i in range(half * half)]
    return _flat(f"fattree:{arity}", arity * half * half, switches, links)


def dgx_a100(hosts: int) -> Topology:
    """Hosts of 8 ranks on NVSwitch; the NICs of the even ranks meet in one switch, those of the odd in another."""
    names, groups, links = _hosts(hosts, 8, A100_NVSWITCH)
    switches = [f"h{h}nv" for h in range(hosts)]
    if hosts > 1:
        switches += ["ib0", "ib1"]
        links += [(f"h{h}r{r}", f"ib{r % 2}", A100_NIC) for h in range(hosts) for r in range(8)]
    return Topology.of(f"dgx_a100:{hosts}", names, switches, links, hosts=groups, both_ways=True)


def mi250(hosts: int) -> Topology:
    """Hosts of 16 dies joined by xGMI lanes, no switch inside; several hosts meet in one network switch."""
    names = [f"h{h}r{r}" for h in range(hosts) for r in range(16)]
    links: Edges = [(f"h{h}r{a}", f"h{h}r{b}", lanes * XGMI_LANE) for h in range(hosts) for a, b, lanes in _MI250_LANES]
    if hosts > 1:
        links += [(name, "ib", MI250_NIC) for name in names]
    switches = ["ib"] if hosts > 1 else []
    groups = [h for h in range(hosts) for _ in range(16)]
    return Topology.of(f"mi250:{hosts}", names, switches, links, hosts=groups, both_ways=True)


# name -> (builder, numbers it takes at least, at most, whether `@CAP` applies)
BUILDERS: dict[str, tuple[Callable[..., Topology], int, int, bool]] = {
    "rail": (rail, 3, 3, False),
    "overlay": (overlay, 3, 3, False),
    "ring": (ring, 1, 1, True),
    "star": (star, 1, 1, True),
    "torus": (torus, 1, 4, True),
    "fattree": (fattree, 1, 1, True),
    "dgx_a100": (dgx_a100, 1, 1, False),
    "mi250": (mi250, 1, 1, False),
}

MOST_RANKS = 32767
_RANKS: dict[str, Callable[[list[int]], int]] = {
    "fattree": lambda numbers: numbers[0] ** 3 // 4,
    "dgx_a100": lambda numbers: 8 * numbers[0],
    "mi250": lambda numbers: 16 * numbers[0],
}

_SPEC = re.compile(r"(?P<name>[a-z_0-9]+):(?P<numbers>\d+(x\d+)*)(@(?P<capacity>[0-9./]+))?")


def parse(spec: str) -> Topology:
    """The topology that `spec` names (table above), or the file at that path.

    Raises:
        TopologyError: an unknown name, wrong numbers, or a fault in the file; the message lists what is accepted.
    """
    if spec.endswith(".json"):
        return Topology.load(spec)
    match = _SPEC.fullmatch(spec)
    known = "rail:SxHxN, overlay:SxHxN, ring:N, star:N, torus:AxB, fattree:K, dgx_a100:H, mi250:H or a path to a .json"
    if match is None or match["name"] not in BUILDERS:
        raise TopologyError(f"unknown topology {spec!r}; give {known}")
    builder, least, most, scalable = BUILDERS[match["name"]]
    numbers = [int(number) for number in match["numbers"].split("x")]
    if not least <= len(numbers) <= most or min(numbers) < 1:
        raise TopologyError(f"topology {spec!r}: wrong numbers; give {known}, all at least 1")
    ranks = _RANKS.get(match["name"], math.prod)(numbers)
    if ranks > MOST_RANKS:
        raise TopologyError(f"topology {spec!r} has {ranks} ranks; schedules number at most {MOST_RANKS}: take fewer")
    if match["capacity"] is None:
        return builder(*numbers)
    if not scalable:
        raise TopologyError(f"topology {spec!r}: {match['name']} has its own capacities; leave '@' out")
    try:
        capacity = Fraction(match["capacity"])
    except (ValueError, ZeroDivisionError):
        raise TopologyError(f"topology {spec!r}: capacity {match['capacity']!r} is not a number") from None
    return builder(*numbers, capacity=capacity)
