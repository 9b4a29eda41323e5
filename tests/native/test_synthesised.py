"""Synthesised schedules run: the executor gives what the interpreter gives, for ranks from 4 to 32."""

from __future__ import annotations

import pytest

from jaxcoll import synth
from jaxcoll.schedule import check
from jaxcoll.topology import parse

from . import cases
from .harness import Cluster

# From rings and stars to hosts with switches; 32 ranks at the end.
TOPOLOGIES = ["ring:4", "star:5", "torus:2x3", "overlay:1x2x4", "rail:1x2x4", "overlay:1x2x8", "rail:1x4x8"]


@pytest.mark.parametrize("spec", TOPOLOGIES)
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_a_synthesised_schedule_runs(spec: str, collective: str):
    topology = parse(spec)
    result = getattr(synth, collective)(topology)
    assert result.schedule is not None, result.why
    check(result.schedule)
    n = result.schedule.nranks
    case = cases.Case(result.schedule, 203, "int32", "sum")
    inputs, want = cases.expected(case)
    with Cluster("inproc", n, lane_bytes=512) as cluster:
        assert not cases.compare(case, cluster.run(case.schedule, list(inputs), case.reduce), want)
