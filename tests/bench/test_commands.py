from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxcoll import cli, schedule
from jaxcoll.schedule.files import load_file


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture = tmp_path / "tree.svg"
    assert cli.main(["draw", "dual_tree", "--ranks", "16", "-o", str(picture)]) == 0
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert "dual_tree: all_reduce, 16 ranks" in capsys.readouterr().err


def test_kind_and_parameters_reach_the_builder(tmp_path: Path):
    saved = tmp_path / "ring.json"
    assert cli.main(["draw", "ring", "--ranks=5", "--kind=all_gather", "-p", "pipeline=3", "-o", str(saved)]) == 0
    assert load_file(saved) == schedule.build("ring", "all_gather", 5, pipeline=3)


def test_a_file_is_drawn_to_stdout_and_its_faults_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = schedule.build("ring", "all_reduce", 4)
    saved = tmp_path / "ring.json"
    schedule.save_file(good, saved)
    assert cli.main(["draw", str(saved)]) == 0
    assert capsys.readouterr().out.startswith("<svg")
    cut = schedule.Schedule(good.name, good.collective, good.steps, good.chunks, good.graphs[:-1])
    schedule.save_file(cut, saved)
    assert cli.main(["draw", str(saved)]) == 1
    assert "missing" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--ranks=4"], ["--kind=all_reduce"], ["-p", "pipeline=3"]])
def test_options_of_a_name_are_refused_with_a_file(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    schedule.save_file(schedule.build("ring", "all_reduce", 4), saved := tmp_path / "ring.json")
    assert cli.main(["draw", str(saved), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f" is for a schedule's name; {saved} is a file" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["spiral"], "unknown schedule 'spiral'; known are ring"),
        (["ring", "--kind=all_to_all"], "all_to_all"),
        (["nowhere.json"], "nowhere.json: can't be read"),
        (["ring", "--ranks=0"], "must lie in 1.."),
        (["ring", "-p", "pipeline=x"], "pipeline is 'x'; it must be a whole number"),
        (["ring", "-p", "pipeline=2.5"], "pipeline is 2.5; it must be a whole number"),
        (["ring", "-p", "pipeline=true"], "pipeline is True; it must be a whole number"),
        (["ring", "--kind=broadcast", "-p", "root=abc"], "root is 'abc'; it must be a whole number"),
        (["ring", "-p", "kind=broadcast"], "no parameter 'kind'"),
        (["ring", "-p", "name=x"], "no parameter 'name'"),
        (["ring", "-p", "nranks=3"], "no parameter 'nranks'"),
        (
            ["hierarchical", "--ranks=2", "-p", "groups=[[0],[1]]", "-p", "inner=[1]"],
            "inner=[1]; give a schedule's name",
        ),
        (["hierarchical", "-p", "groups=[[Infinity]]"], "give lists of positions"),
        (["direct", "--ranks=2", "-p", "shares=[Infinity,1]"], "give 2 integers"),
        (["permute", "-p", "perm=[[0,Infinity]]"], "give (source, destination) pairs"),
    ],
)
def test_what_cannot_be_drawn_is_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["draw", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for suffix in (".svg", ".json"):
        nowhere = str(tmp_path / "no" / f"x{suffix}")
        assert cli.main(["draw", "ring", "-o", nowhere]) in (1, 2)
        error = capsys.readouterr().err
        assert nowhere in error
        assert "No such file or directory" in error


def test_help_lists_schedules(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["draw", "--help"])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in schedule.builders())
    assert text.count("for a name:") == 3


def test_explain(tmp_path: Path):
    log = tmp_path / "run.jsonl"
    log.write_text("of a run")
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"JAXCOLL_TUNER": "on", "JAXCOLL_RUN_LOG": str(log)}
    command = [sys.executable, "-m", "jaxcoll", "explain"]
    done = subprocess.run(
        [*command, "psum", "4M", "--devices=3"], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "psum of 4M over 3 ranks" in done.stdout
    assert "ring" in done.stdout
    assert [path.read_text() for path in tmp_path.iterdir()] == ["of a run"], "nothing has run that could be tuned"
    done = subprocess.run([*command, "psums", "4M"], env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "unknown operation 'psums'" in done.stderr
