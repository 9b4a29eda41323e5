"""Layouts as plain data: every station has its place, its address and its fair shares."""

from __future__ import annotations

import pytest

from jaxcoll.errors import UsageError
from jaxcoll.testbed import Flow, Layout, format_rate, parse_rate, racks, spines, star
from jaxcoll.testbed.net import shaping_lines

LAYOUTS = [star(4, 2), racks(4, 2), spines(4, 2, width=3), star(1), racks(5, 3, fair=False), spines(7, 0, leaves=3)]


@pytest.mark.parametrize(
    ("text", "rate"), [("200Mbit", 2e8), ("1.5Gbit", 1.5e9), ("200m", 2e8), ("64000", 64e3), ("10 Gbps", 1e10)]
)
def test_rates(text: str, rate: float):
    assert parse_rate(text) == rate
    assert parse_rate(format_rate(rate)) == rate


@pytest.mark.parametrize("text", ["", "fast", "200MB", "-1Mbit", "1Kbit", "1000Gbit", "2e8x"])
def test_bad_rates_are_told_what_to_write(text: str):
    with pytest.raises(UsageError, match="200Mbit"):
        parse_rate(text)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.name}{len(layout.hosts)}")
def test_every_end_has_a_place_of_its_own(layout: Layout):
    ends = [(end.node, end.interface) for link in layout.links for end in (link.a, link.b)]
    assert len(set(ends)) == len(ends)
    assert max(len(interface) for _, interface in ends) < 16  # the kernel's limit
    assert {node for node, _ in ends} <= set(layout.nodes)
    addressed = [end.address for link in layout.links for end in (link.a, link.b) if end.address]
    assert len(set(addressed)) == len(addressed)
    for link in layout.links:
        for end in (link.a, link.b):
            assert end.address or end.node in layout.bridges, f"{end} is plugged into nothing"


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=lambda layout: layout.name)
def test_a_station_shares_its_link_among_all_others(layout: Layout):
    for name, address in layout.addresses.items():
        others = set(layout.addresses.values()) - {address}
        link = layout.link(name)
        assert {share.dst for share in link.a.shares} == others
        assert {share.src for share in link.b.shares} == others


def test_racks_halve_the_hosts_and_share_the_spine_by_pair():
    layout = racks(4, 2, 200e6, 50e6)
    assert [layout.groups[h] for h in layout.hosts] == ["rack0", "rack0", "rack1", "rack1"]
    assert [layout.groups[x] for x in layout.outsiders] == ["rack0", "rack1"]
    spine = layout.link("spine")
    assert spine.rate == 50e6
    assert len(spine.a.shares) == 3 * 3
    assert {(s.src, s.dst) for s in spine.b.shares} == {(s.dst, s.src) for s in spine.a.shares}


def test_spines_give_every_leaf_a_way_over_each():
    layout = spines(4, 0, width=3)
    ways = [route for route in layout.routes if route.node == "leaf0"]
    assert [route.prefix for route in ways] == ["10.77.2.0/24"]
    assert len(ways[0].gateways) == 3
    assert {link.name for link in layout.links if "spine" in link.name} == {
        f"leaf{i}-spine{j}" for i in range(2) for j in range(3)
    }


def test_shares_add_up_to_the_link():
    end = star(4, 2).link("h0").b
    classes = [line.split() for line in shaping_lines(end, 100e6) if line.startswith("class add")]
    (link,) = [words for words in classes if after(words, "classid") == "1:1"]
    shares = [words for words in classes if after(words, "parent") == "1:1"]
    assert after(link, "rate") == "100000000bit"
    assert len(shares) == 6  # five others, and what is nobody's
    assert sum(int(after(words, "rate").removesuffix("bit")) for words in shares) <= 100e6
    assert {after(words, "ceil") for words in classes} == {"100000000bit"}


def after(words: list[str], word: str) -> str:
    return words[words.index(word) + 1]


def test_what_does_not_exist_is_named_with_what_does():
    layout = star(2, 1)
    with pytest.raises(UsageError, match=r"'h7' is no link.*h0, h1, x0"):
        layout.link("h7")
    with pytest.raises(UsageError, match="no link"):
        layout.link("ctl-h0")  # the control network has no rate to change
    with pytest.raises(UsageError, match=r"'sw' is no host.*h0, h1, x0"):
        layout.station("sw")


@pytest.mark.parametrize(
    "make",
    [
        lambda: star(0),
        lambda: star(121),
        lambda: star(2, -1),
        lambda: star(2, rate=1.0),
        lambda: spines(4, leaves=1),
        lambda: spines(4, width=17),
        lambda: racks(4, spine_rate=0.0),
        lambda: Flow("x0", "x0"),
        lambda: Flow("x0", "h0", 0),
        lambda: Flow("x0", "h0", burst=(0.0, 1.0)),
    ],
)
def test_what_cannot_be_made_is_refused(make):
    with pytest.raises(UsageError):
        make()
