"""All-to-all where no two ranks or links are alike."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from jaxcoll.schedule import verify
from jaxcoll.synth import arc_lp
from jaxcoll.synth.alltoall import all_to_all
from jaxcoll.synth.alltoall_cuts import tight_cuts
from jaxcoll.synth.alltoall_net import Net
from jaxcoll.synth.alltoall_round import Router
from jaxcoll.synth.pricing import Pricer
from jaxcoll.topology import Topology
from jaxcoll.topology.builders import overlay, parse


def noisy(base: Topology, seed: int) -> Topology:
    """Up to 30 % taken off every directed link, each by its own amount."""
    rng = np.random.default_rng(seed)
    less = {k: Fraction(int(100 * float(c) * (1 - 0.3 * rng.random())), 100) for k, c in base.capacity.items()}
    return base.with_capacity(less)


def cycles(ranks: int, count: int, seed: int) -> Topology:
    """The sum of random cycles through all ranks: no set of ranks is a bottleneck."""
    rng, capacity = np.random.default_rng(seed), dict[tuple[int, int], int]()
    for _ in range(count):
        ring = rng.permutation(ranks).tolist()
        for u, v in zip(ring, ring[1:] + ring[:1], strict=True):
            capacity[u, v] = capacity.get((u, v), 0) + int(rng.integers(50, 101))
    names = [f"r{i}" for i in range(ranks)]
    return Topology.of("cycles", names, [], [(names[u], names[v], c) for (u, v), c in capacity.items()])


@pytest.mark.parametrize(("hosts", "seed"), [(2, 1), (4, 2), (8, 1), (8, 3)])
def test_a_tight_cut_needs_no_lp(hosts: int, seed: int) -> None:
    result = all_to_all(noisy(overlay(1, hosts, 8), seed))
    assert result.details["lp_rate"] == 0
    assert result.gap <= 0.01
    assert result.details["chunks"] <= 10
    schedule = result.schedule
    assert schedule is not None
    assert verify(schedule) == []


@pytest.mark.parametrize("spec", ["torus:4x4", "cycles"])
def test_without_a_tight_cut_the_lp_bounds(spec: str) -> None:
    topology = cycles(16, 3, 1) if spec == "cycles" else noisy(parse(spec), 1)
    result = all_to_all(topology)
    oracle = arc_lp.solve(Net.from_topology(topology)).throughput
    assert result.details["lp_rate"] > 0
    assert oracle * (1 - 1e-9) <= result.bound <= oracle * 1.01
    assert 0.9 * oracle <= result.throughput <= oracle * (1 + 1e-9)
    assert result.schedule is not None
    assert verify(result.schedule) == []


def test_climbing_only_gains() -> None:
    net = Net.from_topology(noisy(overlay(1, 4, 8), 5))
    bound, price = tight_cuts(net)[0]
    router = Router(net, Pricer(net), price, 0, lambda: False, 10)
    first = router.first().with_parts(32, net.arcs)
    before = first.copy()
    higher = router.climb(first, bound)
    np.testing.assert_array_equal(first.path, before.path)  # left as it was
    assert first.rate(net) < 0.8 * bound
    assert 0.97 * bound <= higher.rate(net) <= bound
    assert higher.most_chunks() <= 10
    assert router.climb(higher, higher.rate(net)).rate(net) == higher.rate(net)
    assert Router(net, Pricer(net), price, 0, lambda: True, 10).climb(first, bound) is first
