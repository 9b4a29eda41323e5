"""The flow model in the library against the one in numpy, and what it does with arguments that it can't take."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxcoll import flowlib
from jaxcoll.schedule import Kind, Table, build
from jaxcoll.sim import Job, Network, native, plan, racks, simulate, spines, star
from tests.sim.conftest import Choose

GBIT = 125e6
SCHEDULES = [
    ("dual_tree", {"pipeline": 4}),
    ("ring", {}),
    ("direct", {"pipeline": 8}),
    ("recursive_doubling", {}),
    ("halving_doubling", {}),
]


def networks(n: int, rng: np.random.Generator) -> list[Network]:
    quiet = star(n, GBIT, alpha=float(rng.choice([0.0, 1e-4])))
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    found = [
        quiet.congest(int(rng.integers(n)), int(rng.integers(1, 4))),
        quiet.congest(int(rng.integers(n)), 2, "outgoing", cap=0.2 * GBIT).slow(int(rng.integers(n)), "incoming", 0.3),
        racks(halves, GBIT, GBIT / 2),
        spines(halves, GBIT, GBIT / 4, count=3),
    ]
    return [dataclasses.replace(net, connection=str(rng.choice(["pair", "edge"]))) for net in found]


def jobs(seed: int) -> list[Job]:
    rng = np.random.default_rng(seed)
    out: list[Job] = []
    for name, kw in SCHEDULES:
        n = int(rng.choice([4, 6, 8]) if name not in ("recursive_doubling", "halving_doubling") else 8)
        schedule = build(name, Kind.ALL_REDUCE, n, **kw)
        for network in networks(n, rng):
            table = Table.identity(schedule).swap_graph(0, *map(int, rng.choice(n, 2, replace=False)))
            rows = plan(schedule, table, int(rng.integers(n, 4_000_000)))
            arrive = rng.uniform(0, 0.05, n) if rng.random() < 0.5 else None
            out.append(Job(rows, network, arrive, rng.integers(0, 3, len(rows.src))))
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("timed", [True, False])
def test_both_engines_give_the_same_times(seed: int, timed: bool, choose: Choose) -> None:
    choose("native")
    fast = simulate(jobs(seed), timed)
    choose("numpy")
    for quick, slow in zip(fast, simulate(jobs(seed), timed), strict=True):
        for field in ("ready", "start", "end", "busy"):
            np.testing.assert_allclose(getattr(quick, field), getattr(slow, field), rtol=1e-9, err_msg=f"seed {seed}")
        assert quick.total == pytest.approx(slow.total, rel=1e-9)


def fields(**other: object) -> dict[str, object]:
    """One edge over one link."""
    one, zero = np.ones(1), np.zeros(1)
    found: dict[str, object] = {
        "jobs": 1, "hops": 1, "timed": 1, "edge_start": [0, 1], "dep_start": [0, 0], "stranger_start": [0, 0],
        "resource_start": [0, 1], "path": [0], "capacity": one, "lag": one, "size": one, "alpha": zero, "gate": zero,
        "connection": [0], "child": [], "parent": [], "stranger_weight": [], "stranger_cap": [],
        "ready": np.zeros(1), "start": np.zeros(1), "end": np.zeros(1), "busy": np.zeros(1),
    }  # fmt: skip
    return found | other


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ({}, 0),
        ({"path": [-1]}, -1),  # below its resources; what lies above them is no limit
        ({"dep_start": [0, 1], "child": [0], "parent": [1]}, -1),
        ({"dep_start": [0, 1], "child": [-1], "parent": [0]}, -1),
        ({"edge_start": [1, 0]}, -1),
        ({"resource_start": [0, -1]}, -1),
        ({"hops": 0}, -1),
        ({"dep_start": [0, 1], "child": [0], "parent": [0]}, 1),  # waits for itself
        ({"path": [1]}, 1),  # nothing limits it
        ({"capacity": np.zeros(1)}, 1),
    ],
)
def test_arguments_that_make_no_sense_are_refused(bad: dict[str, object], status: int, choose: Choose) -> None:
    choose("native")
    assert native.run(**fields(**bad)) == status


def test_a_library_that_can_t_be_used_is_told(
    tmp_path: Path, choose: Choose, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose("numpy")
    broken = tmp_path / "libjaxcoll.so"
    broken.write_bytes(b"no library")
    monkeypatch.setenv(flowlib.OVERRIDE, str(broken))
    flowlib.load.cache_clear()
    with caplog.at_level("WARNING", "jaxcoll"):
        assert simulate(jobs(0)[:1])[0].total > 0
    assert "Python does it slower" in caplog.text
    assert str(broken) in caplog.text
