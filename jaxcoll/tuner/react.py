"""REACT as the paper has it (sections 5.2 to 5.4, algorithm 1): `policy="react-paper"`.

It swaps ranks within the program in force; it never changes the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxcoll.schedule import Schedule, Table
from jaxcoll.telemetry import Epoch
from jaxcoll.tuner.collect import Collector
from jaxcoll.tuner.detect import Congestion, detect, rate_text
from jaxcoll.tuner.estimate import Estimator, Memory, remember
from jaxcoll.tuner.measure import Batch, Pattern, pattern_of
from jaxcoll.tuner.params import ReactParams
from jaxcoll.tuner.paths import critical_paths
from jaxcoll.tuner.transforms import Viable, graph_name, moved_edges, viable
from jaxcoll.tuner.types import Config, Decision, ScheduleSet, Verdict

Floats = npt.NDArray[np.float64]
Paths = list[tuple[npt.NDArray[np.int64], Floats]]


@dataclasses.dataclass(frozen=True, eq=False)
class ReactState:
    """All that the paper's loop knows between two calls."""

    spec: ScheduleSet
    params: ReactParams
    seed: int
    config: Config
    collector: Collector = dataclasses.field(default_factory=Collector)
    version: int = 0
    round: int = 0
    history: tuple[Memory, ...] = ()
    trial: tuple[Config, float] | None = None
    """What was in force before the last change, and the time of an epoch then."""
    verdict: Verdict | None = None
    """On the last move that was judged."""
    trials: int = 0
    """K_t, as it has grown."""
    fruitless: int = 0
    """Rounds that explored since something better was found."""
    idle: int = 0
    """Rounds since the last exploration."""
    attempts: int = 0
    """Explorations out of rest without success."""
    clear: int = 0
    """Batches in a row without congestion."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Node:
    """A vertex of the pattern with congested flows on a critical path."""

    graph: int
    step: int
    rank: int
    steady: bool
    flows: int
    edge: int


def init_react(spec: ScheduleSet, params: ReactParams | None = None, seed: int = 0) -> ReactState:
    """The state before the first epoch."""
    params = params or ReactParams()
    home = spec.home
    return ReactState(spec, params, seed, home, version=home.table.version, trials=params.K_t)


def step_react(state: ReactState, samples: Sequence[Epoch]) -> tuple[ReactState, Decision | None, str]:
    """Takes the epochs that have ended since; decides once a batch is full."""
    state = dataclasses.replace(state, collector=state.collector.add(samples, state.config))
    collector, batch = state.collector.batch(state.spec, state.config, state.params.B)
    if batch is None:
        return state, None, f"{len(state.collector.waiting)} of {state.params.B} epochs of the batch"
    history = remember(state.history, batch, collector.seen, state.params.H)
    state = dataclasses.replace(state, collector=collector, history=history, round=state.round + 1)
    return _decide(state, batch)


def _decide(state: ReactState, batch: Batch) -> tuple[ReactState, Decision | None, str]:
    params = state.params
    verdict = ""
    if state.trial is not None:
        before, seconds = state.trial
        paid = seconds >= (1 + params.tau_r) * batch.time
        judged = Verdict(state.config.table.version, batch.time / seconds, paid)
        state = dataclasses.replace(state, verdict=judged)
        if not paid:
            return _revert(state, before, f"the last move {judged.text()}; reverted")
        verdict = f"the last move {judged.text()}. "
        state = dataclasses.replace(state, trial=None, fruitless=0, attempts=0)
    congestion = detect(batch, params.delta1, params.delta2, state.spec.host_of)
    if not congestion:
        return _when_clear(state), None, verdict + "no flow is congested"
    state = dataclasses.replace(state, clear=0)
    if not _may_explore(state):
        why = f"{state.fruitless} rounds found nothing better; resting"
        return dataclasses.replace(state, idle=state.idle + 1), None, verdict + why
    return _explore(state, batch, congestion, verdict)


def _when_clear(state: ReactState) -> ReactState:
    """Forgets what was in vain once all has been well for long enough: congestion that flaps is still the same one."""
    state = dataclasses.replace(state, idle=state.idle + 1, clear=state.clear + 1)
    return dataclasses.replace(state, fruitless=0, attempts=0) if state.clear >= state.params.E_max else state


def _may_explore(state: ReactState) -> bool:
    """E_max rounds in a row, then one after each E_max rounds of rest, and A_max of those at most."""
    params = state.params
    if state.fruitless < params.E_max:
        return True
    return state.idle >= params.E_max and state.attempts < params.A_max


def _revert(state: ReactState, before: Config, why: str) -> tuple[ReactState, Decision, str]:
    state, decision = _move(state, before.table, "revert", why, 1.0)
    return dataclasses.replace(state, trial=None), decision, why


def _move(state: ReactState, table: Table, action: str, why: str, expected: float) -> tuple[ReactState, Decision]:
    version = state.version + 1
    config = Config(state.config.program, table.with_version(version))
    decision = Decision(state.spec.key, action, config.program, config.table, why, expected)
    collector = state.collector.cleared()
    return dataclasses.replace(state, config=config, version=version, collector=collector), decision


def _explore(
    state: ReactState, batch: Batch, congestion: Congestion, verdict: str
) -> tuple[ReactState, Decision | None, str]:
    params = state.params
    resting = state.fruitless >= params.E_max
    search = _Search(state, batch, congestion)
    table = search.run()
    state = dataclasses.replace(
        state,
        trials=state.trials + params.K_t_growth,
        fruitless=state.fruitless + 1,
        attempts=state.attempts + resting,
        idle=0,
    )
    if not search.done:
        tried = f"{search.tried} transforms tried, none is expected to gain {params.epsilon:.0%}"
        return state, None, f"{verdict}{search.cause}: {tried}"
    why = f"{search.cause}; {'; '.join(search.done)}; expected {search.expected:.2f}x"
    state, decision = _move(state, table, "swap", verdict + why, search.expected)
    before = Config(state.config.program, search.base)
    return dataclasses.replace(state, trial=(before, batch.time)), decision, verdict + why


class _Search:
    """Algorithm 1: congested nodes on critical paths, each with random viable swaps, until K_t tries or K_max hits."""

    def __init__(self, state: ReactState, batch: Batch, congestion: Congestion):
        self.state, self.batch, self.congestion = state, batch, congestion
        self.spec, self.params = state.spec, state.params
        self.schedule: Schedule = self.spec.by_id[state.config.program].schedule
        self.base = state.config.table
        self.table = state.config.table
        self.pattern: Pattern = batch.pattern
        self.estimator = Estimator(state.history, self.spec.nranks)
        self.paths: Paths = critical_paths(batch.pattern.plan, batch.fct)
        self.rng = np.random.default_rng([state.seed, state.round])
        self.tried = 0
        self.expected = 1.0
        self.done: list[str] = []
        self.fixed: set[int] = set()
        self.cause = "congested flows lie on no critical path"

    def run(self) -> Table:
        """The table after all accepted swaps."""
        settled: set[tuple[int, int, int]] = set()
        while self.tried < self.state.trials and len(self.done) < self.params.K_max:
            nodes = [n for n in self._nodes() if (n.graph, n.step, n.rank) not in settled]
            if not nodes:
                break
            node = nodes[0]
            settled.add((node.graph, node.step, node.rank))
            if self.cause.startswith("congested"):
                self.cause = self._cause(node)
            self._mend(node)
        return self.table

    def _nodes(self) -> list[_Node]:
        """Ends of congested flows on critical paths: steady ones first, then by the number of congested flows."""
        on_path = {int(edge) for path, _ in self.paths for edge in path}
        flows = self.pattern.plan
        touching: dict[tuple[int, int, int], list[int]] = {}
        for edge in np.flatnonzero(self.congestion.any).tolist():
            g, t = int(flows.graph[edge]), int(flows.step[edge])
            touching.setdefault((g, t, int(flows.src[edge])), []).append(edge)
            touching.setdefault((g, t + 1, int(flows.dst[edge])), []).append(edge)
        nodes: list[_Node] = []
        for (g, t, rank), edges in touching.items():
            if not on_path.intersection(edges):
                continue
            steady = self._steady(g, t, rank)
            nodes.append(_Node(g, t, rank, steady, len(edges), edges[0]))
        return sorted(nodes, key=lambda n: (not n.steady, -n.flows, n.graph, n.step, n.rank))

    def _steady(self, graph: int, step: int, rank: int) -> bool:
        """All flows into the vertex, or all out of it, are steady congested."""
        flows = self.pattern.plan
        here = (flows.graph == graph) & self.pattern.carries
        into = here & (flows.step == step - 1) & (flows.dst == rank)
        out = here & (flows.step == step) & (flows.src == rank)
        return any(bool(side.any() and self.congestion.steady[side].all()) for side in (into, out))

    def _mend(self, node: _Node) -> None:
        groups = viable(
            self.schedule, self.table, self.spec.nbytes, node.graph, node.step, node.rank, exclude=self.fixed
        )
        for group in groups:
            for index in self.rng.permutation(len(group)).tolist():
                if self.tried >= self.state.trials:
                    return
                self.tried += 1
                if self._accept(group[index]):
                    if node.steady:
                        # So that a later swap doesn't bring the congested rank back.
                        self.fixed.add(node.rank)
                    return

    def _accept(self, option: Viable) -> bool:
        """The epsilon check on the old critical paths, with the moved edges estimated anew."""
        after = pattern_of(self.schedule, option.table, self.spec.nbytes)
        moved = moved_edges(self.pattern, after)
        estimate = self.estimator.seconds(after)
        changed = [(path, np.where(moved[path], estimate[path], weight)) for path, weight in self.paths]
        old = float(np.mean([weight.sum() for _, weight in self.paths]))
        new = float(np.mean([weight.sum() for _, weight in changed]))
        if new <= 0 or old / new <= 1 + self.params.epsilon:
            return False
        self.table, self.pattern, self.paths = option.table, after, changed
        self.expected *= new / old
        self.done.append(option.swap.text(self.schedule))
        return True

    def _cause(self, node: _Node) -> str:
        flows, edge = self.batch.pattern.plan, node.edge
        kind = "steady" if self.congestion.steady[edge] else "erratic"
        where = f"edge {flows.src[edge]}->{flows.dst[edge]} of {graph_name(self.schedule, node.graph)}"
        p90, usual = (rate_text(float(values[edge])) for values in (self.congestion.p90, self.congestion.usual))
        return f"{where} {kind} congested: p90 {p90} against {usual}"
