"""Tables in force: results under every valid swap, and swaps while operations run, under delays of every kind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from jaxcoll.runtime.native import NativeError
from jaxcoll.schedule import Chunk, ChunkGraph, Collective, Edge, Kind, Op, Schedule, Table, build, interpret, valid

from . import cases
from .harness import TRANSPORTS, Cluster, Place, on_threads

pytestmark = pytest.mark.timeout(90)


def random_tables(schedule: Schedule, rng: random.Random, count: int) -> Iterator[Table]:
    """Valid tables some swaps away from the identity: global ones, of one graph, of one vertex row."""
    n, table = schedule.nranks, Table.identity(schedule)
    for _ in range(count):
        for _ in range(40):
            a, b = rng.sample(range(n), 2)
            how, g = rng.random(), rng.randrange(len(schedule.graphs))
            step = rng.randrange(schedule.steps + 1)
            if how < 0.3:
                other = table.swap_global(a, b)
            elif how < 0.6:
                other = table.swap_graph(g, a, b)
            else:
                other = table.swap_vertex(g, step, a, b)
            if valid(schedule, other):
                table = other
                break
        yield table


def tabled(n: int) -> list[Schedule]:
    names = [("ring", Kind.ALL_REDUCE), ("dual_tree", Kind.ALL_REDUCE), ("halving_doubling", Kind.ALL_REDUCE),
             ("recursive_doubling", Kind.ALL_REDUCE), ("one_shot", Kind.ALL_REDUCE), ("direct", Kind.ALL_REDUCE),
             ("ring", Kind.ALL_GATHER), ("recursive_doubling", Kind.ALL_GATHER), ("ring", Kind.REDUCE_SCATTER),
             ("binomial", Kind.REDUCE), ("binomial", Kind.BROADCAST), ("pairwise", Kind.ALL_TO_ALL)]  # fmt: skip
    return [build(name, kind, n, **({"root": n - 1} if kind.rooted else {})) for name, kind in names]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_tables(transport: str, dtype: str):
    n, rng, changed = 5, random.Random(f"{transport} {dtype}"), 0
    with Cluster(transport, n, lane_bytes=256) as cluster:
        for schedule in tabled(n):
            case = cases.Case(schedule, 77, dtype, "sum")
            inputs = cases.inputs_for(case)
            for table in random_tables(schedule, rng, 3):
                changed += table != Table.identity(schedule)
                key = cluster.define([schedule])
                cluster.put_in_force(key, table)
                results = cluster.run(schedule, inputs, key=key)
                wrong = cases.compare(case, results, tuple(interpret(schedule, inputs, table=table)))
                assert not wrong, f"{table.home} {table.vertex.tolist()}: " + "\n".join(wrong)
    assert changed > 20


@pytest.mark.parametrize("transport", ["inproc", "fake", "fake-push"])
def test_canonical_order_goes_by_the_vertex(transport: str):
    # Pairs 05, 12, 34 exchange, then each gets the sums of the two other pairs. With ranks 0 and 5 exchanged at the end
    # both put their own value where they stand now, not where they stood when they sent it: the sum has another order.
    pairs = [(0, 5), (1, 2), (3, 4)]
    edges = [Edge(0, a, b, Op.REDUCE, (0,)) for p in pairs for a, b in (p, p[::-1])]
    crossing = [(1, 0), (3, 0), (2, 5), (4, 5), (0, 1), (3, 1), (5, 2), (4, 2), (0, 3), (1, 3), (5, 4), (2, 4)]
    edges += [Edge(1, a, b, Op.REDUCE, (0,)) for a, b in crossing]
    schedule = Schedule(
        "pairs", Collective(Kind.ALL_REDUCE, 6), 2, (Chunk(None, None),), (ChunkGraph(tuple(edges)),), canonical=True
    )
    table = Table.identity(schedule).swap_vertex(0, 2, 0, 5)
    assert valid(schedule, table)
    case = cases.Case(schedule, 200, "float32", "sum")
    inputs = cases.inputs_for(case)
    want = tuple(interpret(schedule, inputs, table=table))
    assert not cases.same(want[5], interpret(schedule, inputs)[5])
    with Cluster(transport, 6) as cluster:
        key = cluster.define([schedule])
        cluster.put_in_force(key, table)
        assert not cases.compare(case, cluster.run(schedule, inputs, key=key), want)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("transport", ["fake", "fake-push", "inproc"])
def test_a_copy_over_a_value_that_nobody_reads(transport: str, seed: int):
    # Rank 1 makes a partial sum that is never sent, and then gets the result of rank 0 over it: in this order only.
    edges = (Edge(0, 0, 1, Op.REDUCE, (0,)), Edge(0, 1, 0, Op.REDUCE, (0,)), Edge(0, 2, 0, Op.REDUCE, (0,)),
             Edge(1, 0, 1, Op.COPY, (0,)), Edge(1, 0, 2, Op.COPY, (0,)))  # fmt: skip
    schedule = Schedule(
        "overwrite", Collective(Kind.ALL_REDUCE, 3), 2, (Chunk(None, None),), (ChunkGraph(edges),), pipeline=3
    )
    assert valid(schedule)
    with Cluster(transport, 3, seed=seed) as cluster:
        for _ in range(10):
            results = cluster.run(schedule, [np.full(100, 10**r, np.int32) for r in range(3)])
            assert all((r == 111).all() for r in results)


# ---------------------------------------------------------------- protocol


def small_set(cluster: Cluster) -> tuple[int, Schedule]:
    schedule = build("ring", Kind.ALL_REDUCE, cluster.ranks)
    return cluster.define([schedule]), schedule


def test_staging_is_checked():
    with Cluster("inproc", 3) as cluster:
        key, schedule = small_set(cluster)
        other = cluster.load(0, build("ring", Kind.ALL_GATHER, 3))
        mine = cluster.load(0, schedule)
        with pytest.raises(NativeError, match="doesn't compute this set's collective"):
            cluster.stage(0, key, 1, other, None)
        with pytest.raises(NativeError, match="no such program"):
            cluster.stage(0, key, 1, 77, None)
        swaps = [Table.identity(schedule).swap_vertex(g, t, 0, 1) for g in range(3) for t in range(schedule.steps + 1)]
        broken = next(table for table in swaps if not valid(schedule, table))
        with pytest.raises(NativeError, match="program ring"):
            cluster.stage(0, key, 1, mine, broken)
        with pytest.raises(NativeError, match="not staged"):
            cluster.propose(0, key, 1, [])
        cluster.put_in_force(key, None, version=5)
        with pytest.raises(NativeError, match="not newer than 5"):
            cluster.stage(0, key, 5, mine, None)
        with pytest.raises(NativeError, match="has not used"):
            cluster.stage(0, key + 1000, 6, mine, None)
        assert cluster.native.lib.jc_set_version(cluster.worlds[0], cluster.group(), key) == 5


def test_a_proposal_in_the_past_is_refused():
    with Cluster("inproc", 2) as cluster:
        key, schedule = small_set(cluster)
        cluster.stage(0, key, 1, cluster.load(0, schedule), None)
        value = [np.ones(4, np.int32)] * 2
        for _ in range(3):
            cluster.run(schedule, value, key=key, site=7)
        ((site, launch, index),) = cluster.started(0, key)
        assert site == 7
        far = launch + (1 << 40)  # of another executable
        for points in ([(7, launch, index)], [], [(8, launch + 5, 0)], [(7, far, 0)]):
            with pytest.raises(NativeError, match="gone past"):
                cluster.propose(0, key, 1, points)
        cluster.propose(0, key, 1, [(7, launch, index + 1), (7, far, 0)])
        with pytest.raises(NativeError, match="another table waits"):
            cluster.propose(0, key, 1, [(7, launch + 9, 0)])
        cluster.decide(0, key, 1, commit=False)
        with pytest.raises(NativeError, match="not proposed"):
            cluster.decide(0, key, 1, commit=False)


def test_a_launch_that_goes_on_for_long_keeps_count():
    # It loops, while many others of its call site begin and end.
    long, value = 1 << 40, np.ones(1, np.float32)
    with Cluster("inproc", 2) as cluster:
        key = cluster.define([build("one_shot", Kind.ALL_REDUCE, 2)])
        for turn in range(12):
            for launch in (long, *range(100 * turn, 100 * turn + 100)):
                ops = [cluster.start(r, Kind.ALL_REDUCE, value, key, launch=launch) for r in range(2)]
                cluster.finish(ops)
                for op in ops:
                    op.free()
        assert (1, long, 11) in cluster.started(0, key)


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp", "mixed", "fake"])
def test_executions_wait_for_the_verdict(transport: str, commit: bool):
    n = 4
    with Cluster(transport, n) as cluster:
        key, schedule = small_set(cluster)
        lib, group = cluster.native.lib, cluster.group()
        values = [np.full(50, r + 1, np.int32) for r in range(n)]
        cluster.run(schedule, values, key=key)
        for w in range(len(cluster.worlds)):
            cluster.stage(w, key, 1, cluster.load(w, schedule), Table.identity(schedule).swap_global(0, 1))
            ((site, launch, index),) = cluster.started(w, key)
            cluster.propose(w, key, 1, [(site, launch + 2, index)])
        cluster.run(schedule, values, key=key)  # before the point: goes on
        launch = cluster.new_launch()
        ops = [cluster.start(r, Kind.ALL_REDUCE, values[r], key, launch=launch) for r in range(n)]
        assert not any(op.wait(0.02) for op in ops)
        assert sum(lib.jc_set_waiting(w, group, key) for w in cluster.worlds) == n
        for w in range(len(cluster.worlds)):
            cluster.decide(w, key, 1, commit)
        cluster.finish(ops)
        assert all((op.result() == 10).all() for op in ops)
        assert {lib.jc_set_version(w, group, key) for w in cluster.worlds} == {int(commit)}
        assert sum(lib.jc_set_waiting(w, group, key) for w in cluster.worlds) == 0
        assert all(0 < lib.jc_set_held(w, group, key) < 1e9 for w in cluster.worlds)
        assert lib.jc_set_held(cluster.worlds[0], group, key + 99) == 0  # no such set


# ---------------------------------------------------------------- under load


@lru_cache
def pool(n: int) -> list[tuple[int, bytes, Table]]:
    """(program, bytes, table): what is swapped in, under two programs."""
    rng = random.Random(n)
    made = []
    for program, name in enumerate(("ring", "recursive_doubling")):
        schedule = build(name, Kind.ALL_REDUCE, n)
        for table in random_tables(schedule, rng, 8):
            made.append((program, table.to_bytes(), table))
    return made


class Ranks:
    """Every rank executes two calls launch by launch, and the first of them in another executable, at its own pace."""

    CALLS = ((11, 0), (12, 0), (11, -7 << 40))  # (site, what the launches of its executable are counted from)

    def __init__(self, cluster: Cluster, key: int):
        self.cluster, self.key, n = cluster, key, cluster.ranks
        rng = np.random.default_rng(1)
        self.values = rng.integers(-1000, 1000, (n, 5)).astype(np.int32)
        self.total = self.values.sum(axis=0, dtype=np.int32)
        self.next = [0] * n  # executions begun
        self.open: list[list[Any]] = [[] for _ in range(n)]
        self.ended = [0] * n

    def begin(self, rank: int) -> None:
        launch, call = divmod(self.next[rank], len(self.CALLS))
        site, base = self.CALLS[call]
        op = self.cluster.start(rank, Kind.ALL_REDUCE, self.values[rank], self.key, launch=base + launch + 1, site=site)
        self.open[rank].append(op)
        self.next[rank] += 1

    def reap(self, rank: int, timeout: float = 0.0) -> None:
        """Frees what is over; NativeError if ranks ran an execution under different tables."""
        while self.open[rank] and self.open[rank][0].wait(timeout):
            op = self.open[rank].pop(0)
            assert np.array_equal(op.result(), self.total), "a wrong sum"
            op.free()
            self.ended[rank] += 1


class Leader:
    """Brings one table after the other into force: stage, propose, decide, on each world at another moment."""

    def __init__(self, cluster: Cluster, key: int, rng: random.Random):
        self.cluster, self.key, self.rng, self.version = cluster, key, rng, 0
        self.pool, self.committed, self.refused = pool(cluster.ranks), 0, 0
        self.todo: list[tuple[str, int]] = []
        self.worlds = range(len(cluster.worlds))
        self.agreed: list[int] = []
        self.points: list[Place] | None = None

    def step(self) -> None:
        """One action on one world."""
        if not self.todo:
            self._plan()
        what, world = self.todo.pop(0)
        if what == "stage":
            program, blob, _ = self.chosen
            native = self.cluster.native
            native.check(native.lib.jc_set_stage(
                self.cluster.worlds[world], self.cluster.group(), self.key, self.version, program, native.buffer(blob),
                len(blob),
            ))  # fmt: skip
        elif what == "propose":
            if self.points is None:  # the same on every world
                self.points = self._points()
            try:
                self.cluster.propose(world, self.key, self.version, self.points)
                self.agreed.append(world)
            except NativeError:
                self.todo = [t for t in self.todo if t[0] != "propose"]
            if not any(t[0] == "propose" for t in self.todo):
                commit = len(self.agreed) == len(self.worlds)
                self.committed += commit
                self.refused += not commit
                name = "commit" if commit else "forget"
                self.todo = [(name, w) for w in self.rng.sample(self.agreed, len(self.agreed))]
        else:
            self.cluster.decide(world, self.key, self.version, commit=what == "commit")

    def _plan(self) -> None:
        self.version += 1
        self.chosen = self.rng.choice(self.pool)
        self.points, self.agreed = None, []
        order = list(self.worlds)
        self.todo = [(what, w) for what in ("stage", "propose") for w in self.rng.sample(order, len(order))]

    def _points(self) -> list[Place]:
        points: dict[tuple[int, bool], Place] = {}
        for world in self.worlds:
            for place in self.cluster.started(world, self.key):
                call = place[0], place[1] < 0
                points[call] = max(points.get(call, place), place)
        margin = self.rng.choice((0, 0, 1, 2, 5))
        return [(site, launch + margin, index + 1) for site, launch, index in points.values()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["fake", "fake-push"])
def test_ten_thousand_swaps_under_random_delays(transport: str, request: pytest.FixtureRequest):
    # One thread, one seed: messages, tasks, calls and the leader's actions in a random order. No rank may ever run an
    # execution under another table than its peers: signatures would disagree, or sums be wrong.
    swaps = 10_000 if transport == "fake" or request.config.getoption("--full") else 1000
    n, rng = 3, random.Random(20)
    with Cluster(transport, n, seed=21) as cluster:
        key = cluster.define([build(s, Kind.ALL_REDUCE, n) for s in ("ring", "recursive_doubling")])
        ranks, leader = Ranks(cluster, key), Leader(cluster, key, rng)
        lib, net, worlds = cluster.native.lib, cluster.fake, cluster.worlds
        while leader.committed + leader.refused < swaps:
            act = rng.random()
            if act < 0.5:
                leader.step()
            elif act < 0.65:
                rank = rng.randrange(n)
                if ranks.next[rank] - min(ranks.ended) < 8:
                    ranks.begin(rank)
            else:
                for _ in range(rng.randrange(1, 8)):
                    lib.jc_fake_step(net)
                rank = rng.randrange(n)
                lib.jc_world_pump(worlds[rank])
                ranks.reap(rank)
        while leader.todo:
            leader.step()
        cluster.settle(lambda: False)
        for rank in range(n):
            ranks.reap(rank)
            while ranks.next[rank] < max(ranks.next):
                ranks.begin(rank)
        cluster.settle(lambda: False)
        for rank in range(n):
            ranks.reap(rank)
        assert ranks.ended == ranks.next
        assert leader.committed > swaps / 4
        assert leader.refused > swaps / 100
        assert min(ranks.ended) > swaps / 4


@pytest.mark.parametrize("transport", ["inproc", "shm", "shm-ring", "tcp", "mixed"])
def test_swaps_under_threads(transport: str):
    swaps, n, rng = 200, 4, random.Random(31)
    with Cluster(transport, n, spin=0.0002) as cluster:
        key = cluster.define([build(s, Kind.ALL_REDUCE, n) for s in ("ring", "recursive_doubling")])
        ranks, leader = Ranks(cluster, key), Leader(cluster, key, rng)
        over = threading.Event()
        last: list[int] = []

        def work(rank: int) -> None:
            pause = random.Random(rank)
            while not over.is_set() or ranks.next[rank] < last[0]:
                if ranks.next[rank] - ranks.ended[rank] < 6:
                    ranks.begin(rank)
                if pause.random() < 0.05:
                    time.sleep(0.001)
                ranks.reap(rank)
            while ranks.open[rank]:
                ranks.reap(rank, 20)

        def lead() -> None:
            try:
                while leader.committed + leader.refused < swaps or leader.todo:
                    leader.step()
                    time.sleep(rng.choice((0, 0.0003)))
            finally:
                last.append(max(ranks.next) + 16)  # a round number beyond what anybody has begun
                over.set()

        on_threads([lead, *(lambda r=r: work(r) for r in range(n))])
        assert len(set(ranks.ended)) == 1
        assert leader.committed > swaps / 8, (leader.committed, leader.refused)
        assert min(ranks.ended) > swaps / 4
