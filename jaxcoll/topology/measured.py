"""A topology from what a running job measures (MCCL 3.1, appendix B)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from jaxcoll.errors import TopologyError
from jaxcoll.topology.graph import Topology


def quantise(value: float, digits: int) -> Fraction:
    """`value` rounded down to `digits` significant bits: measured rates with few bits keep tree counts small."""
    number = Fraction(value)
    shift = number.numerator.bit_length() - number.denominator.bit_length() - digits
    unit = Fraction(2) ** shift
    while number / unit >= 2**digits:
        unit *= 2
    while number / unit < 2 ** (digits - 1):
        unit /= 2
    return (number // unit) * unit


def from_measurements(
    hosts: Sequence[int],
    local: Sequence[float | None],
    links: Mapping[tuple[int, int], float],
    *,
    bits: int = 6,
    name: str = "measured",
    unit: str = "Gbit/s",
) -> Topology:
    """The network that a job sees: a switch per host, and a direct link per measured pair of ranks.

    Args:
        hosts: the host of each rank.
        local: per rank, its whole throughput inside its host (`unit`); None where the rank is alone or wasn't measured
            (then the least of its host is taken, since a guess above it would overload the link).
        links: (src rank, dst rank) -> measured throughput, for pairs of different hosts.
        bits: significant bits kept. 6 bits lose at most 1/32 of a rate, less than the noise between two measurements.

    Raises:
        TopologyError: names the rank or pair whose number is missing, not positive or not finite.
    """
    count = len(hosts)
    if len(local) != count:
        raise TopologyError(f"{name}: {len(local)} local rates for {count} ranks; give one (or None) per rank")
    ranks = [f"r{r}" for r in range(count)]
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    switches: list[str] = []
    edges: list[tuple[str, str, Fraction]] = []
    for host, group in members.items():
        if len(group) == 1:
            continue
        known = [_rate(v, f"{name}: local rate of rank {r}", bits) for r in group if (v := local[r]) is not None]
        if not known:
            raise TopologyError(f"{name}: no local rate for any rank of host {host}; measure at least one")
        switches.append(f"host{host}")
        for rank in group:
            value = local[rank]
            rate = min(known) if value is None else _rate(value, f"{name}: local rate of rank {rank}", bits)
            edges += [(ranks[rank], f"host{host}", rate), (f"host{host}", ranks[rank], rate)]
    for (src, dst), value in links.items():
        if not (0 <= src < count and 0 <= dst < count) or hosts[src] == hosts[dst]:
            raise TopologyError(f"{name}: link {src} -> {dst} must join ranks 0..{count - 1} of different hosts")
        edges.append((ranks[src], ranks[dst], _rate(value, f"{name}: link {src} -> {dst}", bits)))
    return Topology.of(name, ranks, switches, edges, unit=unit, hosts=list(hosts))


def _rate(value: float, where: str, bits: int) -> Fraction:
    if not 0 < value < float("inf"):
        raise TopologyError(f"{where} is {value}; it must be positive and finite (leave a dead link out)")
    return quantise(value, bits)
