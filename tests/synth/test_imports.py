"""Schedules of SCCL and TE-CCL become schedules that the verifier accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule import Kind, verify
from jaxcoll.synth.imports import load_foreign, loads_foreign


def sccl(ranks: int, chunks: list[tuple[list[int], list[int], int]], steps: list[list[tuple[int, int, int]]]) -> str:
    """The text of a `.msccl.json`: chunks (pre, post, address), sends (address, src, dst)."""
    data = {
        "msccl_type": "algorithm",
        "name": "test",
        "steps": [{"msccl_type": "step", "rounds": 1, "sends": sends} for sends in steps],
        "collective": {
            "msccl_type": "collective",
            "nodes": ranks,
            "chunks": [{"msccl_type": "chunk", "pre": pre, "post": post, "addr": addr} for pre, post, addr in chunks],
        },
    }
    return json.dumps(data)


def ring_gather(ranks: int) -> list[list[tuple[int, int, int]]]:
    """Address a starts at rank a."""
    return [[((r - t) % ranks, r, (r + 1) % ranks) for r in range(ranks)] for t in range(ranks - 1)]


def ring_scatter(ranks: int) -> list[list[tuple[int, int, int]]]:
    """Address a ends, summed, at rank a."""
    return [[((r - t - 1) % ranks, r, (r + 1) % ranks) for r in range(ranks)] for t in range(ranks - 1)]


ALL = [0, 1, 2, 3]
EACH = [([rank], ALL, rank) for rank in ALL]
SUMMED = [([rank], [addr], addr) for addr in ALL for rank in ALL]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Kind.ALL_GATHER, sccl(4, EACH, ring_gather(4))),
        (Kind.REDUCE_SCATTER, sccl(4, SUMMED, ring_scatter(4))),
        (
            Kind.ALL_REDUCE,
            sccl(4, [([rank], ALL, addr) for addr in ALL for rank in ALL], ring_scatter(4) + ring_gather(4)),
        ),
        (Kind.BROADCAST, sccl(3, [([1], [0, 1, 2], 0)], [[(0, 1, 0)], [(0, 0, 2)]])),
        (
            Kind.ALL_TO_ALL,
            sccl(
                2,
                [([s], [d], 2 * s + d) for s in (0, 1) for d in (0, 1)],
                [[(1, 0, 1), (2, 1, 0)]],
            ),
        ),
    ],
)
def test_sccl(kind: Kind, text: str) -> None:
    schedule = loads_foreign(text)
    assert schedule.kind is kind
    assert verify(schedule) == []


def test_sccl_two_chunks_a_rank_keep_their_order() -> None:
    chunks = [([rank], [0, 1], address) for address, rank in enumerate([0, 1, 0, 1])]
    schedule = loads_foreign(sccl(2, chunks, [[(0, 0, 1), (1, 1, 0)], [(2, 0, 1), (3, 1, 0)]]))
    assert [chunk.src for chunk in schedule.chunks] == [0, 0, 1, 1]
    assert verify(schedule) == []


def teccl(flows: list[str], demand: dict[str, Any]) -> str:
    return json.dumps({"1-Epoch_Duration": 1e-6, "6-Demand_Met": demand, "7-Flows": flows, "Solver_Time": 0.1})


def test_teccl_through_a_switch() -> None:
    # Node 3 is a switch; rank 0's chunk goes to it once and on to both others.
    flows = [
        "Chunk 0 from 0 traveled over 0->3 in epoch 0",
        "Chunk 0 from 0 traveled over 3->1 in epoch 1",
        "Chunk 0 from 0 traveled over 3->2 in epoch 2",
        "Chunk 0 from 1 traveled over 1->0 in epoch 1",
        "Chunk 0 from 1 traveled over 0->2 in epoch 2",
        "Chunk 0 from 2 traveled over 2->1 in epoch 0",
        "Chunk 0 from 2 traveled over 1->0 in epoch 3",
    ]
    demand = {f"GPU {s}": {f"GPU {d}": {"Chunk 0": "Epoch 1"} for d in range(3) if d != s} for s in range(3)}
    schedule = loads_foreign(teccl(flows, demand))
    assert schedule.kind is Kind.ALL_GATHER
    assert schedule.nranks == 3
    assert verify(schedule) == []
    assert {(edge.src, edge.dst) for edge in schedule.edges if edge.chunks == (0,)} == {(0, 1), (0, 2)}


def test_teccl_all_to_all() -> None:
    flows = ["Chunk 0 from 0 traveled over 0->1 in epoch 4", "Chunk 0 from 1 traveled over 1->0 in epoch 4"]
    demand = {"GPU 0": {"GPU 1": {"Chunk 0": 4}}, "GPU 1": {"GPU 0": {"Chunk 0": 4}}}
    both = loads_foreign(teccl(flows, demand))
    assert both.kind is Kind.ALL_GATHER  # between two ranks the two are one and the same
    demand = {f"GPU {s}": {f"GPU {d}": {f"Chunk {d}": 0} for d in range(3) if d != s} for s in range(3)}
    flows = [f"Chunk {d} from {s} traveled over {s}->{d} in epoch 0" for s in range(3) for d in range(3) if s != d]
    schedule = loads_foreign(teccl(flows, demand))
    assert schedule.kind is Kind.ALL_TO_ALL
    assert verify(schedule) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n  nonsense", "line 2"),
        ("{}", "neither SCCL"),
        (sccl(4, EACH, [[(0, 3, 1)]]), r"steps\[0\].sends\[0\]: rank 3 has nothing of chunk 0"),
        (sccl(4, [([0], [1, 2], 0)], []), "none of all_gather"),
        (sccl(2, [([7], [0, 1], 0)], []), r"chunks\[0\].pre"),
        (teccl(["nothing"], {"GPU 0": {"GPU 1": {"Chunk 0": 1}}}), r"7-Flows\[0\]"),
        (teccl(["Chunk 0 from 0 traveled over 5->1 in epoch 0"], {"GPU 0": {"GPU 1": {"Chunk 0": 1}}}), "switch 5"),
        (teccl([], {}), "empty"),
        (sccl(2, EACH, []).replace('"nodes": 2', '"nodes": 1e999'), "malformed: OverflowError"),
        (sccl(10**10, [([0], [0], 0)], []), "collective.nodes is 10000000000; it must lie in 1..32767"),
        (sccl(0, [], []), "collective.nodes is 0"),
    ],
)
def test_faults_are_named(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        loads_foreign(text, "some.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="can't be read"):
        load_foreign(tmp_path / "none.json")


def test_teccl_numbers_switches_among_the_gpus_and_names_those_it_crossed():
    """As the public result files do: GPUs 1 and 3 with a switch 2 between, one hop "via switches"."""
    data = {
        "6-Demand_Met": {"GPU 1": {"GPU 3": {"Chunk 0": 1}}, "GPU 3": {"GPU 1": {"Chunk 0": 1}}},
        "7-Flows": [
            "Chunk 0 from 1 traveled over 1->3 in epoch 0 via switches 2",
            "Chunk 0 from 3 traveled over 3->2 in epoch 0",
            "Chunk 0 from 3 traveled over 2->1 in epoch 1",
        ],
    }
    schedule = loads_foreign(json.dumps(data))
    assert schedule.nranks == 2
    assert not verify(schedule)


@pytest.mark.parametrize("key", ["6-Flows", "7-Flows"])
def test_teccl_results_in_fractions_are_refused(key: str):
    data = {key: ["Chunk 14 from 33 traveled over 33->15 with volume 0.2 in epoch 0"]}
    with pytest.raises(ScheduleError, match="fractions of chunks"):
        loads_foreign(json.dumps(data))
