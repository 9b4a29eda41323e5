"""Links that the model knows nothing of, and times that wander: no move on what chance may have brought."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxcoll.sim import Noise, Phase, World, star
from jaxcoll.telemetry import group_epochs
from jaxcoll.tuner import ReactParams, Setup, init, step
from jaxcoll.tuner.choice import drawn
from jaxcoll.tuner.measure import Batch, batch_of, pattern_of
from jaxcoll.tuner.model import Model, SlowPair
from jaxcoll.tuner.past import Doubt, Measured
from jaxcoll.tuner.state import AdaptiveState
from jaxcoll.tuner.study import RATE, all_reduce_set, drive, untuned
from tests.tuner.wire import drive_apart, wandering

EPOCHS, NBYTES = 60, 1 << 21


def batch(seconds: list[float]) -> Batch:
    """A batch of epochs of such lengths, of a set that doesn't matter."""
    spec = all_reduce_set("dual_tree", 4, alone=True)
    program = spec.by_id[spec.start]
    records, _ = World(star(4, RATE)).run(program.schedule, spec.home.table, spec.nbytes, 1, program=program.id)
    made = batch_of(group_epochs(records), pattern_of(program.schedule, spec.home.table, spec.nbytes), 4)
    return dataclasses.replace(made, seconds=np.array(seconds))


@pytest.mark.parametrize("alone", [False, True], ids=["free choice", "swaps alone"])
def test_where_flows_collide_it_gains_in_the_mean_and_moves_seldom(alone: bool) -> None:
    base, tuned, moves, minutes = 0.0, 0.0, 0, 0.0
    spec = all_reduce_set("dual_tree", alone=alone, nbytes=NBYTES)
    for seed in range(3):
        run = drive(Setup(spec, seed=seed), wandering(seed, EPOCHS), EPOCHS, delay=4)
        base += untuned(spec, wandering(seed, EPOCHS), EPOCHS).mean()
        tuned += run.seconds.mean()
        moves += len(run.taken)
        minutes += run.seconds.sum() / 60
    assert base / tuned >= 1.0
    assert moves / minutes <= 6


def test_what_another_program_fell_short_by_is_expected_of_others_too() -> None:
    # All programs but the start take three times as long as any model can know.
    spec, noise = all_reduce_set("dual_tree"), Noise(0.02, 0.03)
    start, others = (World(star(8, rate, alpha=1e-4).congest(3, 2), noise=noise) for rate in (RATE, RATE / 3))
    taken, _ = drive_apart(spec, start, others, 48)
    assert [d.action for _, d in taken[:2]] == ["program", "revert"]
    assert taken[1][0] - taken[0][0] == 3, "a move that makes it much worse doesn't last a batch"
    assert all(d.program == spec.start for _, d in taken[1:]), "one wrong promise is enough"


def test_a_doubt_is_forgotten_like_all_that_was_measured() -> None:
    spec = all_reduce_set("dual_tree", 4)
    program = spec.by_id[spec.start]
    state = init(spec, react=ReactParams(H=12))
    assert isinstance(state, AdaptiveState)
    state = dataclasses.replace(state, doubt=Doubt(3.0, True, 0))
    quiet, seen = World(star(4, RATE)), list[bool]()
    for _ in range(18):
        records, _ = quiet.run(program.schedule, spec.home.table, spec.nbytes, 1, program=program.id)
        state, _, _ = step(state, group_epochs(records))
        assert isinstance(state, AdaptiveState)
        seen.append(state.doubt is not None)
    assert seen == [True] * 11 + [False] * 7


def test_a_start_that_was_left_in_its_worst_minute_is_tried_again() -> None:
    # The others run at three fifths of the rate; the start has strangers beside it for a while.
    spec, net, noise = all_reduce_set("dual_tree"), star(8, RATE, alpha=1e-4), Noise(0.02, 0.03)
    start = World([Phase(0, net.congest(3, 2)), Phase(24, net)], noise=noise, gap=2.0)
    others = World(star(8, 0.6 * RATE, alpha=1e-4).congest(3, 2), noise=noise, gap=2.0)
    taken, current = drive_apart(spec, start, others, 72)
    assert "probe" in [d.action for _, d in taken], [d.reason for _, d in taken]
    assert current.key == spec.home.key
    assert len(taken) <= 6


def test_a_batch_differs_by_the_most_of_its_epochs() -> None:
    here = Measured(all_reduce_set("dual_tree", 4, alone=True).home, (1.0, 1.02, 0.98, 1.01, 0.99, 1.0), 6)
    assert here.differs(batch([1.5, 1.6, 1.5, 1.4, 1.5, 1.6]))
    assert here.differs(batch([0.5, 0.6, 0.5, 0.4, 0.5, 0.6]))
    assert not here.differs(batch([1.0, 1.0, 1.0, 1.0, 1.0, 5.0])), "one lost packet is no other network"
    assert not here.differs(batch([1.1, 1.1, 1.1, 1.1, 1.1, 1.1]))
    erratic = dataclasses.replace(here, epochs=(1.0, 2.0, 1.1, 0.7, 1.8, 1.2))
    assert not erratic.differs(batch([1.9, 1.6, 2.2, 1.3, 1.7, 2.0]))
    assert erratic.chance > 0.25 > 0.02 > here.chance


def test_pairs_of_which_nothing_is_known_are_drawn_from_those_seen() -> None:
    slow = (SlowPair(0, 4, 1e6), SlowPair(1, 5, 2e6))
    crossed = frozenset({(0, 4), (1, 5), (2, 6), (3, 7), (4, 5)})
    models = drawn(Model(RATE, pairs=slow), range(8), crossed, np.random.default_rng(3))
    assert len(models) > 1
    for model in models:
        more = {(p.src, p.dst): p.rate for p in model.pairs if p not in slow}
        assert not crossed & more.keys()
        assert set(more.values()) <= {1e6, 2e6}
        assert 5 < len(more) < 40, "two of the five seen are slow, so of the 51 others are about two fifths"
    assert drawn(Model(RATE), range(8), crossed, np.random.default_rng(3)) == [Model(RATE)]


def test_the_start_is_taken_again_only_where_that_pays() -> None:
    # What spares the congested host is quicker than the start without congestion, too.
    spec = all_reduce_set("dual_tree")
    quiet = star(8, RATE, alpha=1e-4)
    phases = [Phase(0, quiet.congest(3, 2)), Phase(24, quiet)]
    run = drive(Setup(spec), World(phases, noise=Noise(0.02, 0.03)), 66)
    home = untuned(spec, World(quiet), 1)[0]
    assert run.seconds[-20:].mean() <= 1.02 * home
    assert [t.decision.action for t in run.taken] == ["program"]
