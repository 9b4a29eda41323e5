"""Emulated hosts with real traffic: network namespaces, links with a rate, strangers who use them too, and ranks.

    from jaxcoll import testbed

    with testbed.Testbed(testbed.star(hosts=4, outsiders=2, rate=200e6)) as bed:
        bed.start_flows([testbed.Flow("x0", "h2")])
        with testbed.HostRanks(bed, [sys.executable, "train.py"], output="prefix") as ranks:
            bed.set_rate("h1", 50e6, "up")
            ranks.wait()

Needs Linux, `ip` and `tc` (iproute2), and either root or user namespaces (`jaxcoll testbed` enters one by itself).
"""

from __future__ import annotations

from jaxcoll.testbed.access import Unavailable, missing
from jaxcoll.testbed.flows import Flow
from jaxcoll.testbed.layout import Layout, format_rate, parse_rate, racks, spines, star
from jaxcoll.testbed.net import Testbed
from jaxcoll.testbed.ranks import HostRanks
from jaxcoll.testbed.state import clean

__all__ = [
    "Flow",
    "HostRanks",
    "Layout",
    "Testbed",
    "Unavailable",
    "clean",
    "format_rate",
    "missing",
    "parse_rate",
    "racks",
    "spines",
    "star",
]
