"""Schedules: what a collective sends, step by step, as data."""

from __future__ import annotations

from jaxcoll.schedule.builders import Builder, build, builders
from jaxcoll.schedule.codec import decode, encode
from jaxcoll.schedule.draw import draw_svg
from jaxcoll.schedule.files import load_file, save_file
from jaxcoll.schedule.interpret import interpret
from jaxcoll.schedule.ir import Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule
from jaxcoll.schedule.msccl_export import to_msccl
from jaxcoll.schedule.msccl_import import from_msccl
from jaxcoll.schedule.orders import bit_equal
from jaxcoll.schedule.stats import Stats, stats
from jaxcoll.schedule.swaps import Equivalence, equivalent_swaps
from jaxcoll.schedule.table import Table
from jaxcoll.schedule.text import dumps, loads
from jaxcoll.schedule.verify import Finding, check, valid, verify

__all__ = [
    "Builder",
    "Chunk",
    "ChunkGraph",
    "Collective",
    "Edge",
    "Equivalence",
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
    "draw_svg",
    "dumps",
    "encode",
    "equivalent_swaps",
    "from_msccl",
    "interpret",
    "load_file",
    "loads",
    "save_file",
    "stats",
    "to_msccl",
    "valid",
    "verify",
]
