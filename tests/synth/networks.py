"""Networks that the tests share: the builders' in many sizes, and random ones."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction

import numpy as np

from jaxcoll.synth.alltoall_net import Net
from jaxcoll.topology import Topology, fail, parse

SPECS = (
    *("ring:2", "ring:5", "ring:8@100", "star:2", "star:8", "torus:4x4", "torus:2x3", "torus:2x2x3", "fattree:2"),
    *("fattree:4", "dgx_a100:1", "dgx_a100:2", "mi250:1", "rail:1x2x8", "rail:1x4x8", "rail:2x2x4", "rail:1x1x8"),
    *("overlay:1x2x8", "overlay:1x4x8", "overlay:1x3x2"),
)
# name -> the rate that the public ForestColl reports, ranks * x, in Gbit/s
PUBLISHED = {
    "rail:1x2x8": Fraction(349867, 100),
    "rail:1x2x8:fail1": Fraction(1280),
    "rail:1x2x8:fail2": Fraction(312533, 100),
    "dgx_a100:2": Fraction(34667, 100) * 8,
    "mi250:1": Fraction(34286, 100) * 8,
}


def built() -> list[Topology]:
    """Every builder's, and each with every failure that it can have."""
    result: list[Topology] = []
    for spec in SPECS:
        base = parse(spec)
        result.append(base)
        if spec.startswith(("rail:1x2", "overlay:1x2", "overlay:1x4")):
            result += [fail(base, kind) for kind in (1, 2, 3)]
    return result


def random_network(seed: int, most_ranks: int = 10) -> Topology:
    """Connected, with up to four switches; the two directions of a link differ, ranks send more or less than they get.

    Switches have equal capacity in and out, since the network is a sum of cycles and of links between ranks.
    """
    rand = random.Random(seed)
    ranks, switches = rand.randint(2, most_ranks), rand.randint(0, 4)
    capacity: Counter[tuple[int, int]] = Counter()

    def cycle(nodes: list[int], amount: int) -> None:
        for tail, head in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            capacity[tail, head] += amount

    around: list[int] = []
    for rank in rand.sample(range(ranks), ranks):
        around.append(rank)
        if switches and rand.random() < 0.5:
            around.append(ranks + rand.randrange(switches))
    cycle(around, rand.randint(1, 9))
    for _ in range(rand.randint(2, 10)):
        length = rand.randint(2, min(ranks + switches, 5))
        cycle(rand.sample(range(ranks + switches), length), rand.randint(1, 20))
    for _ in range(rand.randint(0, 6)):
        tail, head = rand.sample(range(ranks), 2)
        capacity[tail, head] += rand.randint(1, 20)
    names = [f"r{i}" for i in range(ranks)] + [f"s{i}" for i in range(switches)]
    used = set(itertools.chain.from_iterable(capacity))
    kept = [f"s{i}" for i in range(switches) if ranks + i in used]
    links = [(names[tail], names[head], amount) for (tail, head), amount in capacity.items()]
    return Topology.of(f"random{seed}", names[:ranks], kept, links)


def random_net(seed: int, ranks: int = 6, switches: int = 2) -> Net:
    """In the form of the all-to-all solver: asymmetric, strongly connected, with switches that also join each other."""
    rng = np.random.default_rng(seed)
    nodes = ranks + switches
    arcs: list[tuple[int, int, Fraction]] = []
    ring = rng.permutation(nodes)
    pairs = {(int(ring[i]), int(ring[(i + 1) % nodes])) for i in range(nodes)}
    pairs |= {(int(u), int(v)) for u, v in rng.integers(nodes, size=(2 * nodes, 2)) if u != v}
    for u, v in sorted(pairs):
        arcs.append((u, v, Fraction(int(rng.integers(1, 40)), 3)))
    return Net.from_arcs(ranks, nodes, arcs)
