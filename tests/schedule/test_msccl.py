"""MSCCL XML: round trips, programs written by hand as others write them, and faults with their line."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxcoll.errors import ScheduleError, ScheduleInvalid
from jaxcoll.schedule import Kind, Op, Schedule, Table, build, check, from_msccl, interpret, to_msccl

from .cases import all_schedules, describe, expected, inputs_for


def _form(schedule: Schedule) -> tuple[Any, ...]:
    """What a round trip keeps: edges, reduction orders, chunks; the numbering of graphs may change."""
    orders: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for e in schedule.edges:
        for c in e.chunks:
            orders[e.step, e.dst, c].append(e.src)
    if schedule.canonical:
        orders = defaultdict(list, {key: sorted(srcs) for key, srcs in orders.items()})
    edges = {(e.step, e.src, e.dst, e.op, e.chunks) for e in schedule.edges}
    return edges, dict(orders), schedule.chunks, schedule.steps, schedule.pipeline, schedule.collective, schedule.name


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 8])
def test_round_trip(n: int) -> None:
    count = 0
    for schedule in all_schedules([n]):
        if schedule.kind is Kind.PERMUTE:
            continue
        back = from_msccl(to_msccl(schedule))
        assert _form(back) == _form(schedule), describe(schedule)
        assert back.canonical == (schedule.canonical and n > 2)
        count += 1
    assert count > 20


def test_without_our_own_attributes_steps_are_found_again() -> None:
    for schedule in all_schedules([4, 5]):
        if schedule.kind is Kind.PERMUTE:
            continue
        text = re.sub(r' (ten|edge)="\d+"', "", to_msccl(schedule))
        back = from_msccl(text)  # which verifies it
        assert back.steps <= schedule.steps, describe(schedule)
        inputs = inputs_for(schedule, 60, seed=4, dtype=np.int64)
        for got, want in zip(interpret(back, inputs), expected(schedule, inputs)):
            np.testing.assert_array_equal(got, want)


def test_one_rank_copies() -> None:
    back = from_msccl(to_msccl(build("ring", "all_reduce", 1)))
    assert not back.edges
    assert 'type="cpy"' in to_msccl(build("ring", "all_reduce", 1))


def test_weights_become_units() -> None:
    schedule = build("direct", "all_reduce", 4, shares=[4, 0, 2, 6])
    text = to_msccl(schedule)
    assert 'nchunksperloop="6"' in text
    assert [c.weight for c in from_msccl(text).chunks] == [2, 1, 3]


def test_a_table_is_written_as_ranks() -> None:
    schedule = build("dual_tree", "all_reduce", 5)
    table = Table.identity(schedule).swap_graph(0, 2, 3)
    back = from_msccl(to_msccl(schedule, table))
    pairs = {(int(table.vertex[g, e.step, e.src]), int(table.vertex[g, e.step + 1, e.dst]))
             for g, graph in enumerate(schedule.graphs) for e in graph.edges}  # fmt: skip
    assert {(e.src, e.dst) for e in back.edges} == pairs


def test_exported_programs_keep_msccls_rules() -> None:
    for schedule in all_schedules([4, 6]):
        if schedule.kind is Kind.PERMUTE:
            continue
        algo = ElementTree.fromstring(to_msccl(schedule))
        for name in ("name", "proto", "nchannels", "minBytes", "maxBytes", "inplace", "outofplace", "coll"):
            assert algo.get(name) is not None
        loop = int(algo.get("nchunksperloop", "0"))
        for gpu in algo:
            i, o = int(gpu.get("i_chunks", "0")), int(gpu.get("o_chunks", "0"))
            assert i * (schedule.nranks if schedule.kind is Kind.ALL_GATHER else 1) == loop
            assert o * (schedule.nranks if schedule.kind is Kind.REDUCE_SCATTER else 1) == loop
            waited = {(s.get("depid"), s.get("deps")) for tb in gpu for s in tb}
            for tb in gpu:
                for s in tb:
                    assert (s.get("hasdep") == "1") == ((tb.get("id"), s.get("s")) in waited)
                    assert int(s.get("cnt", "0")) < 72


def test_limits_of_the_format() -> None:
    with pytest.raises(ScheduleError, match="MSCCL has no permute"):
        to_msccl(build("permute", "permute", 3, perm=[(0, 1)]))
    with pytest.raises(ScheduleError, match=r"of up to 258 steps on gpu 0; MSCCL takes 216 of 256"):
        to_msccl(build("ring", "all_reduce", 130))
    with pytest.raises(ScheduleError, match="need 5039 equal parts"):
        to_msccl(build("direct", "all_reduce", 2, shares=[5038, 1]))


# Two ranks, each with one chunk, in place, written with fused steps: 0 sends its chunk, 1 adds and sends the sum back.
_FUSED = """<algo name="fused" proto="LL" nchannels="1" nchunksperloop="2" ngpus="3" coll="allreduce" inplace="1">
  <gpu id="0" i_chunks="2" o_chunks="0" s_chunks="0">
    <tb id="0" send="1" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="1" recv="2" chan="1">
      <step s="0" type="rcs" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="0" deps="0" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="2" o_chunks="0" s_chunks="0">
    <tb id="0" send="2" recv="0" chan="0">
      <step s="0" type="rrs" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="1"/>
    </tb>
    <tb id="1" send="-1" recv="0" chan="1">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="0" deps="0" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="2" i_chunks="2" o_chunks="0" s_chunks="0">
    <tb id="0" send="0" recv="1" chan="0">
      <step s="0" type="rrc" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="0" recv="-1" chan="1">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="0" deps="1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""

# An AllGather in place as msccl-tools writes it: the input is a part of the output buffer.
_GATHER = """<algo name="gather" nchunksperloop="2" ngpus="2" coll="allgather" inplace="1">
  <gpu id="0" i_chunks="0" o_chunks="2" s_chunks="0">
    <tb id="0" send="1" recv="1" chan="0">
      <step s="0" type="s" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="0" o_chunks="2" s_chunks="0">
    <tb id="0" send="0" recv="0" chan="0">
      <step s="0" type="s" srcbuf="o" srcoff="1" dstbuf="o" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="r" srcbuf="o" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""

# Raw contributions gathered in scratch, and added there and into the output by local steps.
_LOCAL = """<algo name="local" nchunksperloop="1" ngpus="3" coll="reduce" root="0">
  <gpu id="0" i_chunks="1" o_chunks="1" s_chunks="2">
    <tb id="0" send="-1" recv="1" chan="0">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
    </tb>
    <tb id="1" send="-1" recv="2" chan="0">
      <step s="0" type="r" srcbuf="i" srcoff="0" dstbuf="s" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="1"/>
      <step s="1" type="re" srcbuf="s" srcoff="0" dstbuf="s" dstoff="1" cnt="1" depid="0" deps="0" hasdep="1"/>
    </tb>
    <tb id="2" send="-1" recv="-1" chan="0">
      <step s="0" type="cpy" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="re" srcbuf="s" srcoff="1" dstbuf="o" dstoff="0" cnt="1" depid="1" deps="1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="1" s_chunks="0">
    <tb id="0" send="0" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="2" i_chunks="1" o_chunks="1" s_chunks="0">
    <tb id="0" send="0" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


# gpu 0's own contribution goes out in the second step; meanwhile it adds up something in scratch that nobody needs.
_LATE_READ = """<algo name="late" nchunksperloop="1" ngpus="3" coll="reduce" root="2" inplace="0">
  <gpu id="0" i_chunks="1" o_chunks="1" s_chunks="1">
    <tb id="0" send="2" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="-1" recv="1" chan="0">
      <step s="0" type="rrc" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="1" o_chunks="1" s_chunks="1">
    <tb id="0" send="2" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="0" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="2" send="-1" recv="2" chan="0">
      <step s="0" type="r" srcbuf="s" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="2" i_chunks="1" o_chunks="1" s_chunks="1">
    <tb id="0" send="-1" recv="1" chan="0">
      <step s="0" type="rrc" srcbuf="i" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
    <tb id="1" send="1" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="s" srcoff="0" dstbuf="s" dstoff="0" cnt="1" depid="0" deps="0" hasdep="0"/>
    </tb>
    <tb id="2" send="-1" recv="0" chan="0">
      <step s="0" type="rrc" srcbuf="s" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="0" deps="0" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


@pytest.mark.parametrize(
    ("text", "steps", "edges"), [(_FUSED, 4, 4), (_GATHER, 1, 2), (_LOCAL, 1, 2), (_LATE_READ, 2, 3)]
)
def test_programs_of_others(text: str, steps: int, edges: int) -> None:
    schedule = from_msccl(text)
    check(schedule)
    assert (schedule.steps, len(schedule.edges)) == (steps, edges)
    inputs = inputs_for(schedule, 10, seed=1, dtype=np.int64)
    for got, want in zip(interpret(schedule, inputs), expected(schedule, inputs)):
        np.testing.assert_array_equal(got, want)


def test_units_that_travel_together_are_one_chunk() -> None:
    schedule = from_msccl(_FUSED)
    assert len(schedule.chunks) == 1
    assert [e.op for e in schedule.edges] == [Op.REDUCE, Op.REDUCE, Op.COPY, Op.COPY]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('type="rrs"', 'type="rrx"', r"line 12, <step>: type='rrx'; known are s, r, rcs"),
        ('srcbuf="i" srcoff="0"', 'srcbuf="i" srcoff="1"', r"line 4, .*i\[1:3\] lies outside the 2"),
        ('coll="allreduce"', 'coll="scan"', r"line 1, <algo>: coll='scan'; known are allreduce"),
        ('ngpus="3"', 'ngpus="4"', r"line 1, <algo>: the gpus have the ids \[0, 1, 2\]; wanted 0..3"),
        ('ngpus="3"', 'ngpus="x"', r"line 1, <algo>: ngpus='x' is no integer"),
        ('nchunksperloop="2" ', "", r"line 1, <algo>: the attribute 'nchunksperloop' is missing"),
        ('<tb id="0" send="1" recv="-1"', '<tb id="0" send="0" recv="-1"', r"line 3, <tb>: .*can't be its own peer"),
        ('<tb id="0" send="1" recv="-1"', '<tb id="0" send="-1" recv="-1"', r"line 4, .*type 's' needs a peer"),
        ('<step s="1" type="nop"', '<step s="2" type="nop"', r"line 21, <step>: s=2; the steps .* are numbered"),
        ('depid="0" deps="1"', 'depid="0" deps="7"', r"line 24, <step>: waits for step 7 of threadblock 0"),
        ('type="nop" srcbuf="i"', 'type="s" srcbuf="i" srcoff="0" cnt="1" x="i"', r"line 21, .*no XML: duplicate"),
        ("</algo>", "", r"line 28, .*no XML: no element"),
        ("<algo ", '<!DOCTYPE a [<!ENTITY b "c">]><algo ', r"line 1: a DOCTYPE isn't accepted"),
        ('recv="2" chan="1"', 'recv="2" chan="2"', r"sends, but \d receives"),
        ('dstoff="0" cnt="2"', 'dstoff="0" cnt="1"', r"line 12, <step>: cnt=2, but its sender sends 1 chunks"),
    ],
)  # fmt: skip
def test_errors_name_line_and_element(old: str, new: str, what: str) -> None:
    assert old in _FUSED
    with pytest.raises(ScheduleError, match=what):
        from_msccl(_FUSED.replace(old, new, 1))


def test_waits_in_a_circle_are_a_deadlock() -> None:
    # gpu 2 sends back only after a step that itself waits for the answer
    text = _FUSED.replace('type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="-1"',
                          'type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="2" depid="1"', 1)  # fmt: skip
    text = text.replace('depid="1" deps="-1"', 'depid="1" deps="0"', 1)
    with pytest.raises(
        ScheduleError, match=r"deadlock: these steps wait for each other: gpu \d tb \d step \d \(line \d+\)"
    ):
        from_msccl(text)


def test_unordered_accesses_are_a_race() -> None:
    text = _FUSED.replace('depid="0" deps="1" hasdep', 'depid="-1" deps="-1" hasdep')
    with pytest.raises(ScheduleError, match=r"races for o\[0\] of gpu 2 with the step on line \d+; make one wait"):
        from_msccl(text)


def test_a_program_that_computes_something_else_is_invalid() -> None:
    with pytest.raises(ScheduleInvalid, match="missing"):
        from_msccl(_FUSED.replace('type="rrc"', 'type="r"').replace('type="rrs"', 'type="rcs"'))
    with pytest.raises(ScheduleError, match=r"gpu 0 ends with data 0 from 1 in o\[0\], wanted data 0 from 0"):
        from_msccl(_GATHER.replace('dstoff="1" cnt="1" depid="-1"', 'dstoff="0" cnt="1" depid="-1"'))


def test_two_values_of_one_chunk_cannot_be_expressed() -> None:
    text = _LOCAL.replace(
        'type="re" srcbuf="s" srcoff="0" dstbuf="s" dstoff="1"', 'type="re" srcbuf="i" srcoff="0" dstbuf="s" dstoff="1"'
    )
    with pytest.raises(ScheduleError, match=r"line 12, <step>: adds two values of data 0 that gpu 0 holds already"):
        from_msccl(text)


def test_sixty_four_ranks() -> None:
    schedule = build("ring", "all_reduce", 64)
    assert _form(from_msccl(to_msccl(schedule))) == _form(schedule)
