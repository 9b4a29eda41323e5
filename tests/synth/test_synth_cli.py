"""`jaxcoll synth` and `jaxcoll verify` as their users see them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxcoll.errors import JaxcollError, UsageError
from jaxcoll.schedule import Kind, build, load_file, save_file, verify
from jaxcoll.synth import cli, history
from jaxcoll.topology import from_measurements, parse

pytestmark = pytest.mark.usefixtures("fast")


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
def test_synth_writes_all_that_is_asked_for(
    collective: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, warm, out = tmp_path / "n.json", tmp_path / "w.json", tmp_path / "s.json"
    args = [collective, "--topology", "rail:1x2x4", "--fail", "2", "--warm", str(warm), "--json", str(numbers)]
    assert cli.synth_main([*args, "-o", str(out)]) == 0
    text = capsys.readouterr().out
    for word in ("throughput", "bound", "gap 0.00%", "depth", "steps", "rate", "switches", "trees"):
        assert word in text
    result = json.loads(numbers.read_text())
    assert {"collective", "ranks", "bound", "throughput", "gap", "depth", "steps", "seconds"} <= set(result)
    assert result["collective"] == collective
    assert result["ranks"] == 8
    assert result["gap"] == 0
    assert result["seconds"]["total"] == pytest.approx(sum(result["seconds"].values()) - result["seconds"]["total"])
    assert verify(load_file(out)) == []
    assert cli.synth_main(args) == 0  # now from the warm file
    details = json.loads(numbers.read_text())["details"]
    assert '"warm": "yes"' in json.dumps(details)


def test_synth_all_to_all_and_xml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, warm = tmp_path / "s.xml", tmp_path / "w.json"
    args = ["all_to_all", "--topology", "ring:4", "--warm", str(warm), "-o", str(out), "--chunks", "2", "--json", "-"]
    assert cli.synth_main(args) == 0
    assert '"collective": "all_to_all"' in capsys.readouterr().out
    assert cli.synth_main(args) == 0
    assert verify(load_file(out)) == []


def test_a_network_that_was_measured_comes_as_a_file(tmp_path: Path) -> None:
    network, out = tmp_path / "network.json", tmp_path / "s.json"
    links = {(src, dst): 25.0 for src in range(4) for dst in range(4) if src // 2 != dst // 2}
    from_measurements([0, 0, 1, 1], [200.0] * 4, {**links, (0, 2): 10.0, (2, 0): 10.0}).save(network)
    assert cli.synth_main(["all_to_all", "--topology", str(network), "-o", str(out)]) == 0
    made = load_file(out)
    assert made.nranks == 4
    assert verify(made) == []


def test_no_schedule_is_exit_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.synth_main(["all_gather", "--topology", "ring:8", "--max-depth", "2"]) == 1
    assert "no schedule" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["all_gather", "--topology", "moon:3"], "unknown topology 'moon:3'; give rail:"),
        (["all_gather", "--topology", "rail:1x4x8", "--fail", "7"], "failure 7"),
        (["all_gather", "--topology", "ring:4", "--time-limit", "0"], "time_limit is 0"),
        (["all_to_all", "--topology", "ring:4", "--lanes", "3"], "for tree packing"),
    ],
)
def test_wrong_usage_says_what_is_right(args: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cli.synth_main(args)


def test_warm_file_of_another_kind(tmp_path: Path) -> None:
    bad = tmp_path / "w.json"
    bad.write_text('{"format": "something"}')
    with pytest.raises(UsageError, match=r"w.json: not warm-start data"):
        cli.synth_main(["all_gather", "--topology", "ring:4", "--warm", str(bad)])
    bad.write_text("{\n\n,")
    with pytest.raises(UsageError, match=r"w.json, line 3"):
        history.load(bad)


def test_a_warm_file_that_contradicts_itself(tmp_path: Path) -> None:
    from jaxcoll.synth import all_gather

    good = json.loads(history.warm_to_json(all_gather(parse("ring:4")).warm))
    for change, message in (
        ({"ranks": 9}, "9 ranks among 4"),
        ({"cuts": ["ff"]}, "cut names nodes"),
        ({"trees": [[0, 1, [0, 1, 0, 1, 0, 2]]]}, "tree 0 is not a spanning tree"),
        ({"trees": 3}, "malformed"),
        ({"trees": [[0, 1, [0, 2**31, 0, 2, 0, 3]]]}, "malformed"),
        ({"trees": [[0, 2**63, [0, 1, 1, 2, 2, 3]]]}, "more trees than"),
        ({"splits": [[0, [1], [2], [[2**63]]]]}, "malformed"),
        ({"splits": [[0, [None], [2], [[1]]]]}, "malformed"),
        ({"ranks": float("inf")}, "malformed"),
        ({"rate": float("inf")}, "malformed"),
        ({"rate": "1/0"}, "malformed"),
    ):
        with pytest.raises(UsageError, match=message):
            history.warm_from_json(json.dumps({**good, **change}))


DEEP = "[" * 100_000 + "]" * 100_000
LONG = "[" + "9" * 100_000 + "]"


@pytest.mark.parametrize("text", [DEEP, LONG, "", "[", "\x00"], ids=["deep", "long", "empty", "cut", "nul"])
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce", "all_to_all"])
def test_json_that_can_not_be_read_is_told_with_its_file(collective: str, text: str, tmp_path: Path) -> None:
    (bad := tmp_path / "bad.json").write_text(text)
    for command, args in (
        (cli.verify_main, [str(bad)]),
        (cli.synth_main, [collective, "--topology", str(bad)]),
        (cli.synth_main, [collective, "--topology", "ring:4", "--warm", str(bad)]),
    ):
        with pytest.raises(JaxcollError, match=r"bad\.json"):
            command(args)


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    (bad := tmp_path / "bad.json").write_bytes(b"{\xff}")
    for collective in ("all_gather", "all_reduce", "all_to_all"):
        with pytest.raises(JaxcollError, match=r"bad\.json"):
            cli.synth_main([collective, "--topology", "ring:4", "--warm", str(bad)])
    with pytest.raises(JaxcollError, match=r"bad\.json, line 1: not UTF-8"):
        cli.verify_main([str(bad)])


def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s.json"
    assert cli.synth_main(["all_gather", "--topology", "ring:4", "-o", str(out)]) == 0
    capsys.readouterr()
    assert cli.verify_main([str(out)]) == 0
    assert "valid all_gather over 4 ranks" in capsys.readouterr().out
    sccl = tmp_path / "x.msccl.json"
    chunks = [{"pre": [rank], "post": [0, 1], "addr": rank} for rank in (0, 1)]
    data = {"msccl_type": "algorithm", "collective": {"nodes": 2, "chunks": chunks}, "steps": [{"sends": [[0, 0, 1]]}]}
    sccl.write_text(json.dumps(data))
    assert cli.verify_main([str(sccl)]) == 1  # rank 0 never gets the other's part
    assert str(sccl) in capsys.readouterr().out
    apart = tmp_path / "apart.json"
    save_file(replace(build("one_shot", Kind.ALL_REDUCE, 3), canonical=False), apart)
    assert cli.verify_main([str(apart)]) == 1
    assert "its ranks add in different orders" in capsys.readouterr().out


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all", "all_reduce"])
def test_a_warm_start_of_another_network_is_refused(collective: str, tmp_path: Path) -> None:
    warm = str(tmp_path / "warm.json")
    assert cli.synth_main([collective, "--topology", "ring:4", "--warm", warm]) == 0
    before = Path(warm).read_text()
    with pytest.raises(UsageError, match=r"warm\.json: a warm start of another network \(4 ranks"):
        cli.synth_main([collective, "--topology", "ring:5", "--warm", warm])
    assert Path(warm).read_text() == before


@pytest.mark.parametrize("collective", ["all_gather", "all_to_all"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "/nowhere/x.json"], "/nowhere/x.json: can't be written"),
        (["-o", "x.txt"], "unknown suffix"),
        (["--chunks", "0"], "chunks is 0"),
        (["--time-limit", "nan"], "time_limit is nan"),
        (["--topology", "rail:1x100000x8"], "has 800000 ranks"),
        (["--topology", "fattree:9998"], "take fewer"),
    ],
)
def test_bad_input_is_refused_before_the_solve(collective: str, args: list[str], message: str) -> None:
    with pytest.raises(JaxcollError, match=message):
        cli.synth_main([collective, "--topology", "ring:4", *args])


def test_a_time_limit_that_leaves_no_warm_data_leaves_the_schedule(tmp_path: Path) -> None:
    warm, out = tmp_path / "w.json", tmp_path / "s.json"
    args = ["all_reduce", "--topology", "rail:1x2x4", "--time-limit", "1e-9", "--warm", str(warm), "-o", str(out)]
    assert cli.synth_main(args) == 0
    assert verify(load_file(out)) == []
    assert not warm.exists()


def test_warm_data_of_one_phase_is_kept_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jaxcoll.synth import all_reduce

    warm, out = tmp_path / "w.json", tmp_path / "s.json"
    one = replace(whole := all_reduce(parse("ring:4")), warm=(whole.warm[0], None))  # the second phase was late
    monkeypatch.setitem(cli.TREES, "all_reduce", lambda *_, **__: one)
    args = ["all_reduce", "--topology", "ring:4", "--warm", str(warm)]
    assert cli.synth_main([*args, "-o", str(out)]) == 0
    assert verify(load_file(out)) == []
    first, second = history.load_pair(warm)
    assert first is not None
    assert history.warm_to_json(first) == history.warm_to_json(whole.warm[0])
    assert second is None
    monkeypatch.undo()
    capsys.readouterr()
    assert cli.synth_main([*args, "--json", "-"]) == 0
    details = json.loads(capsys.readouterr().out)["details"]
    assert (details["reduce_scatter"]["warm"], details["all_gather"]["warm"]) == ("yes", "no")
    assert None not in history.load_pair(warm)


def test_a_schedule_is_written_where_the_warm_data_can_not_be(tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    args = ["all_gather", "--topology", "ring:4", "--warm", str(tmp_path / "no" / "w.json"), "-o", str(out)]
    with pytest.raises(UsageError, match=r"w\.json: can't be written"):
        cli.synth_main(args)
    assert verify(load_file(out)) == []
