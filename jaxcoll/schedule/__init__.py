"""Schedules: what a collective sends, step by step, as data."""

from __future__ import annotations

from jaxcoll.schedule.builders import Builder, build, builders
from jaxcoll.schedule.codec import decode, encode
from jaxcoll.schedule.interpret import interpret
from jaxcoll.schedule.ir import Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule
from jaxcoll.schedule.orders import bit_equal
from jaxcoll.schedule.stats import Stats, stats
from jaxcoll.schedule.swaps import equivalent_swaps
from jaxcoll.schedule.table import Table
from jaxcoll.schedule.verify import Finding, check, valid, verify

__all__ = [
    "Builder",
    "Chunk",
    "ChunkGraph",
    "Collective",
    "Edge",
    "Finding",
    "Kind",
    "Op",
    "Schedule",
    "Stats",
    "Table",
    "bit_equal",
    "build",
    "builders",
    "check",
    "decode",
    "encode",
    "equivalent_swaps",
    "interpret",
    "stats",
    "valid",
    "verify",
]
