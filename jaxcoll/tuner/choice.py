"""Scores every (schedule, table) of a set on the capacity model, and looks for better tables by swaps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxcoll.sim.fluid import Job, simulate
from jaxcoll.sim.network import Network
from jaxcoll.sim.plan import Plan
from jaxcoll.tuner.fit import Belief
from jaxcoll.tuner.groups import Pairs
from jaxcoll.tuner.measure import pattern_of
from jaxcoll.tuner.model import Model, SlowPair
from jaxcoll.tuner.params import ChoiceParams
from jaxcoll.tuner.transforms import Swap, is_valid, swapped
from jaxcoll.tuner.types import Config, Program, ScheduleSet

Floats = npt.NDArray[np.float64]

_HEAVY = 200_000
"""Edges simulated side by side; more would only fill the memory."""
_DRAWS = 3
"""Networks drawn for a model whose slow pairs say that others may be slow, too."""
_WORK = 60_000
"""Edges simulated for one decision, over all candidates: keeps a decision for many ranks within seconds."""


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A program under a table, the swaps that made the table out of a known one, and the modelled time, seconds."""

    config: Config
    swaps: tuple[Swap, ...]
    seconds: float

    def text(self, spec: ScheduleSet, current: Config) -> str:
        """What would be done, for a decision's reason."""
        program = spec.by_id[self.config.program]
        parts = [swap.text(program.schedule) for swap in self.swaps]
        if program.id != current.program:
            parts.insert(0, f"took {program.name} instead of {spec.by_id[current.program].name}")
        return "; ".join(parts) or "took back an earlier table"


class Scorer:
    """Modelled times under a belief; each configuration is simulated once on every network that it holds possible.

    crossed: the pairs of ranks that the belief has seen a flow of. rng: draws what the others may be like.
    """

    def __init__(
        self, spec: ScheduleSet, belief: Belief, crossed: Pairs, params: ChoiceParams, rng: np.random.Generator
    ):
        self._spec = spec
        self._networks: list[Network] = []
        weights: list[float] = []
        for fit, weight in zip(belief.fits, belief.weights, strict=True):
            models = drawn(fit.model, spec.host_of, crossed, rng)
            self._networks += [model.network(spec.host_of, params.alpha) for model in models]
            weights += [weight / len(models)] * len(models)
        self._weights = np.asarray(weights)
        self._known: dict[tuple[int, bytes, bytes], float] = {}
        self._simulations = params.simulations
        self.spent = 0
        self._edges = 0

    def left(self, program: Program) -> int:
        """How many tables of `program` may still be simulated."""
        each = max(1, len(program.schedule.edges))
        return max(0, min(self._simulations - self.spent, (_WORK - self._edges) // (each * len(self._networks))))

    def seconds(self, configs: Sequence[Config]) -> list[float]:
        """Modelled time of an epoch under each configuration, the mean over what the belief holds possible."""
        new = list({c.key: c for c in configs if c.key not in self._known}.values())
        jobs = [Job(self._plan(c), network) for c in new for network in self._networks]
        totals = [r.total for part in _parts(jobs) for r in simulate(part, timed=False)]
        for i, config in enumerate(new):
            times = np.array(totals[i * len(self._networks) : (i + 1) * len(self._networks)])
            self._known[config.key] = float(times @ self._weights)
            self._edges += sum(
                len(job.plan.src) for job in jobs[i * len(self._networks) : (i + 1) * len(self._networks)]
            )
        self.spent += len(new)
        return [self._known[c.key] for c in configs]

    def _plan(self, config: Config) -> Plan:
        schedule = self._spec.by_id[config.program].schedule
        return pattern_of(schedule, config.table, self._spec.nbytes).plan


def drawn(model: Model, host_of: Sequence[int], crossed: Pairs, rng: np.random.Generator) -> list[Model]:
    """The model; where some pairs are slow, with pairs of which nothing is known as likely to be slow as those seen.

    Else the best of many tables is one whose pairs are unknown: held to be fast, for nothing has shown otherwise.
    """
    n, between = len(host_of), [p for p in model.pairs if host_of[p.src] != host_of[p.dst]]
    slow = {(p.src, p.dst) for p in between}
    seen = slow | {(a, b) for a, b in crossed if host_of[a] != host_of[b]}
    unseen = [(a, b) for a in range(n) for b in range(n) if host_of[a] != host_of[b] and (a, b) not in seen]
    if not slow or not unseen:
        return [model]
    rates = [p.rate for p in between]
    models: list[Model] = []
    for _ in range(_DRAWS):
        hit = rng.random(len(unseen)) < len(slow) / len(seen)
        drawn = rng.choice(rates, len(unseen))
        more = [SlowPair(a, b, float(r)) for (a, b), bad, r in zip(unseen, hit, drawn, strict=True) if bad]
        models.append(dataclasses.replace(model, pairs=(*model.pairs, *more)))
    return models


def _parts(jobs: Sequence[Job]) -> list[list[Job]]:
    parts: list[list[Job]] = []
    size = _HEAVY
    for job in jobs:
        if size + len(job.plan.src) > _HEAVY:
            parts.append([])
            size = 0
        parts[-1].append(job)
        size += len(job.plan.src)
    return parts


def search(
    spec: ScheduleSet,
    belief: Belief,
    crossed: Pairs,
    current: Config,
    others: Sequence[Config],
    params: ChoiceParams,
    rng: np.random.Generator,
) -> tuple[float, list[Candidate]]:
    """(modelled time of `current`, candidates with the best first). crossed, rng: see `Scorer`.

    Begins with every program as it starts and with its ranks put in the order of the groups that the belief knows, with
    `current` and with `others`; the three most promising programs, and the current one, are bettered by swaps of the
    ranks that the model blames.
    """
    scorer = Scorer(spec, belief, crossed, params, rng)
    pool: list[tuple[Config, tuple[Swap, ...]]] = [(config, ()) for config in (current, spec.home, *others)]
    pool += [(Config(p.id, p.identity), ()) for p in spec.programs]
    groupings = dict.fromkeys(f.model.groups.labels for f in belief.fits if f.model.groups is not None)
    ordered = [(p, *_in_groups(p, labels)) for labels in groupings for p in spec.programs]
    pool += [(config, swaps) for p, config, swaps in ordered if is_valid(p.schedule, config.table)]
    times = scorer.seconds([config for config, _ in pool])
    now = times[0]
    starts: dict[int, Candidate] = {}
    for (config, swaps), seconds in zip(pool, times, strict=True):
        best = starts.get(config.program)
        if best is None or seconds < best.seconds * (1 - 1e-6):
            starts[config.program] = Candidate(config, swaps, seconds)
    hot = belief.best.model.hot_ranks(spec.host_of)
    found = list(starts.values())
    ranked = sorted(found, key=lambda c: c.seconds)[:3]
    mine = starts[current.program]
    for start in ranked if mine in ranked else [*ranked, mine]:
        found.append(_climb(spec, scorer, start, hot, params, rng))
    return now, sorted(found, key=lambda c: (c.seconds, len(c.swaps), c.config.program))


def _in_groups(program: Program, labels: Sequence[int]) -> tuple[Config, tuple[Swap, ...]]:
    """The program with the ranks of a group side by side, and the swaps that put them there.

    Swap by swap the way may lead over tables that are no better: a ring whose racks take turns in pairs crosses the
    link between them four times, and as often after any one swap.
    """
    table, swaps, at = program.identity, list[Swap](), list(range(len(labels)))
    for place, rank in enumerate(sorted(at, key=lambda r: (labels[r], r))):
        other = at[place]
        if other != rank:
            swaps.append(Swap(None, None, other, rank))
            table = swaps[-1].apply(table)
            at[at.index(rank)], at[place] = other, rank
    return Config(program.id, table), tuple(swaps)


def _climb(
    spec: ScheduleSet,
    scorer: Scorer,
    start: Candidate,
    hot: Sequence[int],
    params: ChoiceParams,
    rng: np.random.Generator,
) -> Candidate:
    """The best table reached by taking the best swap, a few times over."""
    program = spec.by_id[start.config.program]
    best = start
    for _ in range(params.rounds if hot else 0):
        near = _neighbours(program, best.config, hot, scorer.left(program) // 2, rng)
        if not near:
            break
        times = scorer.seconds([config for _, config in near])
        i = int(np.argmin(times))
        if times[i] > best.seconds * 0.99:
            break
        swap, config = near[i]
        best = Candidate(config, (*best.swaps, swap), times[i])
    return best


def _neighbours(
    program: Program, config: Config, hot: Sequence[int], limit: int, rng: np.random.Generator
) -> list[tuple[Swap, Config]]:
    """Valid swaps with a blamed rank, as many as fit: global ones first, then chunk-local, then position-equivalent."""
    schedule, n = program.schedule, program.schedule.nranks
    pairs = sorted({(min(a, b), max(a, b)) for a in hot for b in range(n) if a != b})
    graphs = range(len(schedule.graphs)) if len(schedule.graphs) > 1 else range(0)
    everywhere = [Swap(None, None, a, b) for a, b in pairs]
    local = [Swap(g, None, a, b) for g in graphs for a, b in pairs]
    vertex = [
        Swap(g, t, a, b) for g in range(len(schedule.graphs)) for t in range(schedule.steps + 1) for a, b in pairs
    ]
    chosen: list[tuple[Swap, Config]] = []
    for kind in (everywhere, local, vertex):
        room = limit - len(chosen)
        order = rng.permutation(len(kind))[: 4 * max(room, 0)]
        for index in order.tolist():
            if len(chosen) >= limit:
                break
            after = swapped(schedule, config.table, kind[index])
            if after is not None:
                chosen.append((kind[index], Config(program.id, after)))
    return chosen
