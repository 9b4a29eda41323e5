"""Graphs, builders, failures and files of networks."""

from __future__ import annotations

import json
import pickle
from fractions import Fraction
from pathlib import Path

import pytest

from jaxcoll.errors import TopologyError
from jaxcoll.topology import fail, from_measurements, parse
from jaxcoll.topology.failures import fail2, links_of

SPECS = (
    "rail:1x4x8 rail:2x2x4 rail:1x1x4 overlay:1x4x8 ring:2 ring:8@100/3 star:8 torus:4x4 torus:2x3 fattree:4 "
    "dgx_a100:2 mi250:2"
)


def test_sizes_and_capacities() -> None:
    for spec, ranks, switches, links in (
        ("rail:1x4x8", 32, 12, 4 * 32),
        ("rail:2x2x4", 16, 4 + 8 + 1, 2 * (16 + 16 + 8)),
        ("overlay:1x4x8", 32, 4, 2 * (32 + 8 * 6)),
        ("ring:8", 8, 0, 16),
        ("ring:2", 2, 0, 2),
        ("star:5", 5, 1, 10),
        ("torus:2x3", 6, 0, 2 * (3 + 6)),
        ("fattree:4", 16, 20, 2 * (16 + 16 + 16)),
        ("dgx_a100:2", 16, 4, 64),
        ("mi250:1", 16, 0, 56),
    ):
        topology = parse(spec)
        assert (topology.nranks, topology.nswitches, len(topology.capacity)) == (ranks, switches, links), spec
        assert topology.unbalanced() == []
    rail = parse("rail:1x4x8")
    assert {rail.capacity[0, rail.index("h0nv")], rail.capacity[rail.index("s0tor0"), 0]} == {2880, 400}
    assert parse("ring:8@100/3").capacity[0, 1] == Fraction(100, 3)


@pytest.mark.parametrize(("hosts", "capacity"), [(2, 400), (4, 133), (8, 57), (16, 27), (32, 13), (64, 6)])
def test_failures_reproduce_the_papers_overlay(hosts: int, capacity: int) -> None:
    base = parse(f"overlay:1x{hosts}x8")
    peer, switch = 8, base.index("h0nv")
    assert base.capacity[0, peer] == capacity
    assert fail(base, 1).capacity[0, switch] == fail(base, 1).capacity[switch, 0] == 800
    assert fail(base, 2).capacity[peer, 0] == round(50 / (hosts - 1))
    third = fail(base, 3)
    # All that rank 0 receives, shared by the others: the AllToAll bounds of the paper's Table 5 for failure 3.
    into = sum(amount for (_, head), amount in third.capacity.items() if head == 0)
    bound = {2: 10.0, 4: 4.8065, 8: 2.3492, 16: 1.2205, 32: 0.5608, 64: 0.1722 * 2}[hosts]
    assert float(into / (8 * hosts - 1)) == pytest.approx(bound, abs=1e-4)


def test_failures_touch_one_rank_alone() -> None:
    base = parse("rail:1x4x8")
    for kind in (1, 2, 3):
        broken = fail(base, kind, rank=5)
        changed = {link for link in base.capacity if base.capacity[link] != broken.capacity[link]}
        assert changed
        assert all(5 in link for link in changed)
    local, network = links_of(base, 5)
    assert len(local) == len(network) == 2
    assert fail2(base, 0, 100).capacity[0, base.index("s0tor0")] == 100


def test_failures_that_cannot_be() -> None:
    with pytest.raises(TopologyError, match="no network links"):
        fail(parse("mi250:1"), 2)
    with pytest.raises(TopologyError, match="no local links"):
        fail(parse("ring:4"), 1)
    with pytest.raises(TopologyError, match="failure 9 is unknown; give 1"):
        fail(parse("ring:4"), 9)
    with pytest.raises(TopologyError, match=r"ranks 0\.\.3, not 7"):
        fail(parse("ring:4"), 2, rank=7)


@pytest.mark.parametrize("spec", SPECS.split())
def test_files_give_the_same_topology_back(spec: str, tmp_path: Path) -> None:
    topology = parse(spec)
    path = tmp_path / "net.json"
    topology.save(path)
    assert parse(str(path)) == topology
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert topology.reversed().reversed().capacity == topology.capacity


def document(links: list[object], **other: object) -> str:
    head: dict[str, object] = {
        "format": "jaxcoll-topology",
        "version": 1,
        "ranks": ["a", "b"],
        "switches": ["s"],
        **other,
    }
    rows = ",\n".join(json.dumps(link) for link in links)
    return json.dumps(head)[:-1] + ',\n"links": [\n' + rows + "\n]}"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ('{"format": "jaxcoll-topology",\n"version" 1}', ["net.json, line 2, column"]),
        ("[]", ["net.json", '"format"']),
        (document([], version=7), ["version 7", "knows version 1"]),
        (document([["a", "b", 1], ["b", "a", 0]]), ["net.json, line 4", "links[1] (b -> a)", "0 must be positive"]),
        (document([["a", "b", -3]]), ["line 3", "-3 must be positive"]),
        (document([["a", "b", "much"]]), ["line 3", "'much' is not a number"]),
        (document([["a", "c", 1]]), ["line 3", "unknown node 'c'"]),
        (document([["a", "a", 1]]), ["line 3", "itself"]),
        (document([["a", "b"]]), ["line 3", "is not [src, dst, capacity]"]),
        (document([["a", "b", 1]]), ["disconnected", "rank 'b' can't reach rank 'a'"]),
        (document([["b", "a", 1]]), ["disconnected", "rank 'b' can't be reached from rank 'a'"]),
        (document([], ranks=["a", "a"]), ["'a' is listed twice"]),
        (document([], ranks=[]), ["no ranks"]),
        (document([["a", "b", 1], ["b", "a", 1]], hosts=[0]), ["1 hosts, 2 ranks"]),
        (document([["a", "b", 1], ["b", "a", 1]], hosts="x"), ["'hosts' must be a list"]),
    ],
)
def test_faulty_files_name_the_place(text: str, messages: list[str], tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    path.write_text(text)
    with pytest.raises(TopologyError) as error:
        parse(str(path))
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    "spec", ["rail:1x4", "ring:0", "rail:axb", "moon:3", "ring", "mi250:1@5", "ring:4@x", "fattree:3"]
)
def test_faulty_specs(spec: str) -> None:
    with pytest.raises(TopologyError, match=spec.split("@")[0]):
        parse(spec)


def test_measured_networks() -> None:
    hosts = [0, 0, 1, 1]
    links = {(0, 2): 99.7, (2, 0): 12.3, (1, 3): 100.0, (3, 1): 101.0}
    topology = from_measurements(hosts, [1000.0, None, 900.0, 910.0], links)
    assert topology.unbalanced() == []
    for (src, dst), rate in links.items():
        kept = topology.capacity[src, dst]
        assert rate * 31 / 32 <= kept <= rate
    # The rank that was not measured gets the least of its host.
    assert topology.capacity[1, 4] == topology.capacity[4, 1] == topology.capacity[0, 4]


@pytest.mark.parametrize(
    ("hosts", "local", "links", "message"),
    [
        ([0, 0], [1.0], {}, "1 local rates for 2 ranks"),
        ([0, 0], [None, None], {}, "no local rate for any rank of host 0"),
        ([0, 0], [0.0, 1.0], {}, "local rate of rank 0 is 0.0"),
        ([0, 1], [None, None], {(0, 1): float("nan"), (1, 0): 1.0}, "link 0 -> 1 is nan"),
        ([0, 0], [1.0, 1.0], {(0, 1): 1.0}, "different hosts"),
        ([0, 1], [None, None], {(0, 1): 1.0}, "can't reach"),
    ],
)
def test_measurements_that_make_no_network(
    hosts: list[int], local: list[float | None], links: dict[tuple[int, int], float], message: str
) -> None:
    with pytest.raises(TopologyError, match=message):
        from_measurements(hosts, local, links)
