"""Time limits, cancellation and progress of tree packing, and the warm search for the fewest steps."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from jaxcoll.errors import UsageError
from jaxcoll.schedule import Schedule, verify
from jaxcoll.synth import Cancelled, Status, SynthResult, all_gather, all_reduce, all_to_all, forest, reduce_scatter
from jaxcoll.synth import rate as rates
from jaxcoll.synth.alltoall_net import Net
from jaxcoll.synth.balance import balanced
from jaxcoll.synth.evaluate import rate
from jaxcoll.synth.pricing import Pricer
from jaxcoll.synth.result import Clock, TimeUp
from jaxcoll.topology import Topology, fail, parse


def valid(schedule: Schedule | None) -> Schedule:
    assert schedule is not None
    assert not verify(schedule)
    return schedule


NETWORKS = ("rail:1x4x8", "overlay:1x4x8", "dgx_a100:2", "torus:4x4", "ring:5")


@pytest.mark.parametrize("spec", NETWORKS)
@pytest.mark.parametrize("solve", [all_gather, reduce_scatter, all_reduce])
def test_without_time_there_is_still_a_valid_schedule(spec: str, solve: Callable[..., SynthResult]):
    full = solve(parse(spec))
    result = solve(parse(spec), time_limit=1e-9)
    assert result.status is Status.TIME_LIMIT
    assert "time limit" in result.why
    valid(result.schedule)
    assert 0 < result.throughput <= full.bound <= result.bound or solve is all_reduce
    if spec in ("torus:4x4", "ring:5") and solve is all_gather:  # one way between two ranks: the rates are the same
        assert rate(valid(result.schedule), parse(spec)) == result.throughput


def test_the_trees_of_a_warm_start_are_the_best_so_far():
    base = parse("rail:1x4x8")
    cold = all_gather(base)
    result = all_gather(fail(base, 2), warm=cold.warm, time_limit=1e-9)
    assert "warm start" in result.why
    assert result.throughput == rate(valid(cold.schedule), fail(base, 2))
    valid(result.schedule)


def test_a_latency_solve_keeps_to_its_time():
    began = time.monotonic()
    result = all_gather(parse("rail:2x8x8"), latency=True, time_limit=3.0)
    assert time.monotonic() - began < 60  # a busy machine; what takes long in it is the limit's three seconds
    assert result.schedule is not None
    assert result.throughput == result.bound or result.status is Status.TIME_LIMIT


def test_a_limit_that_is_not_reached_changes_nothing():
    assert all_gather(parse("rail:1x2x8"), time_limit=600).status is Status.OPTIMAL


def lopsided() -> Topology:
    """A switch that gives out more than it takes in."""
    links = [link for rank in "abc" for link in ((rank, "s", 2), ("s", rank, 3))]
    return Topology.of("lopsided", list("abc"), ["s"], [*links, ("a", "b", 1), ("b", "c", 1), ("c", "a", 1)])


def test_time_that_ends_after_the_trees_leaves_them(monkeypatch: pytest.MonkeyPatch):
    full = all_gather(lopsided())
    in_time = iter([True, False])  # for the network cut to what can be used, and for the given one

    def optimal_rate(*args: Any) -> Fraction:
        if next(in_time):
            return rates.optimal_rate(*args)
        raise TimeUp("time limit")

    monkeypatch.setattr(forest, "optimal_rate", optimal_rate)
    result = all_gather(lopsided())
    assert (result.status, result.throughput) == (Status.TIME_LIMIT, full.throughput)
    assert "time limit" in result.why
    assert full.bound <= result.bound


def test_cutting_a_switch_to_what_it_can_use_hears_the_caller():
    with pytest.raises(Cancelled):
        balanced(lopsided(), Clock(lambda *_: False).tick)


def test_limits_must_be_positive():
    with pytest.raises(UsageError, match="time_limit is 0"):
        all_gather(parse("ring:4"), time_limit=0)


def test_progress_cancels():
    with pytest.raises(Cancelled, match="during trees"):
        all_gather(parse("rail:1x4x8"), progress=lambda phase, done: phase != "trees")


def test_fewest_steps_start_from_columns_that_are_short_enough():
    net = Net.from_topology(parse("torus:3x3"))
    trees = Pricer(net).trees(np.ones(net.arcs), np.arange(9)).loads()
    assert len(Pricer(net, 2).short(trees)) == 9
    assert len(Pricer(net, 1).short(trees)) == 0
    line = Net.from_topology(parse("ring:5"))
    assert len(Pricer(line, 2).short(Pricer(line).trees(np.ones(line.arcs), np.arange(5)).loads())) == 5
    result = all_to_all(parse("ring:5"), steps="min")
    assert result.steps == 2
    assert result.gap < 1e-6


COUNT_THREADS = """
import os
from jaxcoll.synth.alltoall import all_to_all
from jaxcoll.topology import parse
import highspy, numpy
before = len(os.listdir("/proc/self/task"))
for threads in (1, 2):
    all_to_all(parse("overlay:1x4x8"), threads=threads)
    print(len(os.listdir("/proc/self/task")) - before)
"""


def test_a_solve_starts_no_more_threads_than_it_was_given() -> None:
    ran = subprocess.run([sys.executable, "-c", COUNT_THREADS], capture_output=True, text=True, check=True)
    alone, two = map(int, ran.stdout.split())
    assert alone == 0  # the caller's own is the one
    assert two <= 1
