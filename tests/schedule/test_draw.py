"""Drawings: well-formed, complete, and coloured as asked."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule import Table, build, draw_svg
from jaxcoll.schedule.draw import graph_colour

from .cases import all_schedules

_SVG = "{http://www.w3.org/2000/svg}"


def _lines(svg: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f"{_SVG}line")


def test_every_schedule_can_be_drawn() -> None:
    for schedule in all_schedules([1, 2, 5]):
        root = ElementTree.fromstring(draw_svg(schedule))
        assert len(root.findall(f"{_SVG}line")) == len(schedule.edges)
        assert len(root.findall(f"{_SVG}circle")) == (schedule.steps + 1) * schedule.nranks


def test_edges_are_coloured_by_graph_and_end_at_their_ranks() -> None:
    schedule = build("dual_tree", "all_reduce", 4)
    lines = _lines(draw_svg(schedule))
    assert {line.get("stroke") for line in lines} == {graph_colour(0), graph_colour(1)}
    for line, edge in zip(lines, schedule.edges):
        y1, y2 = float(line.get("y1", "0")), float(line.get("y2", "0"))
        assert (y2 > y1) == (edge.dst > edge.src)
        assert (line.get("stroke-dasharray") is not None) == (edge.op == 0)


def test_a_table_moves_the_edges() -> None:
    schedule = build("direct", "broadcast", 3)
    plain, moved = (draw_svg(schedule, t) for t in (None, Table.identity(schedule).swap_vertex(0, 1, 1, 2)))
    assert [line.get("y2") for line in _lines(plain)] == [line.get("y2") for line in reversed(_lines(moved))]


def test_highlighted_edges_come_last_and_wide() -> None:
    schedule = build("ring", "all_gather", 4)
    lines = _lines(draw_svg(schedule, highlight={0: "red", 2: "#f00"}))
    assert [line.get("data-edge") for line in lines[-2:]] == ["0", "2"]
    assert [line.get("stroke") for line in lines[-2:]] == ["red", "#f00"]
    assert {line.get("stroke-width") for line in lines[-2:]} == {"3"}
    with pytest.raises(ScheduleError, match="edge 12 doesn't exist"):
        draw_svg(schedule, highlight={12: "red"})


def test_titles_and_colours_are_escaped() -> None:
    schedule = build("ring", "all_gather", 3)
    svg = draw_svg(schedule, title='a < b & "c"', highlight={0: '"/><script>'})
    root = ElementTree.fromstring(svg)
    assert root.findtext(f"{_SVG}title") == 'a < b & "c"'
    assert not root.findall(f".//{_SVG}script")


def test_many_graphs_get_different_colours() -> None:
    assert len({graph_colour(g) for g in range(64)}) == 64
