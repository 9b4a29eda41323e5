"""The text form and files: round trip, and errors that name the line and the element."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule import build, dumps, encode, load_file, loads, save_file

from .cases import all_schedules, describe


@pytest.mark.parametrize("n", [1, 2, 5])
def test_round_trip(n: int) -> None:
    for schedule in all_schedules([n]):
        text = dumps(schedule)
        assert loads(text) == schedule, describe(schedule)
        assert loads(json.dumps(json.loads(text))) == schedule  # on one line, as another writer would


def test_one_edge_a_line() -> None:
    text = dumps(build("binomial", "broadcast", 3, root=1, pipeline=2))
    assert '      [0, 1, 0, "copy", [0]],' in text.splitlines()
    assert '  "root": 1,' in text.splitlines()
    assert '    {"weight": 1}' in text.splitlines()


def _changed(old: str, new: str) -> str:
    text = dumps(build("ring", "all_gather", 3))
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('"steps": 2', '"steps": "2"', r'line 7, steps: wanted an integer, found "2"'),
        ('"steps": 2', '"steps": true', r"line 7, steps: wanted an integer, found true"),
        (
            '"kind": "all_gather"',
            '"kind": "gather"',
            r"line 5, kind: unknown collective 'gather'; known are all_reduce",
        ),
        ('"pipeline": 1', '"lanes": 1', r"line 8, lanes: unknown field; known are format"),
        ('  "nranks": 3,\n', "", r"line 1, the document: the field 'nranks' is missing"),
        ('{"src": 1, ', '{"scr": 1, ', r"line 12, chunks\[1\].scr: unknown field; known are src, dst, weight"),
        (
            '[1, 2, 0, "copy", [1]]',
            '[1, 2, 7, "copy", [1]]',
            r"line 22, graphs\[1\].edges\[1\]\[2\]: 7 lies outside 0..2",
        ),
        ('[1, 2, 0, "copy", [1]]', '[1, 2, 0, "move", [1]]', r'line 22, graphs\[1\].edges\[1\]\[3\]: wanted "copy"'),
        ('[1, 2, 0, "copy", [1]]', '[1, 2, 0, "copy"]', r"line 22, graphs\[1\].edges\[1\]: .*found 4 parts"),
        (
            '[1, 2, 0, "copy", [1]]',
            '[1, 2, 0, "copy", [1, 1]]',
            r"edges\[1\]\[4\]: wanted at least one chunk, and none twice",
        ),
        ('"version": 1', '"version": 2', r"line 3, version: this version of jaxcoll reads version 1"),
        ('"format": "jaxcoll-schedule"', '"format": "x"', r"line 2, format: wanted 'jaxcoll-schedule'"),
        ('"name": "ring",', '"name": "ring"', r"line 5, column \d+: no JSON"),
        ('{"src": 0, "weight": 1}', '{"weight": 1}', r"chunk 0: a chunk of all_gather must name a src"),
        ('"name": "ring",', r'"name": "\ud800",', r"the schedule's name is '\\ud800', which can't be written as UTF-8"),
        ('{"name": "chunk1"', r'{"name": "\udfff"', r"the name of graph 1 is '\\udfff'"),
    ],
)
def test_errors_name_line_and_element(old: str, new: str, what: str) -> None:
    with pytest.raises(ScheduleError, match=what):
        loads(_changed(old, new))


def test_files_by_suffix(tmp_path: Path) -> None:
    schedule = build("dual_tree", "all_reduce", 5)
    for suffix in (".json", ".jxc", ".xml", ".JSON"):
        path = tmp_path / f"tree{suffix}"
        save_file(schedule, path)
        assert len(load_file(path).edges) == len(schedule.edges)
    assert (tmp_path / "tree.jxc").read_bytes() == encode(schedule)
    with pytest.raises(ScheduleError, match=r"tree.yaml: unknown suffix; known are .json"):
        save_file(schedule, tmp_path / "tree.yaml")


def test_file_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{\n,")
    with pytest.raises(ScheduleError, match=r"bad.json, line 2, column 1"):
        load_file(tmp_path / "bad.json")
    (tmp_path / "bad.jxc").write_bytes(b"JX")
    with pytest.raises(ScheduleError, match=r"bad.jxc: schedule: 2 bytes"):
        load_file(tmp_path / "bad.jxc")
    (tmp_path / "bad.xml").write_bytes(b"<algo>\n\xff</algo>")
    with pytest.raises(ScheduleError, match=r"bad.xml, line 2: not UTF-8"):
        load_file(tmp_path / "bad.xml")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ScheduleError, match=r"deep.json: no schedule: its lists lie too deep"):
        load_file(tmp_path / "deep.json")
    (tmp_path / "long.json").write_text("9" * 100_000)
    with pytest.raises(ScheduleError, match=r"long.json: no schedule: .*digits"):
        load_file(tmp_path / "long.json")
    with pytest.raises(ScheduleError, match=r"none.json: can't be read: No such file"):
        load_file(tmp_path / "none.json")
