"""Schedules: what a collective sends, step by step, as data."""

from __future__ import annotations

from jaxcoll.schedule.builders import Builder, build, builders
from jaxcoll.schedule.codec import decode, encode
from jaxcoll.schedule.ir import Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule
from jaxcoll.schedule.table import Table

__all__ = [
    "Builder",
    "Chunk",
    "ChunkGraph",
    "Collective",
    "Edge",
    "Kind",
    "Op",
    "Schedule",
    "Table",
    "build",
    "builders",
    "decode",
    "encode",
]
