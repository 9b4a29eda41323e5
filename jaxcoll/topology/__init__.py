"""Networks: directed capacitated graphs of ranks and switches, their builders, failures and file form."""

from __future__ import annotations

from jaxcoll.topology.builders import BUILDERS as BUILDERS
from jaxcoll.topology.builders import parse as parse
from jaxcoll.topology.failures import fail as fail
from jaxcoll.topology.graph import Topology as Topology
from jaxcoll.topology.measured import from_measurements as from_measurements
