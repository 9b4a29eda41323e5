"""The two engines of pricing: the native one gives the same trees, loads and paths as numpy, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxcoll import flowlib
from jaxcoll.errors import SynthesisError
from jaxcoll.synth.alltoall import all_to_all
from jaxcoll.synth.alltoall_net import FloatArray
from jaxcoll.synth.path_trees import SPARE, Noise
from jaxcoll.synth.pricing import Forest, LayeredForest, Pricer
from jaxcoll.topology.builders import overlay
from jaxcoll.topology.failures import fail
from tests.synth.networks import random_net

WEIGHTS: dict[str, Callable[[np.random.Generator, int], FloatArray]] = {
    "different": lambda rng, arcs: rng.random(arcs),
    "equal": lambda rng, arcs: np.ones(arcs),
    "some free": lambda rng, arcs: rng.integers(0, 3, arcs).astype(float),
    "some forbidden": lambda rng, arcs: np.where(rng.random(arcs) < 0.3, np.inf, 1.0),
}


def ends(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of different ranks."""
    source, dest = np.divmod(np.arange(ranks**2), ranks)
    return source[source != dest], dest[source != dest]


def same(one: Forest, other: Forest, ranks: int) -> None:
    np.testing.assert_array_equal(one.dist, other.dist)
    np.testing.assert_array_equal(one.total(), other.total())
    for name in ("source", "start", "arc", "units"):
        np.testing.assert_array_equal(getattr(one.loads(), name), getattr(other.loads(), name), name)
    np.testing.assert_array_equal(one.paths(*ends(ranks)), other.paths(*ends(ranks)))


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("steps", [1, 2, None])
def test_trees_are_those_of_numpy(steps: int | None, kind: str) -> None:
    for seed in range(8):
        net, rng = random_net(seed, ranks=9, switches=4), np.random.default_rng(seed)
        weight = WEIGHTS[kind](rng, net.arcs)
        pricer, sources = Pricer(net, steps), rng.permutation(net.ranks)
        grown = pricer.trees(weight, sources)
        assert not isinstance(grown, LayeredForest)
        same(grown, pricer.layered(weight, sources), net.ranks)


@pytest.mark.parametrize("kind", WEIGHTS)
def test_noisy_paths_are_those_of_numpy(kind: str, flow_library: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    net, rng = random_net(3, ranks=40, switches=6), np.random.default_rng(1)
    weight = WEIGHTS[kind](rng, net.arcs)
    roots = rng.integers(net.ranks, size=50)  # more than numpy takes at once, and some of them twice
    noise = Noise(rng.random(net.arcs) * 0.2, rng.random(net.arcs + SPARE), rng.integers(SPARE, size=len(roots)))
    column = rng.integers(len(roots), size=300)
    dest = (roots[column] + rng.integers(1, net.ranks, size=300)) % net.ranks
    found = []
    for library in (flow_library, "none"):
        if library is not None:
            monkeypatch.setenv(flowlib.OVERRIDE, library)
        flowlib.load.cache_clear()
        found.append(Pricer(net).paths(weight, noise, roots, column, dest))
    flowlib.load.cache_clear()
    np.testing.assert_array_equal(*found)
    first = found[0][:, 0]
    assert (net.tail[first[first >= 0]] == roots[column][first >= 0]).all()
    assert (first >= 0).any()


def test_a_solve_is_the_same_in_both(flow_library: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = fail(overlay(1, 2, 4), 2)
    results = []
    for library in (flow_library, "none"):
        if library is not None:
            monkeypatch.setenv(flowlib.OVERRIDE, library)
        flowlib.load.cache_clear()
        results.append(all_to_all(topology))
    flowlib.load.cache_clear()
    assert results[0].throughput == results[1].throughput
    assert results[0].schedule == results[1].schedule


@pytest.mark.usefixtures("fast")
def test_arguments_out_of_range_are_refused() -> None:
    net = random_net(0)
    with pytest.raises(SynthesisError, match="refused its arguments"):
        Pricer(net).trees(np.ones(net.arcs), np.array([net.ranks]))
    forest = Pricer(net).trees(np.ones(net.arcs), np.array([0]))
    with pytest.raises(SynthesisError, match="out of range"):
        forest.paths(np.array([1]), np.array([0]))
