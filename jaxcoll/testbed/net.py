"""Making a layout out of namespaces, veth pairs, bridges and htb classes; changing rates; taking it down."""

from __future__ import annotations

import ipaddress
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from jaxcoll.bench.control import ENV as CONTROL_ENV
from jaxcoll.errors import UsageError
from jaxcoll.testbed import access, iproute, state
from jaxcoll.testbed.flows import Flow, Running
from jaxcoll.testbed.layout import DATA, MTU, End, Layout, Link, check_rate

Direction = Literal["up", "down", "both"]

# Room for this long at the link's rate before packets are dropped.
_QUEUE_SECONDS = 0.02
_LEAST_QUEUE, _BURST = 65_536, 65_536
_FIRST_SHARE = 16


def _class_lines(verb: str, end: End, rate: float) -> list[str]:
    """htb: class 1:1 is the link; below it 1:2 for what belongs to no share, and a class for each share.

    A share is promised its equal part and may use the whole link while others leave it idle.
    """
    device, bits = end.interface, int(rate)
    part = max(8, bits // (len(end.shares) + 1))
    head = f"class {verb} dev {device}"
    lines = [
        f"{head} parent 1: classid 1:1 htb rate {bits}bit ceil {bits}bit burst {_BURST} cburst {_BURST} quantum {MTU}"
    ]
    minors = [2, *range(_FIRST_SHARE, _FIRST_SHARE + len(end.shares))]
    limits = f"htb rate {part}bit ceil {bits}bit burst {MTU + 1000} cburst {_BURST} quantum {MTU}"
    lines += [f"{head} parent 1:1 classid 1:{minor:x} {limits}" for minor in minors]
    return lines


def shaping_lines(end: End, rate: float) -> list[str]:
    """The lines for `tc` that give what this end sends a rate (bits per second) and its shares."""
    device = end.interface
    limit = max(_LEAST_QUEUE, int(rate * _QUEUE_SECONDS / 8))
    lines = [f"qdisc add dev {device} root handle 1: htb default 2", *_class_lines("add", end, rate)]
    lines.append(f"qdisc add dev {device} parent 1:2 handle 2: bfifo limit {limit}")
    for minor, share in enumerate(end.shares, _FIRST_SHARE):
        lines.append(f"qdisc add dev {device} parent 1:{minor:x} handle {minor:x}: bfifo limit {limit}")
        matches = [
            f"match ip {side} {address}/32" for side, address in (("src", share.src), ("dst", share.dst)) if address
        ]
        lines.append(f"filter add dev {device} parent 1: protocol ip prio 1 u32 {' '.join(matches)} flowid 1:{minor:x}")
    return lines


class Testbed:
    """A layout made real; a context manager that leaves nothing behind.

    run: its name, part of the namespaces' names (`jxc-<run>-h0`); None: made from this process's id. What a killed
    process has left is removed when the next testbed starts, or by `clean`. Start it, and what runs in it, from a
    thread that outlives both. Raises Unavailable where the system doesn't allow it.
    congestion: TCP's congestion control of everything in the data network, whatever a program asks for before it
    connects; None: the kernel's default. That is often bbr, which takes the bursts of a shaped link for 10 Gbit/s and
    its drops for a policer; 4 MiB over 8 hosts took 3 to 6 % longer with it in the median, and varied twice as much.
    """

    __test__ = False  # no test class, whatever its name

    def __init__(self, layout: Layout, run: str | None = None, *, congestion: str | None = "cubic"):
        access.require()
        self._congestion = congestion
        self.layout = layout
        self.run = run or f"{os.getpid():x}"
        self.rates = {(link.name, way): link.rate for link in layout.links if link.rate for way in ("up", "down")}
        self._flows: list[Running] = []
        self._claim = state.Claim(self.run, layout.nodes)
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    @property
    def folder(self) -> Path:
        """For what runs here to write to; removed with the testbed, also after a kill."""
        return self._claim.folder

    def namespace(self, node: str) -> str:
        """The name of a node's network namespace, for `ip netns exec`."""
        return state.namespace(self.run, node)

    def _make(self) -> None:
        layout = self.layout
        name = self.namespace
        state.remove([name(node) for node in layout.nodes])
        lines = [f"netns add {name(node)}" for node in layout.nodes]
        for link in layout.links:
            a, b = link.a, link.b
            near, far = f"{a.interface} mtu {MTU} netns {name(a.node)}", f"{b.interface} mtu {MTU} netns {name(b.node)}"
            lines.append(f"link add {near} type veth peer name {far}")
        iproute.run("ip", lines=lines)
        for node in layout.nodes:
            self._configure(node)

    def _configure(self, node: str) -> None:
        layout = self.layout
        if node in layout.routers:
            # Layer 4: connections of one pair may take different spines. Loose return paths: they may, both ways.
            settings = {"ipv4/ip_forward": "1", "ipv4/fib_multipath_hash_policy": "1", "ipv4/conf/all/rp_filter": "0"}
            iproute.write_sysctl(self.namespace(node), settings)
        lines = ["link set lo up"]
        if node in layout.bridges:
            lines.append(f"link add br0 mtu {MTU} type bridge")
            address = layout.bridges[node]
            lines += [f"addr add {address} dev br0"] if address else []
            lines.append("link set br0 up")
        shaping: list[str] = []
        for link in layout.links:
            for end in (link.a, link.b):
                if end.node == node:
                    place = f"addr add {end.address} dev" if end.address else "link set master br0 dev"
                    lines += [f"{place} {end.interface}", f"link set {end.interface} up"]
                    shaping += shaping_lines(end, link.rate) if link.rate else []
        control = f" congctl {self._congestion}" if self._congestion and node in layout.addresses else ""
        if control:
            network = ipaddress.ip_interface(layout.link(node).a.address or "").network
            source = f"proto kernel scope link src {layout.addresses[node]}"
            lines.append(f"route replace {network} dev {DATA} {source}{control}")
        for route in layout.routes:
            if route.node == node:
                ways = " ".join(f"nexthop via {gateway}" for gateway in route.gateways)
                ways = f"via {route.gateways[0]}" if len(route.gateways) == 1 else ways
                lines.append(f"route add {route.prefix} {ways}{control}")
        iproute.run("ip", "-n", self.namespace(node), lines=lines)
        if shaping:
            iproute.run("tc", "-n", self.namespace(node), lines=shaping)

    def set_rate(self, link: str, rate: float, direction: Direction = "both") -> None:
        """Change a link's rate (bits per second) while traffic runs over it. For a station's link, "up" is what the
        station sends, "down" what it receives. Raises UsageError for an unknown link or a rate out of range."""
        if direction not in ("up", "down", "both"):
            raise UsageError(f"{direction!r} is no direction; write up, down or both.")
        found = self.layout.link(link)
        check_rate(rate)
        for way, end in (("up", found.a), ("down", found.b)):
            if direction in (way, "both"):
                iproute.run("tc", "-n", self.namespace(end.node), lines=_class_lines("change", end, rate))
                self.rates[link, way] = rate

    def sent_bytes(self, link: str, direction: Literal["up", "down"]) -> int:
        """Bytes that have gone over a link in one direction, by the kernel's count."""
        found: Link = self.layout.link(link)
        end = found.a if direction == "up" else found.b
        path = f"/sys/class/net/{end.interface}/statistics/tx_bytes"
        return int(iproute.run("ip", "netns", "exec", self.namespace(end.node), "cat", path))

    def spawn(self, node: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a program inside a station; it dies with this process. Its stderr is a pipe."""
        call = iproute.enter_command(os.getpid(), self.namespace(node), self.layout.station(node), CONTROL_ENV, command)
        return subprocess.Popen(
            call, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )

    def start_flows(self, flows: Sequence[Flow]) -> Running:
        """Start background flows; returns when data of each has arrived. They end with `stop()` or the testbed."""
        running = Running(flows, self.spawn, self.layout.station, self.folder)
        self._flows.append(running)
        return running

    def close(self) -> None:
        """End flows and everything that runs inside, and remove the namespaces."""
        for running in self._flows:
            running.stop()
        self._flows.clear()
        state.remove([self.namespace(node) for node in self.layout.nodes])
        self._claim.release()

    def __enter__(self) -> Testbed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
