"""The report: its numbers, its page, and a real browser's word on it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from needs import need

from jaxcoll import cli, report
from jaxcoll.errors import UsageError
from jaxcoll.report.figures import Line, heatmap, line_chart, ticks
from jaxcoll.report.page import page
from jaxcoll.report.run import SetRun, load
from jaxcoll.telemetry import concatenate
from loop.simulated import QUIET, Job

FIGURES = {"line": 3, "heat": 2, "pattern": 2}
"""Figures of a set, by kind: step time, collective time and distribution; maps and patterns before and after."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(run log, its page) of a simulated run."""
    folder = tmp_path_factory.mktemp("report")
    job = Job(folder / "run.jsonl")
    job.run(60)
    job.log.close()
    assert report.main([str(folder / "run.jsonl"), "-o", str(folder / "page.html"), "--title", "A <run> & more"]) == 0
    return folder / "run.jsonl", folder / "page.html"


class Page(HTMLParser):
    """Open tags must be closed in order; figures are counted; nothing may be fetched."""

    VOID = {"meta", "link", "br"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.figures: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "svg":
            self.figures.append((values.get("class") or "").removeprefix("figure "))
        if values.get("id"):
            self.ids.append(values["id"] or "")
        links = [values.get(name) or "" for name in ("src", "href")]
        self.outside += [link for link in links if link and not link.startswith(("#", "data:"))]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_holds_every_figure_and_needs_nothing_else(made: tuple[Path, Path]):
    text = made[1].read_text()
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.outside == []
    assert len(page.ids) == len(set(page.ids))
    assert {kind: page.figures.count(kind) for kind in set(page.figures)} == FIGURES
    assert "A &lt;run&gt; &amp; more" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ET.fromstring(svg)


def test_swaps_are_marked_and_congested_edges_red(made: tuple[Path, Path]):
    (run,) = load(made[0])
    text = made[1].read_text()
    assert len(run.swaps) >= 1
    assert text.count('class="mark"') == 2 * len(run.swaps)
    red, _ = run.congested(run.trigger())
    assert red
    assert text.count('stroke="#d00000" stroke-width="3"') >= len(red)
    edges = run.spec.by_id[run.spec.start].schedule.edges
    touching = sum(3 in (edges[i].src, edges[i].dst) for i in red)
    assert touching > len(red) / 2, "rank 3 has the strangers"


def test_swaps_and_reverts_are_counted_apart(made: tuple[Path, Path]):
    (run,) = load(made[0])
    swaps = len(run.swaps) - run.reverts
    back = replace(run.swaps[0], decision=replace(run.swaps[0].decision, action="revert"))
    run.made.append(back)
    text = page([run], "A run")
    assert f"{swaps} swap{'s' * (swaps != 1)} and {run.reverts} revert{'s' * (run.reverts != 1)} in " in text
    head, cells = re.findall(r"<tr>(.*?)</tr>", text)[:2]
    assert re.findall(r">([^<]+)</t", head)[-2:] == ["swaps", "reverts"]
    assert re.findall(r">([^<]+)</t", cells)[-2:] == [str(swaps), str(run.reverts)]


def test_a_run_without_swaps_is_not_said_to_have_one(tmp_path: Path):
    job = Job(tmp_path / "run.jsonl")
    job.run(6)
    job.log.close()
    report.write(tmp_path / "run.jsonl", tmp_path / "page.html")
    (run,) = load(tmp_path / "run.jsonl")
    assert run.swaps == []
    text = (tmp_path / "page.html").read_text()
    assert "0 swaps and 0 reverts in 6 epochs" in text
    assert text.count("no swap was made") == 3, "distribution, throughput and pattern"
    _, cells = re.findall(r"<tr>(.*?)</tr>", text)[:2]
    median = np.median([p.seconds for p in run.points]) * 1e3
    assert re.findall(r">([^<]*)</td", cells)[1:] == ["", f"{median:.2f} ms", "", "0", "0"]
    said = re.sub(r"<th.*?</th>", "", text).lower()
    assert "first swap" not in said


def test_before_after_and_measured_are_what_the_run_had(made: tuple[Path, Path]):
    (run,) = load(made[0])
    before, after = (np.median([p.seconds for p in points]) for points in (run.trigger(), run.after()))
    assert after < before / 1.3
    first = run.swaps[0]
    assert first.measured is not None
    assert first.measured < 0.9
    assert run.points[QUIET].start < first.at < run.points[-1].start
    start, step = run.steps()
    assert len(start) == len(run.points) - 1
    assert step.min() > 0


@pytest.fixture
def chromium(tmp_path: Path) -> list[str]:
    """The command of a headless browser that writes its console to stderr."""
    browser = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
    need(browser is not None, "Chromium", "CHROMIUM")
    assert browser is not None
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    return [
        *command,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
        "--window-size=1100,4000",
    ]


def test_an_error_in_the_console_is_seen(chromium: list[str], tmp_path: Path):
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html><title>bad</title><script>missing()</script>")
    dump = subprocess.run([*chromium, "--dump-dom", bad.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" in dump.stderr, "the next test would see nothing"


def test_in_a_real_browser(chromium: list[str], made: tuple[Path, Path], tmp_path: Path):
    shot, command = tmp_path / "page.png", chromium
    address = made[1].as_uri()
    dump = subprocess.run([*command, "--dump-dom", address], capture_output=True, text=True, timeout=120, check=True)
    page = Page()
    page.feed(dump.stdout)
    assert {kind: page.figures.count(kind) for kind in set(page.figures)} == FIGURES
    assert "CONSOLE" not in dump.stderr, dump.stderr
    subprocess.run([*command, f"--screenshot={shot}", address], capture_output=True, timeout=120, check=True)
    assert shot.stat().st_size > 20_000
    keep = os.environ.get("JAXCOLL_TEST_KEEP_SCREENSHOT")
    if keep:
        shutil.copy(shot, keep)


def test_the_records_as_trace_and_metrics(made: tuple[Path, Path], tmp_path: Path):
    trace, metrics, lines = (tmp_path / name for name in ("trace.json", "metrics.prom", "records.jsonl"))
    words = [str(made[0]), "-o", str(tmp_path / "p.html"), "--trace", str(trace), "--prometheus", str(metrics)]
    assert report.main([*words, "--records", str(lines)]) == 0
    (run,) = load(made[0])
    edges = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "edge"]
    assert len(edges) >= sum(len(p.epoch.records) for p in run.points)
    known = concatenate(p.epoch.records for p in run.points)
    said = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(said) == len(known)
    assert [one["transfer_ns"] for one in said] == known["transfer_ns"].tolist()
    text = metrics.read_text()
    assert 'coll="all_reduce"' in text
    assert report._merged([text, text]).count("# TYPE nccl_p2p_bus_bandwidth_gbs") == 1
    assert report._merged([text]) == text


def test_two_sets_that_run_alike_share_no_series(made: tuple[Path, Path], tmp_path: Path):
    log, metrics = tmp_path / "run.jsonl", tmp_path / "metrics.prom"
    lines = [json.loads(line) for line in made[0].read_text().splitlines()]
    # The same ranks, communicator and program, in another size class.
    lines += [{**line, "key": "all_reduce up to 16M"} for line in lines if "key" in line]
    log.write_text("\n".join(json.dumps(line) for line in lines))
    report.export(log, None, metrics, None)
    text = metrics.read_text().splitlines()
    series = [line.rpartition(" ")[0] for line in text if not line.startswith("#")]
    assert len(series) == len(set(series))
    names = {line.split()[2] for line in text if line.startswith("# TYPE")}
    keys = {line["key"] for line in lines if "key" in line}
    assert len(keys) == 2
    assert all(any(s.startswith(f'{name}{{set="{key}",') for s in series) for name in names for key in keys)


def test_epochs_before_a_swap_are_not_those_after_it(made: tuple[Path, Path]):
    (run,) = load(made[0])
    # A second part, that starts on a later table, and ends before an epoch has run under its swap's.
    start, *_ = (p.config.table for p in run.points)
    early = [replace(p, config=replace(p.config, table=replace(start, version=3))) for p in run.before()]
    swap = replace(run.swaps[0], decision=replace(run.swaps[0].decision, table=replace(start, version=4)))
    assert SetRun(run.key, run.spec, run.policy, early, [swap]).after() == []


def test_a_log_without_epochs_is_refused(tmp_path: Path):
    log = tmp_path / "run.jsonl"
    log.write_text('{"type":"run","format":1}\n')
    with pytest.raises(UsageError, match="holds no epochs"):
        report.write(log, tmp_path / "page.html")
    with pytest.raises(UsageError, match="can't be read"):
        report.write(tmp_path / "none.jsonl", tmp_path / "page.html")


@pytest.mark.parametrize("folder", [".", "..", "/"])
def test_a_folder_is_no_run_log(folder: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["report", folder]) == 2
    assert f"{folder} is a folder; name the run log" in capsys.readouterr().err


def test_ticks_are_round_and_cover():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 0.37) == [0, 0.1, 0.2, 0.3]
    assert ticks(3, 3) == [3]


def test_charts_without_data_are_still_charts():
    ET.fromstring(line_chart([], title="t", xlabel="x", ylabel="y"))
    ET.fromstring(line_chart([Line("one", np.array([1.0]), np.array([0.0]))], title="t", xlabel="x", ylabel="y"))
    # One odd value doesn't press the rest flat; it is told.
    steps = Line("step", np.arange(20.0), np.array([1400.0, *[100.0] * 19]))
    assert "1 above, up to 1,400" in line_chart([steps], title="t", xlabel="x", ylabel="y")
    ET.fromstring(heatmap(np.full((2, 2), np.nan), title="t", unit="MB/s", top=1.0))
