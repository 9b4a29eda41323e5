"""The tuner: pure decisions out of telemetry. Knows neither JAX nor the native library."""

from __future__ import annotations

from jaxcoll.tuner.params import POLICIES, ChoiceParams, Policy, ReactParams
from jaxcoll.tuner.replay import Setup, Taken, replay, replay_run, write_run
from jaxcoll.tuner.tuner import State, init, step, stragglers, verdict
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
    "Taken",
    "Verdict",
    "init",
    "replay",
    "replay_run",
    "step",
    "stragglers",
    "verdict",
    "write_run",
]
