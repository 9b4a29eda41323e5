"""The scenarios and their table, and the best table for a known network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxcoll.errors import UsageError
from jaxcoll.schedule import Kind, build
from jaxcoll.testbed import best, racks, scenarios, star, table
from jaxcoll.testbed.bench_cli import _plan  # pyright: ignore[reportPrivateUsage]
from jaxcoll.testbed.cli import _parser  # pyright: ignore[reportPrivateUsage]
from jaxcoll.testbed.options import make_layout, width
from jaxcoll.testbed.plan import check, outsiders_needed


def row(variant: str, mean: float, phase: str = "", p: int = 2) -> dict[str, Any]:
    fields = {f"{name}_ms": mean for name in ("mean", "p50", "p95", "after_convergence_mean", "starved")}
    return {"variant": variant, "placement": 0, "p": p, "phase": phase, "epoch_ms": [mean] * 60, **fields}


def result(*rows: dict[str, Any], **found: Any) -> dict[str, Any]:
    usual = {"variant": "on", "placement": 0, "swaps": 1, "reverts": 0, "findings": {}, "decisions": []}
    tuned = [{**usual, "batches_to_decide": {}, **found}]
    return {"results": list(rows), "found": tuned, "swaps": 1, "reverts": 0, "compilations_after_first": 0, "wrong": 0}


@pytest.mark.parametrize("scenario", scenarios.SCENARIOS, ids=lambda s: s.name)
def test_every_scenario_is_a_plan_that_can_be_carried_out(scenario: scenarios.Scenario):
    args = _parser().parse_args(["bench", *scenario.words.split()])
    plan = _plan(args)
    check(plan, args.hosts, args.topology, width(args))
    make_layout(args, outsiders_needed(args.topology, max(plan.flows)))
    assert scenario.seconds <= 360
    # What it reads must be among what it measures.
    rows = [row(v, 100.0) for v in plan.variants]
    if plan.trouble.rounds is not None:
        rows = [row(v, 100.0, phase) for v in plan.variants for phase in ("before", "busy 1", "free 1")]
    lines = table.read(scenario, result(*rows))
    assert [line.reading.what for line in lines if line.value is None] == []


def test_names_are_distinct_and_listed():
    names = [s.name for s in scenarios.SCENARIOS]
    assert len(set(names)) == len(names)
    assert all(name in scenarios.listing() for name in names)


def test_a_table_of_results_with_a_missing_one(tmp_path: Path):
    tree, ring = (
        next(s for s in scenarios.SCENARIOS if s.name == name) for name in ("free-dual-tree-p2", "free-ring-p2")
    )
    rows = [row("untuned", 400.0), row("on", 200.0), row("lax", 500.0), row("quiet", 190.0)]
    (tmp_path / "free-dual-tree-p2.json").write_text(json.dumps({**result(*rows), "words": tree.words}))
    made = table.make([tree, ring], tmp_path, {"free-ring-p2": "exit status 1: no luck"})
    assert "| | untuned / tuned, mean, convergence included | >= 1.45 | 2, met |" in made
    assert "<= 1.1 | 1.05, met |" in made
    assert "not measured: exit status 1: no luck" in made
    assert table.command(tree) in made
    # What has no results stays as an earlier table says, with its command.
    text = f"before\n{table.BEGIN}\n{made}\n{table.END}\nafter\n"
    (tmp_path / "free-dual-tree-p2.json").unlink()
    assert table.make([tree, ring], tmp_path, {}, earlier=text) == made
    assert table.command(ring) not in made
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.put(text, made) == f"before\n{table.BEGIN}\n{made}\n{table.END}\nafter\n"
    with pytest.raises(UsageError, match="no two lines"):
        table.put("nothing here", made)


def test_results_of_other_options_count_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    ring = next(s for s in scenarios.SCENARIOS if s.name == "free-ring-p2")
    rows = [row(variant, 100.0) for variant in ("untuned", "on", "lax", "quiet")]
    file = tmp_path / "free-ring-p2.json"
    file.write_text(json.dumps({**result(*rows), "words": f"{ring.words} --epochs 4"}))
    assert "not measured: not run" in table.make([ring], tmp_path, {})
    assert f"free-ring-p2: {file} was made by other options ({ring.words} --epochs 4)" in capsys.readouterr().err
    trial = table.make([ring], tmp_path, {}, extra="--epochs  4")
    assert "not measured" not in trial
    assert table.command(ring, "--epochs 4") in trial
    assert capsys.readouterr().err == ""
    file.write_text(json.dumps(result(*rows)))
    text = f"{table.BEGIN}\n{trial}\n{table.END}\n"
    assert table.make([ring], tmp_path, {}, "--epochs 4", earlier=text) == trial  # its lines are the earlier ones
    assert "made by options that it doesn't tell: taken as not run" in capsys.readouterr().err


def test_the_longest_stall_is_that_of_all_variants_and_read_wherever_swaps_are_looked_for():
    made = result(decisions=[{"committed": True, "stall_s": 1e-5}])
    swaps = {**made["found"][0], "variant": "swaps", "decisions": [{"committed": True, "stall_s": 2e-3}]}
    refused = {**made["found"][0], "decisions": [{"committed": False, "stall_s": 1.0}]}
    made["found"] += [swaps, refused]
    stalls = {s.name: [r for r in s.readings if r.what.startswith("longest stall")] for s in scenarios.SCENARIOS}
    assert [name for name, found in stalls.items() if not found] == ["quiet", "straggler"]
    assert all(reading.read(scenarios.Result(made)) == 2.0 for found in stalls.values() for reading in found)


@pytest.mark.parametrize("text", ['{"words": ', "[]"])
def test_damaged_results_are_named(text: str, tmp_path: Path):
    ring = next(s for s in scenarios.SCENARIOS if s.name == "free-ring-p2")
    (tmp_path / "free-ring-p2.json").write_text(text)
    with pytest.raises(UsageError, match=r"free-ring-p2\.json is damaged: .*; remove it to run the scenario again"):
        table.make([ring], tmp_path, {})


def test_what_other_options_made_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ring = next(s for s in scenarios.SCENARIOS if s.name == "free-ring-p2")
    ran: list[list[str]] = []

    class Bench:
        def __init__(self, line: list[str], **_: Any):
            ran.append(line)
            Path(line[-1]).write_text(json.dumps(result()))

        def wait(self, _: float) -> int:
            return 0

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(table.subprocess, "Popen", Bench)
    for extra in ("--epochs 4", "--epochs 4", "", ""):
        assert table._run_all([ring], tmp_path, again=False, extra=extra) == {}  # pyright: ignore[reportPrivateUsage]
        made = json.loads((tmp_path / "free-ring-p2.json").read_text())
        assert made == {**result(), "words": f"{ring.words} {extra}".strip()}
    assert [line[-4:-2] == ["--epochs", "4"] for line in ran] == [True, False]


def test_batches_count_unless_a_phase_was_harmless():
    rows = [row("on", 100.0, "before"), row("on", 104.0, "busy 1"), row("on", 150.0, "busy 2")]
    waits = {"busy 1": None, "busy 2": 2}
    assert scenarios.Result(result(*rows, batches_to_decide=waits)).most_batches("on") == 2
    assert scenarios.Result(result(*rows, batches_to_decide={"busy 2": None})).most_batches("on") == float("inf")
    many = [
        row("on", 100.0, "before"),
        row("on", 101.0, "busy 1"),
        *(row("on", 300.0, f"busy {i}") for i in range(10, 13)),
    ]
    calm = scenarios.Result(result(*many, batches_to_decide={"busy 1": None}))
    assert calm.most_batches("on") == 0, "busy 10 is another phase than busy 1"
    assert calm.mean("on", "p50_ms", "busy") == pytest.approx((101 + 3 * 300) / 4)
    elsewhere = {**row("on", 900.0, "before"), "placement": 1}
    assert scenarios.Result(result(*rows, elsewhere, batches_to_decide={"busy 2": None})).most_batches("on") == float(
        "inf"
    )
    said = scenarios.Result(result(*rows, findings={"rank 3 is late": 2}))
    assert (said.said("on", "rank 3", "late"), said.said("on", "rank 4")) == (1, 0)


def test_moves_are_counted_within_any_minute():
    def moves(*times: float) -> list[dict[str, Any]]:
        made = [{"action": "swap", "time": t, "committed": True} for t in times]
        return [*made, {**made[0], "committed": False}, {**made[0], "action": "revert"}]

    apart = scenarios.Result(result(decisions=moves(0.0, 1.0, 59.0, 60.0, 61.0, 125.0)))
    assert apart.most_in_a_minute("on", reverts=False) == 3
    assert apart.most_in_a_minute("on", reverts=True) == 4
    assert (
        scenarios.Result(result(decisions=moves(0.0, 30.0, 61.0, 62.0, 89.0, 125.0))).most_in_a_minute("on", False) == 4
    )


def test_the_best_order_of_a_ring_over_two_racks_crosses_twice():
    layout = racks(4, 0, 200e6, 100e6)
    ring = build("ring", Kind.ALL_REDUCE, 4)
    hosts = ["h0", "h2", "h1", "h3"]  # ranks 0 and 2 in one rack
    net = best.modelled(layout, hosts, 0, None)
    found = best.scored(ring, net, 1 << 20, orders=True)
    order = found[0].table.home
    crossings = sum((order[i] % 2) != (order[(i + 1) % 4] % 2) for i in range(4))
    assert crossings == 2
    start = next(c for c in found if c.start)
    assert start.seconds > 1.4 * found[0].seconds


def test_the_best_swap_takes_the_congested_host_out_of_the_middle():
    tree = build("dual_tree", Kind.ALL_REDUCE, 8)
    net = best.modelled(star(8, 2), [f"h{i}" for i in range(8)], 2, 3)
    found = best.scored(tree, net, 4 << 20, orders=False)
    start = next(c for c in found if c.start)
    assert start.seconds > 1.1 * found[0].seconds
    times = {id(c.table): 1.0 for c in found}
    times[id(found[1].table)] = 0.5
    taken, told = best.search(found, 3, lambda t: times[id(t)])
    assert taken is found[1]
    assert [one["what"] for one in told["tried"]] == [c.words for c in (*found[:3], start)]
    assert told["scored"] == len(found)


def test_all_orders_of_many_ranks_are_refused():
    with pytest.raises(UsageError, match="at most 8"):
        best.scored(
            build("ring", Kind.ALL_REDUCE, 9), best.modelled(star(9), [f"h{i}" for i in range(9)], 0, None), 64, True
        )
