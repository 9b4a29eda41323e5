"""What a model is fitted to, and what a move must promise: of one situation, and more after one that has paid."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxcoll.sim import Noise, Phase, World, star
from jaxcoll.telemetry import group_epochs
from jaxcoll.tuner import Config, ScheduleSet, init, step
from jaxcoll.tuner.measure import batch_of, pattern_of
from jaxcoll.tuner.promise import least_gain
from jaxcoll.tuner.state import AdaptiveState
from jaxcoll.tuner.study import NBYTES, RATE, all_reduce_set

QUIET = star(8, RATE, alpha=1e-4)
NOISE = Noise(epoch=0.02, edge=0.03)


def states(spec: ScheduleSet, world: World, epochs: int) -> list[AdaptiveState]:
    """The policy's state after every epoch; moves take force at once."""
    state, current, out = init(spec), spec.home, list[AdaptiveState]()
    for _ in range(epochs):
        program = spec.by_id[current.program]
        records, _ = world.run(program.schedule, current.table, NBYTES, 1, program=program.id)
        state, decision, _ = step(state, group_epochs(records))
        if decision is not None:
            current = Config(decision.program, decision.table)
        assert isinstance(state, AdaptiveState)
        out.append(state)
    return out


def sizes(of: list[AdaptiveState]) -> list[int]:
    """Epochs of evidence after every full batch."""
    return [0 if one.evidence is None else len(one.evidence.seconds) for one in of[5::6]]


def test_evidence_grows_by_batches_up_to_three() -> None:
    spec = all_reduce_set("dual_tree", alone=True)
    assert sizes(states(spec, World(QUIET, noise=NOISE), 30)) == [6, 12, 18, 18, 18]


def test_the_last_epochs_of_it_are_kept() -> None:
    spec = all_reduce_set("dual_tree", alone=True)
    program = spec.by_id[spec.start]
    records, _ = World(QUIET, noise=NOISE).run(program.schedule, spec.home.table, NBYTES, 12, program=program.id)
    epochs, pattern = group_epochs(records), pattern_of(program.schedule, spec.home.table, NBYTES)
    whole = batch_of(epochs[2:], pattern, 8)
    joined = batch_of(epochs[6:], pattern, 8).after(batch_of(epochs[:6], pattern, 8), 10)
    for name in ("fct", "seconds", "lateness"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
    assert joined.now_ns == whole.now_ns


def test_it_begins_anew_when_a_rank_begins_to_be_late() -> None:
    spec = all_reduce_set("dual_tree", alone=True)
    for begins, expected in ((12, [6, 12, 6, 12]), (14, [6, 12, 18, 6]), (16, [6, 12, 18, 6])):
        world = World([Phase(0, QUIET), Phase(begins, QUIET, {5: 0.2})], noise=NOISE)
        assert sizes(states(spec, world, 24)) == expected, begins
    world = World([Phase(0, QUIET, {5: 0.2}), Phase(15, QUIET)], noise=NOISE)
    assert sizes(states(spec, world, 24)) == [6, 12, 18, 6], "it has ceased to be late"


def test_it_begins_anew_when_the_network_changes_and_after_a_move() -> None:
    spec = all_reduce_set("dual_tree", alone=True)
    world = World([Phase(0, QUIET), Phase(12, QUIET.congest(3, 2))], noise=NOISE)
    of = states(spec, world, 24)
    moved = next(i for i, one in enumerate(of) if one.version > 0)
    assert moved >= 12
    assert of[moved].evidence is None
    first = next(one.evidence for one in of[moved:] if one.evidence is not None)
    assert len(first.seconds) == 6


def test_a_move_that_has_paid_is_left_for_much_only() -> None:
    spec = all_reduce_set("dual_tree", alone=True)
    elsewhere = QUIET.congest(3, 2).congest(5, 4)
    of = states(spec, World([Phase(0, QUIET.congest(3, 2)), Phase(30, elsewhere)], noise=NOISE), 48)
    assert of[29].paid
    assert not all(one.paid for one in of[30:]), "the network has changed"
    content, free = of[29], dataclasses.replace(of[29], paid=False)
    assert least_gain(content) == content.params.content > 2 * least_gain(free)
    assert least_gain(dataclasses.replace(content, failures=4)) > content.params.content
