"""The rate of a schedule on a network agrees with what tree packing promises, and with a hand count."""

from __future__ import annotations

from fractions import Fraction

import pytest

from jaxcoll.errors import TopologyError
from jaxcoll.schedule import build
from jaxcoll.synth import all_gather, all_reduce, reduce_scatter
from jaxcoll.synth.evaluate import link_loads, pair_route, rate
from jaxcoll.topology import fail, parse

pytestmark = pytest.mark.usefixtures("fast")


@pytest.mark.parametrize("spec", ["ring:5", "star:4", "torus:2x3", "rail:1x2x8", "overlay:1x4x8", "dgx_a100:1"])
def test_a_synthesised_schedule_runs_at_its_rate(spec: str) -> None:
    topology = parse(spec)
    for make in (all_gather, reduce_scatter, all_reduce):
        result = make(topology)
        assert result.schedule is not None
        reached = rate(result.schedule, topology)
        # The two phases of all_reduce are counted as if they overlapped, which doubles what each link carries.
        assert reached >= result.throughput
        assert make is all_reduce or reached * Fraction(95, 100) <= result.throughput


def test_ring_by_hand() -> None:
    topology = parse("ring:4@100")
    ring = build("ring", "all_gather", 4)
    assert link_loads(ring, topology) == {(rank, (rank + 1) % 4): 3 for rank in range(4)}
    assert rate(ring, topology) == Fraction(100, 3)
    slow = topology.with_capacity({(1, 2): 10})
    assert rate(ring, slow) == Fraction(10, 3)
    assert all_gather(slow).throughput > Fraction(10, 3)


def test_routes_prefer_switches() -> None:
    rail = parse("rail:1x2x2")
    assert [rail.nodes[head] for _, head in pair_route(rail, 0, 1)] == ["h0nv", "h0r1"]
    assert [rail.nodes[head] for _, head in pair_route(rail, 0, 2)] == ["s0tor0", "h1r0"]
    # Different rails of different hosts: no way through switches alone.
    assert len(pair_route(rail, 0, 3)) == 4
    with pytest.raises(TopologyError, match="4 ranks on 5"):
        rate(build("ring", "all_gather", 4), parse("ring:5"))


def test_static_schedules_lose_what_resynthesis_keeps() -> None:
    base = parse("rail:1x2x8")
    broken = fail(base, 2)
    static = all_gather(base).schedule
    assert static is not None
    assert rate(static, broken) * 7 < all_gather(broken).throughput
