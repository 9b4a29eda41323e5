"""Raw records of the GPU: waiting told from transferring by both ends' spans."""

from __future__ import annotations

from jaxcoll import telemetry
from jaxcoll.telemetry import RECEIVER, SENDER, TOGETHER, UNSPLIT, split_waits
from jaxcoll.telemetry.record import concatenate

MS = 1_000_000


def raw(src: int, dst: int, side: int, span: int, **fields: int) -> telemetry.Record:
    base = dict.fromkeys(telemetry.RECORD_DTYPE.names, 0) | {"bytes": 1000, "start_ns": 10}
    row = {"src": src, "dst": dst, "side": side | UNSPLIT, "transfer_ns": span}
    return telemetry.Record(**(base | row | fields))


def edge(src: int, dst: int, sent: int, received: int, **fields: int) -> list[telemetry.Record]:
    return [raw(src, dst, SENDER, sent, **fields), raw(src, dst, RECEIVER, received, **fields)]


def times(records: telemetry.Records) -> list[tuple[int, int, int, int, int]]:
    names = ("src", "dst", "side", "transfer_ns", "wait_ns")
    return [tuple(int(row[name]) for name in names) for row in records]


def test_the_shorter_span_is_the_transfer():
    rows = telemetry.from_records([*edge(0, 1, 9, 4), *edge(1, 0, 3, 8)])
    assert times(split_waits(rows)) == [
        (0, 1, SENDER, 4, 5), (0, 1, RECEIVER, 4, 0), (1, 0, SENDER, 3, 0), (1, 0, RECEIVER, 3, 5),
    ]  # fmt: skip
    assert (rows["side"] & UNSPLIT).all(), "the input is left alone"


def test_a_record_whose_other_end_is_missing_stays_raw():
    rows = telemetry.from_records([*edge(0, 1, 9, 4), raw(2, 1, SENDER, 7), *edge(2, 1, 1, 1, launch=5)])
    split = split_waits(rows)
    assert times(split)[2] == (2, 1, SENDER | UNSPLIT, 7, 0)
    assert (split["side"][[0, 1, 3, 4]] < UNSPLIT).all()


def test_other_records_are_as_they_were():
    rows = telemetry.from_records([raw(0, 1, RECEIVER, 7, wait_ns=3), raw(0, 1, SENDER, 2)])
    rows["side"] &= SENDER
    assert split_waits(rows) is rows
    both = concatenate([rows, telemetry.from_records(edge(1, 2, 5, 6))])
    assert times(split_waits(both))[:2] == times(rows)


def test_executions_and_steps_are_not_mixed():
    parts = [edge(0, 1, 10 + i, 5, launch=i // 4, index=i // 2 % 2, step=i % 2) for i in range(8)]
    split = split_waits(telemetry.from_records([r for part in parts for r in part]))
    assert [t[4] for t in times(split) if t[2] == SENDER] == [5 + i for i in range(8)]


def test_in_one_call_the_last_to_come_tells_the_transfer():
    # Ranks 0, 1, 2 in one call: rank 2 is the last, its own span is the call's work. Ranks 4 and 5: another call.
    spans = {0: 30, 1: 20, 2: 4, 4: 7, 5: 9}
    rows = [
        raw(a, b, side | TOGETHER, spans[a if side == SENDER else b])
        for group in ((0, 1, 2), (4, 5))
        for a in group
        for b in group
        if a != b
        for side in (SENDER, RECEIVER)
    ]
    for src, dst, side, transfer, wait in times(split_waits(telemetry.from_records(rows))):
        assert side in (SENDER, RECEIVER)
        assert transfer == (4 if src < 3 else 7)
        assert wait == spans[src if side == SENDER else dst] - transfer
    # Without one end of one edge nothing is known of its call, and all of the other.
    split = split_waits(telemetry.from_records(rows[1:]))
    assert all((t[2] & UNSPLIT > 0) == (t[0] < 3) for t in times(split))


def test_the_store_waits_for_both_ends_from_whichever_process():
    store = telemetry.Store()
    edges = [(a, b) for a in range(3) for b in range(3) if a != b]
    ends = {r: [] for r in range(3)}
    for a, b in edges:
        for row in edge(a, b, 8, 5, program=7):
            ends[a if row.side & SENDER else b].append(row)
    for rank in (0, 1):
        store.push(telemetry.from_records(ends[rank]))
        assert store.take((0, 0), {7: len(edges)}) == []
    store.push(telemetry.from_records(ends[2]))
    (epoch,) = store.take((0, 0), {7: len(edges)})
    assert len(epoch.receiver) == len(edges)
    assert (epoch.receiver["transfer_ns"] == 5).all()
    assert (epoch.records["wait_ns"][epoch.records["side"] == SENDER] == 3).all()


def exchange(late: dict[int, int], slow: dict[tuple[int, int], int], launch: int) -> list[telemetry.Record]:
    """Five ranks send to each other at once; event spans as a device gives them."""
    rows = []
    for a in range(5):
        for b in range(5):
            if a != b:
                begin, took = (late.get(a, 0), late.get(b, 0)), slow.get((a, b), 4 * MS)
                end = max(begin) + took
                common = {"bytes": 4_000_000, "launch": launch}
                rows.append(raw(a, b, SENDER, end - begin[0], start_ns=begin[0], **common))
                rows.append(raw(a, b, RECEIVER, end - begin[1], start_ns=begin[1], **common))
    return rows


def test_stragglers_and_slow_links_are_told_apart():
    late = [r for launch in range(6) for r in exchange({3: 50 * MS}, {}, launch)]
    found = telemetry.diagnose(split_waits(telemetry.from_records(late)), 5)
    assert [s.rank for s in found.stragglers] == [3]
    assert not found.links
    assert not found.hosts
    slow = [r for launch in range(6) for r in exchange({}, {(2, 4): 20 * MS}, launch)]
    found = telemetry.diagnose(split_waits(telemetry.from_records(slow)), 5)
    assert [(link.src, link.dst) for link in found.links] == [(2, 4)]
    assert not found.stragglers
