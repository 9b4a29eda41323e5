"""The measurement: what it congests, what it reports, and the command from end to end."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from needs import need

from jaxcoll.errors import UsageError
from jaxcoll.schedule import Kind, build
from jaxcoll.testbed import access, bench, bench_cli, racks, result, spines, star
from jaxcoll.testbed.bench import host_of_rank, phases, ratio, shuffled
from jaxcoll.testbed.cli import main
from jaxcoll.testbed.options import width
from jaxcoll.testbed.plan import Plan, Trouble, background, check, incoming, outsiders_needed, victims
from testbed.helpers import Start, left_over, ordinary, outcome

PLAN = Plan(
    flows=(0, 2),
    victim=None,
    connections=1,
    schedule="dual_tree",
    size=4096,
    variants=("untuned", "lax"),
    epochs=4,
    block=2,
    placements=3,
    warmup=1,
    settle=1,
    seed=0,
    ranks_per_host=1,
    shuffle=False,
    deadline=60.0,
)


@pytest.mark.parametrize(("hosts", "different"), [(4, 2), (8, 3)])
def test_victims_are_inner_nodes(hosts: int, different: int):
    counts = incoming(build("dual_tree", Kind.ALL_REDUCE, hosts))
    for seed in range(5):
        found = victims(dataclasses.replace(PLAN, seed=seed), hosts)
        assert len(set(found)) == different, "four hosts have two inner nodes, which take turns"
        assert all(counts[host] == max(counts) for host in found)
    assert min(counts) < max(counts)
    drawn = {tuple(victims(dataclasses.replace(PLAN, seed=seed), 8)) for seed in range(20)}
    assert len(drawn) > 3
    assert victims(dataclasses.replace(PLAN, victim=5), 8) == [5, 5, 5]
    assert len(victims(dataclasses.replace(PLAN, placements=20), 8)) == 20


def test_a_shuffled_victim_is_the_host_of_the_rank_that_was_drawn():
    plan = dataclasses.replace(PLAN, shuffle=True, schedule="dual_tree")
    layout = star(8)
    counts = incoming(build("dual_tree", Kind.ALL_REDUCE, 8))
    moved = 0
    for number, victim in enumerate(victims(dataclasses.replace(plan, placements=6), 8)):
        hosts = shuffled(plan, layout, number)
        found = host_of_rank(layout, hosts, victim)
        moved += found != victim
        assert counts[hosts.index(layout.hosts[found])] == max(counts)
    assert moved


def test_ring_receives_from_one_neighbour():
    assert set(incoming(build("ring", Kind.ALL_REDUCE, 4))) == {4}  # one sender in each of four chunk graphs


def test_strangers_come_from_outside_and_cross_the_middle():
    flows = background(star(4, outsiders_needed("star", 2)), 2, 3, 1)
    assert [(f.src, f.dst) for f in flows] == [("x0", "h3"), ("x1", "h3")]
    for name, make in (("racks", racks), ("spines", spines)):
        layout = make(4, outsiders_needed(name, 2))
        for victim in (None, 0, 3):
            flows = background(layout, 2, victim, 5)
            assert len(flows) == 2
            assert all(f.connections == 5 for f in flows)
            assert all(layout.groups[f.src] != layout.groups[f.dst] for f in flows)
            assert all(f.src in layout.outsiders for f in flows)
            assert victim is None or {f.dst for f in flows} == {f"h{victim}"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"variants": ("untuned", "mpi")}, "Known: tuned, on, swaps, react-paper, untuned, lax"),
        ({"variants": ("lax", "lax")}, "once"),
        ({"victim": 8}, "0 to 7"),
        ({"variants": ("tuned",), "tuner": "off"}, "the same as `untuned`"),
        ({"variants": ("tuned",), "tuner": "sometimes"}, "react-paper"),
        ({"size": 6}, "multiple of 4"),
        ({"schedule": "tripel_tree"}, "dual_tree"),
        ({"variants": ("quiet",)}, "beside `quiet`"),
        ({"variants": ("best",), "schedule": None}, "--schedule=NAME"),
        ({"trouble": Trouble(late=(8, 0.05))}, "a rank's number"),
        ({"trouble": Trouble(rounds=(0.5, 30, 3))}, "60:30:3"),
        ({"trouble": Trouble(rounds=(math.inf, 1, 1))}, "60:30:3"),
        ({"trouble": Trouble(rounds=(1, math.nan, 1))}, "60:30:3"),
    ],
)
def test_bad_plans_are_refused_before_anything_starts(change: dict, words: str):
    with pytest.raises(UsageError, match=words):
        check(dataclasses.replace(PLAN, **change), 8)


def test_a_slow_link_that_is_not_there_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "Variants", lambda *_: pytest.fail("variants have started"))
    plan = dataclasses.replace(PLAN, trouble=Trouble(slow=("h9", "up", 5e7)))
    bed: Any = SimpleNamespace(layout=star(8))
    with pytest.raises(UsageError, match="'h9' is no link"):
        bench.measure(bed, plan, print, print)


def test_results_that_cannot_be_written_are_told_before_the_testbed_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(bench_cli, "Testbed", lambda *_, **__: pytest.fail("a testbed was made"))
    parser = argparse.ArgumentParser()
    bench_cli.options(parser)
    with pytest.raises(FileNotFoundError):
        bench_cli.run(parser.parse_args(["--json", str(tmp_path / "no" / "out.json")]))


def row(variant: str, seconds: list[float], settled: int = 0, p: int = 1) -> result.Row:
    return result.Row.of(variant, 0, p, 8, "h3", seconds, settled, 1e8)


def test_trouble_that_comes_and_goes_has_phases():
    assert [(p.name, p.trouble, p.epochs) for p in phases(PLAN)] == [("", True, 4)]
    found = phases(dataclasses.replace(PLAN, trouble=Trouble(rounds=(60, 30, 2))))
    names = ["before", "busy 1", "free 1", "busy 2", "free 2"]
    assert [(p.name, p.trouble, p.seconds) for p in found] == [
        (name, name.startswith("busy"), 60 if name.startswith("busy") else 30) for name in names
    ]


def test_rows_are_in_milliseconds_and_settle():
    got = row("tuned", [0.4] * 10 + [0.2] * 30, settled=10)
    assert got.mean_ms == pytest.approx(250)
    assert got.p50_ms == pytest.approx(200)
    assert got.p95_ms == pytest.approx(400)
    assert got.after_convergence_mean_ms == pytest.approx(200)
    assert got.background_mbit == pytest.approx(100)
    rows = [got, row("lax", [0.5] * 40), row("lax", [9.0], p=2)]
    assert ratio(rows, 1, "lax", "tuned") == {"mean": 2.0, "p50": 2.5, "p95": 1.25, "after": 2.5}
    assert str(got).split() == ["1", "0", "h3", "tuned", "250.0", "200.0", "400.0", "200.0", "0.0", "100.0"]


def test_compilations_of_new_processes_count_afresh():
    totals = result.Totals()
    totals.add_compilations({"tuned": 3, "lax": 0})
    totals.add_compilations({"tuned": 3, "lax": 2})
    totals.add_compilations({"tuned": 1})
    assert totals.compilations == 3 + 2 + 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--spine 100Mbit", "--spine is the rate of links that a star doesn't have"),
        ("--width 2", "it needs --topology spines, not star"),
        ("--width 4 --topology racks", "it needs --topology spines, not racks"),
        ("--tuner swaps --variants untuned,on", "`tuned`, which isn't among --variants untuned,on"),
        ("--tries 3", "`best`, which isn't among --variants tuned,untuned,lax"),
    ],
)
def test_an_option_that_nothing_here_reads_is_told(words: str, message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_cli, "Testbed", lambda *_, **__: pytest.fail("a testbed was made"))
    parser = argparse.ArgumentParser()
    bench_cli.options(parser)
    with pytest.raises(UsageError, match=message):
        bench_cli.run(parser.parse_args(words.split()))


def test_what_was_not_given_is_as_usual():
    parser = argparse.ArgumentParser()
    bench_cli.options(parser)
    args = parser.parse_args(["--topology", "spines", "--variants", "tuned,best"])
    plan = bench_cli._plan(args)
    assert (width(args), plan.tuner, plan.tries) == (4, "on", 5)


@pytest.mark.parametrize(
    "words",
    [
        ["--p", "x"],
        ["--link", "2MB"],
        ["--size", "4Q"],
        ["--epochs", "0"],
        ["--settle", "-20"],
        ["--connections", "300"],
    ],
)
def test_wrong_usage_says_what_is_accepted(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words])
    assert ended.value.code == 2
    assert words[1] in capsys.readouterr().err


@pytest.fixture
def by_command() -> None:
    """`jaxcoll testbed` can run, directly or in a user namespace."""
    lacking = access.missing()
    need(not lacking, f"testbed: {'; '.join(lacking)}", "TESTBED")


@pytest.mark.usefixtures("by_command")
def test_bench_from_end_to_end(start: Start, tmp_path: Path):
    file = tmp_path / "out.json"
    words = "--hosts 2 --p 0,1 --schedule dual_tree --size 256K --link 100Mbit --variants tuned,untuned,lax --epochs 4"
    words += " --block 2 --placements 1 --name tbench"
    status, said = outcome(start("-m", "jaxcoll", "testbed", "bench", *words.split(), "--json", str(file)), seconds=200)
    assert status == 0, said
    got = json.loads(file.read_text())
    assert [(r["variant"], r["p"], r["placement"]) for r in got["results"]] == [
        (variant, p, 0) for p in (0, 1) for variant in ("tuned", "untuned", "lax")
    ]
    assert (got["wrong"], got["compilations_after_first"]) == (0, 0)
    assert got["swaps"] >= got["reverts"] >= 0
    for one in got["results"]:
        assert one["hosts"] == 2
        assert len(one["epoch_ms"]) == 4
        # 256 KiB over 100 Mbit/s take 21 ms, and every host must receive that much.
        assert one["p50_ms"] > 15
        assert 0 < one["starved_ms"] < 20 * one["mean_ms"]
        assert (one["background_mbit"] > 10) == (one["p"] == 1)
    assert left_over("tbench") == []
    assert "compilations after the first 0, wrong 0" in said


PROGRAM = """
import os, sys, time
print("rank", os.environ["JAXCOLL_LAUNCH_RANK"], flush=True)
if len(sys.argv) > 1: time.sleep(600)
sys.exit(3 if os.environ["JAXCOLL_LAUNCH_RANK"] == "1" else 0)
"""


@pytest.mark.usefixtures("by_command")
def test_run_streams_output_and_passes_the_exit_status_on(start: Start, tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = ["--hosts", "2", "--p", "1", "--name", "trun", "--ranks-per-host", "2", str(program)]
    status, said = outcome(start("-m", "jaxcoll", "testbed", "run", *words))
    assert status == 3, said
    assert sorted(line for line in said.splitlines() if line.startswith("[")) == [f"[{r}] rank {r}" for r in range(4)]
    assert "exit codes by rank: [0, 3, 0, 0]" in said
    assert left_over("trun") == []


def namespace_of(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


@pytest.mark.usefixtures("by_command")
def test_an_ordinary_user_has_one_too_and_nothing_outlives_it(start: Start, tmp_path: Path):
    need(access.missing_for_users() is None, f"user namespaces: {access.missing_for_users()}", "TESTBED")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = ["--hosts", "2", "--p", "1", "--name", "tuser", str(program), "stay"]
    run = start("-m", "jaxcoll", "testbed", "run", *words, prefix=ordinary())
    assert run.stdout.readline().startswith("["), run.stderr.read()
    assert left_over("tuser") == [], "not in a user namespace, but for everybody to see"
    deadline = time.monotonic() + 10
    while True:  # a rank that has just begun may not have entered its host yet
        inside = [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if parent_of(pid) == run.pid]
        mine = {namespace_of(pid) for pid in inside}
        if len(mine) == 3 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert len(mine) == 3  # two hosts and the outsider
    assert namespace_of(os.getpid()) not in mine
    run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(namespace_of(pid) in mine for pid in inside) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in inside if namespace_of(pid) in mine] == []


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_where_nothing_is_allowed_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    access.forget()
    try:
        assert "the program tc (package iproute2)" in access.missing()
        with pytest.raises(access.Unavailable, match=r"Missing: .*iproute2.*Run it as root.*or allow user namespaces"):
            access.enter(["true"])
    finally:
        access.forget()


def test_the_kernels_refusal_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("ip", "tc", "mount", "unshare"):
        tool = tmp_path / name
        tool.write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2; exit 1\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    access.forget()
    try:
        with pytest.raises(
            access.Unavailable, match=r"make namespaces \(unshare failed.*user namespaces \(unshare failed"
        ):
            access.require()
    finally:
        access.forget()
