"""Schedules that are optimal for a measured network."""

from __future__ import annotations

from jaxcoll.synth.allgather import all_gather as all_gather
from jaxcoll.synth.allgather import all_reduce as all_reduce
from jaxcoll.synth.allgather import reduce_scatter as reduce_scatter
from jaxcoll.synth.alltoall import all_to_all as all_to_all
from jaxcoll.synth.forest import Forest as Forest
from jaxcoll.synth.forest import History as History
from jaxcoll.synth.lowering import all_reduce_schedule as all_reduce_schedule
from jaxcoll.synth.result import Cancelled as Cancelled
from jaxcoll.synth.result import Clock as Clock
from jaxcoll.synth.result import Status as Status
from jaxcoll.synth.result import SynthResult as SynthResult
