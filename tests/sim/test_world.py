"""Records out of simulated runs."""

from __future__ import annotations

import numpy as np
import pytest

from jaxcoll import telemetry
from jaxcoll.schedule import Kind, Table, build
from jaxcoll.sim import Noise, Phase, World, spines, star

NB = 4_000_000


def ring(n: int = 8):
    schedule = build("ring", Kind.ALL_REDUCE, n)
    return schedule, Table.identity(schedule)


def test_records_tell_the_run() -> None:
    schedule, table = ring()
    world = World(star(8, 25e6, alpha=0.0), gap=0.1)
    records, times = world.run(schedule, table.with_version(3), NB, 2, program=7)
    assert len(records) == 2 * 2 * 112
    epochs = telemetry.group_epochs(records)
    assert [epoch.id for epoch in epochs] == [(1, 1, 0, 0), (1, 1, 1, 0)]
    assert epochs[0].program == 7
    assert epochs[0].version == 3
    assert telemetry.epoch_seconds(epochs[0]) == pytest.approx(times[0], rel=1e-6)
    assert times[0] == pytest.approx(NB * 14 / 8 / 25e6, rel=1e-6)
    assert int(records["bytes"][records["side"] == telemetry.RECEIVER].sum()) == 2 * 14 * NB
    gap = int(epochs[1].records["start_ns"].min() - epochs[0].records["start_ns"].min())
    assert gap == pytest.approx((times[0] + 0.1) * 1e9, rel=1e-6)


def test_the_seed_decides_all_noise() -> None:
    schedule, table = ring(4)

    def run(seed: int) -> bytes:
        world = World(star(4, 25e6), seed=seed, noise=Noise(0.05, 0.05, 1e-4))
        return world.run(schedule, table, NB, 3)[0].tobytes()

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_phases_come_and_go() -> None:
    schedule, table = ring()
    net = star(8, 25e6)
    world = World([Phase(0, net), Phase(2, net.congest(3, 2)), Phase(4, net)])
    _, times = world.run(schedule, table, NB, 6)
    assert times[2] > 2.5 * times[0]
    np.testing.assert_allclose(times[[1, 4, 5]], times[0])


def test_a_late_rank_and_a_slow_host_are_told_apart_from_records() -> None:
    for name in ("ring", "dual_tree", "direct"):
        schedule = build(name, Kind.ALL_REDUCE, 8)
        table = Table.identity(schedule)
        net = star(8, 25e6)
        late, times = World([Phase(0, net, {5: 0.05})]).run(schedule, table, NB, 3)
        found = telemetry.diagnose(late, 8)
        assert [straggler.rank for straggler in found.stragglers] == [5], name
        assert found.stragglers[0].late_ns == pytest.approx(50e6, rel=0.1), name
        quiet, quiet_times = World(net).run(schedule, table, NB, 3)
        assert not telemetry.diagnose(quiet, 8).stragglers, name
        # What others get done while they wait is gained, never more than the lateness.
        assert np.all(times <= quiet_times * 1.02)
        assert np.all(times >= quiet_times - 0.051)
        seconds = telemetry.epoch_seconds(telemetry.group_epochs(late)[0])
        assert seconds == pytest.approx(quiet_times[0], rel=0.15), name


def test_ecmp_is_drawn_anew_in_each_epoch() -> None:
    schedule, table = ring()
    net = spines([[0, 2, 4, 6], [1, 3, 5, 7]], 25e6, 25e6, count=4)
    _, times = World(net, seed=3).run(schedule, table, NB, 12)
    assert len(set(np.round(times, 6))) > 2


def test_many_networks_come_and_one_of_them_comes_again() -> None:
    schedule, table = ring(2)
    nets = [star(2, 25e6 + i) for i in range(70)]
    world = World([Phase(i, net) for i, net in enumerate([*nets, nets[-1], star(2, 1e6)])])
    world.run(schedule, table, NB, len(nets))
    # More results are kept than are to be: they go, the one that is asked for again with them.
    _, times = world.run(schedule, table, NB, 2)
    assert times[1] > 20 * times[0]


def test_no_noise_costs_one_simulation() -> None:
    schedule, table = ring()
    records, times = World(star(8, 25e6)).run(schedule, table, NB, 300)
    assert len(records) == 300 * 224
    assert np.ptp(times) == pytest.approx(0, abs=1e-12)
