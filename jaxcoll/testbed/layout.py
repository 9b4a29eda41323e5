"""What a testbed consists of, as plain data: stations, switches, links and who shares a link with whom.

Stations are hosts (`h0`, `h1`, ...; ranks run there) and outsiders (`x0`, ...; other people's machines). Each has one
interface `eth0` in the data network; hosts have a second one, `ctl0`, in a network of its own that is never slow.
A station's link has its name, trunks between switches are named after their ends. Rates are bits per second.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jaxcoll.errors import UsageError

DATA, CONTROL = "eth0", "ctl0"

# Jumbo frames: the emulation costs half the processor time that it costs with 1500 bytes.
MTU = 9000

MOST_STATIONS = 120
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:bit(?:/s)?|bps)?", re.IGNORECASE)
LEAST_RATE, MOST_RATE = 64e3, 100e9


def check_rate(rate: float, text: str | None = None) -> float:
    """The rate itself. Raises UsageError unless it is from 64 kbit/s to 100 Gbit/s."""
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise UsageError(
            f"A link of {text or f'{rate:g} bit/s'} can't be made; write 64Kbit to 100Gbit, such as 200Mbit."
        )
    return float(rate)


def parse_rate(text: str) -> float:
    """Bits per second in `200Mbit`, `1.5Gbit`, `200m` or a plain number (powers of 1000). Raises UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no rate; write a number with K, M or G and bit, such as 200Mbit.")
    return check_rate(float(match[1]) * _UNITS[match[2].lower()], text)


def format_rate(rate: float) -> str:
    """The rate as people write it: 2e8 -> '200Mbit'."""
    for unit, name in ((1e9, "Gbit"), (1e6, "Mbit"), (1e3, "Kbit")):
        if rate >= unit:
            return f"{rate / unit:g}{name}"
    return f"{rate:g}bit"


@dataclasses.dataclass(frozen=True)
class Share:
    """Packets that get an equal share of a congested link end: those from `src`, to `dst`, or of that pair."""

    src: str | None = None
    dst: str | None = None


@dataclasses.dataclass(frozen=True)
class End:
    """One end of a link. It joins the node's bridge, or has an address with its prefix length (`10.77.0.1/24`).

    shares: what is queued apart when this end sends; empty: one queue for all, first come, first served.
    """

    node: str
    interface: str
    address: str | None = None
    shares: tuple[Share, ...] = ()


@dataclasses.dataclass(frozen=True)
class Link:
    """A cable: what `a` sends is its direction "up", what `b` sends is "down". rate None: unlimited."""

    name: str
    a: End
    b: End
    rate: float | None


@dataclasses.dataclass(frozen=True)
class Route:
    """In `node`, packets for `prefix` go to one of the gateways, chosen per flow by the kernel's hash."""

    node: str
    prefix: str
    gateways: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A topology ready to be made.

    bridges: node -> address with prefix length that its bridge carries, or None. Nodes in `routers` forward packets.
    groups: the switch that each station is plugged into, by station.
    """

    name: str
    hosts: tuple[str, ...]
    outsiders: tuple[str, ...]
    addresses: dict[str, str]
    groups: dict[str, str]
    links: tuple[Link, ...]
    bridges: dict[str, str | None]
    routes: tuple[Route, ...] = ()
    routers: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes, hosts first; each becomes a namespace."""
        named = [*self.hosts, *self.outsiders, *self.bridges, *self.routers]
        return tuple(dict.fromkeys(named))

    def link(self, name: str) -> Link:
        """The link of that name. Raises UsageError that lists the names."""
        for link in self.links:
            if link.name == name and link.rate is not None:
                return link
        known = ", ".join(link.name for link in self.links if link.rate is not None)
        raise UsageError(f"{name!r} is no link of this testbed. Links: {known}.")

    def station(self, name: str) -> str:
        """The address of a host or outsider. Raises UsageError that lists the names."""
        if name not in self.addresses:
            raise UsageError(
                f"{name!r} is no host or outsider of this testbed. There are: {', '.join(self.addresses)}."
            )
        return self.addresses[name]


class _Plan:
    """Stations with numbers and addresses, and the control network: what all topologies have in common."""

    def __init__(self, hosts: int, outsiders: int, rate: float):
        if not 1 <= hosts <= MOST_STATIONS or not 0 <= outsiders <= MOST_STATIONS:
            raise UsageError(
                f"A testbed has 1 to {MOST_STATIONS} hosts and up to {MOST_STATIONS} outsiders, "
                f"not {hosts} and {outsiders}."
            )
        self.hosts = tuple(f"h{i}" for i in range(hosts))
        self.outsiders = tuple(f"x{i}" for i in range(outsiders))
        self.rate = check_rate(rate)
        self.number = {name: 1 + i for i, name in enumerate(self.hosts)}
        self.number |= {name: 129 + i for i, name in enumerate(self.outsiders)}

    @property
    def stations(self) -> tuple[str, ...]:
        return (*self.hosts, *self.outsiders)

    def control_links(self) -> list[Link]:
        return [
            Link(f"ctl-{name}", End(name, CONTROL, f"10.78.0.{self.number[name]}/24"), End("ctl", f"p-{name}"), None)
            for name in self.hosts
        ]

    def station_link(self, name: str, switch: str, addresses: dict[str, str], fair: bool) -> Link:
        others = [address for other, address in addresses.items() if other != name and fair]
        up, down = (tuple(Share(dst=a) for a in others), tuple(Share(src=a) for a in others))
        return Link(name, End(name, DATA, f"{addresses[name]}/24", up), End(switch, f"p-{name}", None, down), self.rate)


def star(hosts: int, outsiders: int = 0, rate: float = 200e6, *, fair: bool = True) -> Layout:
    """All stations on one switch.

    rate: of each station's link, both ways. fair: on a congested link each peer of the station gets the same share
    however many connections it uses (what the flow model assumes); else there is one queue, where connections compete.
    """
    plan = _Plan(hosts, outsiders, rate)
    addresses = {name: f"10.77.0.{plan.number[name]}" for name in plan.stations}
    links = [plan.station_link(name, "sw", addresses, fair) for name in plan.stations] + plan.control_links()
    groups = dict.fromkeys(plan.stations, "sw")
    return Layout("star", plan.hosts, plan.outsiders, addresses, groups, tuple(links), {"sw": None, "ctl": None})


def _halves(names: Sequence[str], groups: Sequence[str], *, alternate: bool) -> dict[str, str]:
    if alternate:
        return {name: groups[i % len(groups)] for i, name in enumerate(names)}
    return {name: groups[i * len(groups) // len(names)] for i, name in enumerate(names)}


def racks(
    hosts: int, outsiders: int = 0, rate: float = 200e6, spine_rate: float | None = None, *, fair: bool = True
) -> Layout:
    """Two racks, joined by one thin link called `spine`.

    The first half of the hosts stands in `rack0`, the second in `rack1`; outsiders alternate. spine_rate None: twice a
    host's rate, so that more than two pairs at a time congest it.
    """
    plan = _Plan(hosts, outsiders, rate)
    spine_rate = check_rate(2 * rate if spine_rate is None else spine_rate)
    addresses = {name: f"10.77.0.{plan.number[name]}" for name in plan.stations}
    names = ("rack0", "rack1")
    groups = _halves(plan.hosts, names, alternate=False) | _halves(plan.outsiders, names, alternate=True)
    links = [plan.station_link(name, groups[name], addresses, fair) for name in plan.stations]
    inside = {rack: [addresses[name] for name in plan.stations if groups[name] == rack] for rack in names}
    across = [Share(a, b) for a in inside["rack0"] for b in inside["rack1"] if fair]
    back = tuple(Share(share.dst, share.src) for share in across)
    links.append(
        Link("spine", End("rack0", "spine", None, tuple(across)), End("rack1", "spine", None, back), spine_rate)
    )
    links += plan.control_links()
    bridges: dict[str, str | None] = dict.fromkeys((*names, "ctl"))
    return Layout("racks", plan.hosts, plan.outsiders, addresses, groups, tuple(links), bridges)


def spines(
    hosts: int,
    outsiders: int = 0,
    rate: float = 200e6,
    spine_rate: float | None = None,
    *,
    leaves: int = 2,
    width: int = 4,
    fair: bool = True,
) -> Layout:
    """Leaf switches, each joined to every one of `width` spines; the kernel's hash picks a flow's spine.

    Flows that fall on the same spine by chance congest it: erratic congestion as in a real fabric. The links
    `leaf<i>-spine<j>` have one queue for all. spine_rate None: a host's rate.
    """
    plan = _Plan(hosts, outsiders, rate)
    spine_rate = check_rate(rate if spine_rate is None else spine_rate)
    if not 2 <= leaves <= 16 or not 1 <= width <= 16:
        raise UsageError(f"A fabric has 2 to 16 leaves and 1 to 16 spines, not {leaves} and {width}.")
    names = tuple(f"leaf{i}" for i in range(leaves))
    groups = _halves(plan.hosts, names, alternate=False) | _halves(plan.outsiders, names, alternate=True)
    subnet = {name: f"10.77.{1 + i}" for i, name in enumerate(names)}
    addresses = {name: f"{subnet[groups[name]]}.{plan.number[name]}" for name in plan.stations}
    links = [plan.station_link(name, groups[name], addresses, fair) for name in plan.stations]
    routes = [Route(name, "default", (f"{subnet[groups[name]]}.254",)) for name in plan.stations]
    tops = tuple(f"spine{j}" for j in range(width))
    for i, leaf in enumerate(names):
        for j, top in enumerate(tops):
            wire = f"10.79.{16 * i + j}"
            links.append(
                Link(f"{leaf}-{top}", End(leaf, top, f"{wire}.1/30"), End(top, leaf, f"{wire}.2/30"), spine_rate)
            )
            routes.append(Route(top, f"{subnet[leaf]}.0/24", (f"{wire}.1",)))
        gateways = tuple(f"10.79.{16 * i + j}.2" for j in range(width))
        routes += [Route(leaf, f"{subnet[other]}.0/24", gateways) for other in names if other != leaf]
    links += plan.control_links()
    bridges: dict[str, str | None] = {leaf: f"{subnet[leaf]}.254/24" for leaf in names} | {"ctl": None}
    return Layout(
        "spines", plan.hosts, plan.outsiders, addresses, groups, tuple(links), bridges, tuple(routes), (*names, *tops)
    )
