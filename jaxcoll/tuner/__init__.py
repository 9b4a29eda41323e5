"""The tuner: pure decisions out of telemetry. Knows neither JAX nor the native library."""

from __future__ import annotations

from jaxcoll.tuner.params import POLICIES, ChoiceParams, Policy, ReactParams
from jaxcoll.tuner.setup import Setup
from jaxcoll.tuner.tuner import State, init, step, verdict
from jaxcoll.tuner.types import Config, Decision, Program, ScheduleSet, Verdict

__all__ = [
    "POLICIES",
    "ChoiceParams",
    "Config",
    "Decision",
    "Policy",
    "Program",
    "ReactParams",
    "ScheduleSet",
    "Setup",
    "State",
    "Verdict",
    "init",
    "step",
    "verdict",
]
