"""Schedules made from arrays: the same in every respect as those made from objects, and checked as strictly."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule import ChunkGraph, Collective, Kind, Schedule, build, decode, dumps, encode, verify
from jaxcoll.schedule.columns import NONE, ChunkColumns, EdgeColumns


def from_columns(schedule: Schedule) -> Schedule:
    """A twin made from the arrays alone."""
    bounds = np.cumsum([0, *(graph.size for graph in schedule.graphs)]).tolist()
    graphs = tuple(
        ChunkGraph.of_columns(schedule.columns, bounds[i], bounds[i + 1], graph.name)
        for i, graph in enumerate(schedule.graphs)
    )
    parts = (schedule.name, schedule.collective, schedule.steps, schedule.chunk_columns, schedule.columns, graphs)
    return Schedule.of_columns(*parts, schedule.pipeline)


@pytest.mark.parametrize(
    ("name", "kind"), [("ring", "all_gather"), ("dual_tree", "all_reduce"), ("direct", "all_gather")]
)
def test_a_twin_from_arrays_is_the_same_schedule(name: str, kind: str):
    schedule = build(name, kind, 6)
    twin = from_columns(schedule)
    assert encode(twin) == encode(schedule)
    assert hash(twin) == hash(schedule)
    assert "chunks" not in twin.__dict__  # nothing was made so far
    assert "edges" not in twin.graphs[0].__dict__
    assert not verify(twin)
    assert twin == schedule
    assert dumps(twin) == dumps(schedule)
    assert decode(encode(twin)).edges == schedule.edges
    assert pickle.loads(pickle.dumps(from_columns(schedule))) == schedule


def columns(**changed: list[int]) -> EdgeColumns:
    values = {"step": [0], "src": [0], "dst": [1], "op": [0], "first": [0, 1], "chunk": [0], **changed}
    return EdgeColumns(**{name: np.array(column) for name, column in values.items()})


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (columns(step=[1]), "step of an edge is 1"),
        (columns(src=[-1]), "src of an edge is -1"),
        (columns(dst=[2]), "dst of an edge is 2"),
        (columns(op=[2]), "op of an edge is 2"),
        (columns(chunk=[2]), "chunk of an edge is 2"),
        (columns(first=[0, 0], chunk=[]), "carries no chunk"),
        (columns(first=[0, 2], chunk=[1, 1]), "carries chunk 1 twice"),
    ],
)
def test_faulty_edges_are_refused(edges: EdgeColumns, message: str):
    cut = ChunkColumns(np.arange(2), np.full(2, NONE), np.ones(2, np.int64))
    graphs = (ChunkGraph.of_columns(edges, 0, len(edges)),)
    with pytest.raises(ScheduleError, match=message):
        Schedule.of_columns("x", Collective(Kind.ALL_GATHER, 2), 1, cut, edges, graphs)


def test_faulty_chunks_are_refused():
    cut = ChunkColumns(np.array([0, 2]), np.full(2, NONE), np.ones(2, np.int64))
    with pytest.raises(ScheduleError, match="src of chunk 1 is 2"):
        Schedule.of_columns("x", Collective(Kind.ALL_GATHER, 2), 1, cut, columns(), ())
    named = ChunkColumns(np.arange(2), np.arange(2), np.ones(2, np.int64))
    with pytest.raises(ScheduleError, match="dst of chunk 0"):
        Schedule.of_columns("x", Collective(Kind.ALL_GATHER, 2), 1, named, columns(), ())


def test_a_misspelt_attribute_is_an_error():
    twin = from_columns(build("ring", "all_gather", 4))
    with pytest.raises(AttributeError, match="chunk_"):
        _ = twin.chunk_  # type: ignore[attr-defined]
