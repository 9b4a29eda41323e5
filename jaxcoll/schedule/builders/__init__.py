"""Builders of schedules. Importing this package fills the registry."""

from __future__ import annotations

from jaxcoll.schedule.builders import doubling, hierarchy, pairs, ring, trees
from jaxcoll.schedule.builders.registry import REGISTRY, Builder, build, builders

for _module in (ring, trees, doubling, pairs, hierarchy):
    for _builder in _module.BUILDERS:
        REGISTRY.add(_builder)

__all__ = ["REGISTRY", "Builder", "build", "builders"]
