from __future__ import annotations

from pathlib import Path

import pytest

from jaxcoll.bench import cli, suite
from jaxcoll.bench.definitions import make_case, timing
from jaxcoll.bench.table import Row
from jaxcoll.errors import JaxcollError, UsageError


def row(impl: str, size: int, microseconds: float, extra: int | None = None, nwrong: int = 0) -> Row:
    case = make_case("psum", 8, size, "float32")
    return Row(impl, "procs", case, timing(case, [[microseconds * 1e-6]]), nwrong, extra)


ENTRY = suite.Entry("psum", "psum", (), (suite.Target(4096, "lax", 10),), extra_bytes=1 << 20)


def test_a_target_is_met_or_missed_by_the_ratio_of_medians():
    lines, missed = suite.lines_of(ENTRY, [row("jaxcoll", 4096, 10, 0), row("lax", 4096, 101)])
    assert missed == []
    assert lines[2] == "| 8 | 4K | 10.0 us | 101.0 us | 10.10x | 10x, met | 0.0 MiB |"
    lines, missed = suite.lines_of(ENTRY, [row("jaxcoll", 4096, 10, 0), row("lax", 4096, 99)])
    assert missed == ["psum: 4K against lax: 9.90x of 10x"]
    assert "10x, MISSED" in lines[2]


def test_a_peer_without_a_number_misses():
    _, missed = suite.lines_of(ENTRY, [row("jaxcoll", 4096, 10, 0), row("lax", 8192, 99)])
    assert len(missed) == 1


@pytest.mark.parametrize("extra", [None, 2 << 20])
def test_memory_over_the_limit_or_unknown_misses(extra: int | None):
    _, missed = suite.lines_of(ENTRY, [row("jaxcoll", 4096, 10, extra), row("lax", 4096, 101)])
    assert len(missed) == 1
    assert "beyond arguments and results" in missed[0]


def test_wrong_values_and_failures_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(cli, "measure", lambda flags: [row("jaxcoll", 4096, 10, 0, nwrong=3), row("lax", 4096, 101)])
    assert suite.main(["chain"]) == 1
    assert "chain: 3 wrong values" in capsys.readouterr().err

    def fail(flags: object) -> list[Row]:
        raise JaxcollError("no ranks")

    monkeypatch.setattr(cli, "measure", fail)
    assert suite.main(["chain"]) == 1
    assert "chain: no ranks" in capsys.readouterr().err


def test_every_entry_names_sizes_that_its_command_measures(monkeypatch: pytest.MonkeyPatch):
    measured: list[int] = []

    class FakeBench:
        def __init__(self, *arguments: object):
            pass

        def __enter__(self) -> FakeBench:
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def measure(self, case: object, *arguments: object) -> tuple[list[Row], list[str]]:
            measured.append(case.size)
            return [Row("jaxcoll", "procs", case, timing(case, [[1e-3]]), 0)], []

    monkeypatch.setattr(cli, "Bench", FakeBench)
    for entry in suite.ENTRIES:
        measured.clear()
        cli.measure([*entry.flags, "--progress=false"])
        assert {target.size for target in entry.targets} <= set(measured), entry.name
        peers = next((flag.partition("=")[2].split(",") for flag in entry.flags if flag.startswith("--peers=")), [])
        assert {target.peer for target in entry.targets} <= set(peers), entry.name


def test_the_report_replaces_the_last_one():
    document = f"head\n{suite.BEGIN}\nold\n{suite.END}\ntail\n"
    once = suite.put_into(document, ["new"])
    assert once == f"head\n{suite.BEGIN}\n\nnew\n\n{suite.END}\ntail\n"
    assert suite.put_into(once, ["new"]) == once
    with pytest.raises(UsageError, match="has no lines"):
        suite.put_into("head", ["new"])


def test_a_file_that_can_not_be_written_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(suite, "run", lambda entries: pytest.fail("it ran"))
    (plain := tmp_path / "plain.md").write_text("no marks")
    (good := tmp_path / "good.md").write_text(f"{suite.BEGIN}\nold\n{suite.END}\n")
    for words, says in (
        (["--write", str(plain)], "has no lines"),
        (["--write", str(tmp_path / "none.md")], "No such file"),
        (["chain", "--write", str(good)], "replaces all tables"),
    ):
        with pytest.raises(SystemExit, match="2"):
            suite.main(words)
        assert says in capsys.readouterr().err
    assert "old" in good.read_text()
