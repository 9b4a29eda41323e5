"""What doesn't pay is left again, however often that has happened; and what nobody could time ends nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxcoll.schedule import Kind, build
from jaxcoll.sim import Noise, World, star
from jaxcoll.telemetry import Record, from_records, group_epochs
from jaxcoll.tuner import Config, ScheduleSet, init, step
from jaxcoll.tuner.choice import drawn
from jaxcoll.tuner.model import Model, SlowPair
from jaxcoll.tuner.params import POLICIES, Policy
from jaxcoll.tuner.past import Measured
from jaxcoll.tuner.state import AdaptiveState
from jaxcoll.tuner.study import NBYTES, RATE
from jaxcoll.tuner.types import Program

RING, DIRECT = (Program(i, build(name, Kind.ALL_REDUCE, 3), name) for i, name in enumerate(("ring", "direct"), 1))


def away(longer: float, strangers: int, epochs: int) -> tuple[list[int], AdaptiveState]:
    """(program of each epoch, last state) of a job that begins beside its start, which takes `longer` times as long.

    That much is remembered of the start; at rank 0 there are strangers.
    """
    net = star(3, RATE, alpha=1e-4)
    net = net.congest(0, strangers) if strangers else net
    spec = ScheduleSet("away", (RING, DIRECT), NBYTES, RING.id)
    world = World(net, seed=2, noise=Noise(epoch=0.01, edge=0.01), gap=0.5)
    usual = {p.id: float(World(net).run(p.schedule, p.identity, NBYTES, 1, program=p.id)[1][0]) for p in (RING, DIRECT)}
    scale = longer * usual[DIRECT.id] / usual[RING.id]
    state = init(spec)
    assert isinstance(state, AdaptiveState)
    known = Measured(spec.home, (longer * usual[DIRECT.id],) * 6, 0)
    state = dataclasses.replace(state, config=Config(DIRECT.id, DIRECT.identity), measured=(known,))
    ran: list[int] = []
    for _ in range(epochs):
        config = state.config
        program = spec.by_id[config.program]
        records, _ = world.run(program.schedule, config.table, NBYTES, 1, program=config.program)
        if program is RING:
            for name in ("transfer_ns", "wait_ns"):
                records[name] = (records[name] * scale).astype(np.uint64)
        ran.append(config.program)
        state, _, _ = step(state, group_epochs(records))
        assert isinstance(state, AdaptiveState)
    return ran, state


@pytest.mark.parametrize(("longer", "strangers"), [(1.1, 1), (1.1, 0), (1.31, 0)])
def test_a_look_at_the_start_that_shows_no_gain_is_a_short_one(longer: float, strangers: int) -> None:
    ran, state = away(longer, strangers, 500)
    looks = "".join("s" if program == RING.id else "." for program in ran).split(".")
    looks = [look for look in looks if look]
    assert looks, "the start should have been tried again"
    assert max(map(len, looks)) <= 12, [len(look) for look in looks]
    assert ran[-1] == DIRECT.id
    assert state.failures <= 2, "a look in vain makes the next look later, not all else harder"


@pytest.mark.parametrize("policy", POLICIES)
def test_epochs_that_nobody_could_time_end_nothing(policy: Policy) -> None:
    program = Program(1, build("binomial", Kind.BROADCAST, 2, root=0), "binomial")
    state = init(ScheduleSet("untimed", (program,), 4096, 1), policy=policy)
    for launch in range(30):
        row = Record(1, launch, 1, 10**9 * launch, 0, 120_000, 4096, 0, 0, 1, 0, 0, 0, 1, 0)
        state, decision, _ = step(state, group_epochs(from_records([row])))
        assert decision is None


def test_slow_pairs_inside_a_host_say_nothing_of_those_between_hosts() -> None:
    model = Model(RATE, pairs=(SlowPair(0, 1, 1e5),))
    assert drawn(model, [0, 0, 1, 1], frozenset({(0, 1), (2, 3)}), np.random.default_rng(0)) == [model]
