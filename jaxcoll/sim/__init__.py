"""A flow-level simulator of schedules on shared networks; it leaves the same records as the real executor."""

from __future__ import annotations

from jaxcoll.sim.fluid import Job, Result, simulate, simulate_one
from jaxcoll.sim.network import Network, Stranger, racks, spines, star
from jaxcoll.sim.plan import Plan, plan
from jaxcoll.sim.world import Noise, Phase, World

__all__ = [
    "Job",
    "Network",
    "Noise",
    "Phase",
    "Plan",
    "Result",
    "Stranger",
    "World",
    "plan",
    "racks",
    "simulate",
    "simulate_one",
    "spines",
    "star",
]
