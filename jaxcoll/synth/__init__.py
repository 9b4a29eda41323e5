"""Schedules that are optimal for a measured network."""

from __future__ import annotations

from jaxcoll.synth.result import Cancelled as Cancelled
from jaxcoll.synth.result import Clock as Clock
from jaxcoll.synth.result import Status as Status
from jaxcoll.synth.result import SynthResult as SynthResult
