"""Fits the capacity model to a batch: simulate what is in force under a guess, compare each edge, better the guess."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from jaxcoll.sim.fluid import Job, Result, simulate
from jaxcoll.tuner.groups import Labels, Pairs, boundary, groupings, halves
from jaxcoll.tuner.measure import Batch
from jaxcoll.tuner.model import Groups, Model, Side, SideKey, SlowPair
from jaxcoll.tuner.params import ChoiceParams
from jaxcoll.tuner.paths import critical_path

Floats = npt.NDArray[np.float64]

_COST = 0.15
"""What an assumption must explain at least: this mean deviation at one side of a host."""
_NATS = 5.5
"""What an assumption takes to be written down: which of some 50 pairs, sides or groupings, and how much of it."""
_STEP = 0.03
"""Least gain of the score for which the fit goes on."""
_LIKELY = 0.12
"""Models whose score is worse by no more than a few times this are kept as alternatives."""
_WORK = 16_000
"""Edges simulated for one fit, over all models: what is found until then has to do."""
_TOTAL = 2.0
_SLACK = 0.05
_BUBBLES = 0.5
"""By how much (log) an epoch may take longer than modelled at no cost: lanes are discrete, and a wire has pauses that
no model has (a quiet dual tree took 1.5 times as long). To explain that, things were assumed that weren't there."""
_SLOW = 0.2
_CLEAR = 0.5
"""A deviation so far from the boundary between fast and slow counts no more than this one."""
_FAST = 0.1
_RATES = (0.5, 0.65, 0.8, 1.2)
_UPLINKS = (1.0, 1.5, 2.0, 3.0, 4.0)
"""How many times a slow flow's rate a link may carry: other flows cross it at the same time."""

_REGROUPED = (0.7, 1.0, 1.4, 2.0)
"""By what a link's rate may change when groups are joined or parted: more or fewer flows cross it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """A model and how well it fits: `residual` is log(measured / modelled) by edge, `loss` its mean absolute value.

    `score` adds up the deviations at all sides of hosts and of the whole time, and what the model assumes;
    `seconds` is the modelled time of an epoch.
    """

    model: Model
    residual: Floats
    loss: float
    score: float
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Belief:
    """The models that explain a batch, best first, with weights that add up to 1."""

    fits: tuple[Fit, ...]
    weights: tuple[float, ...]

    @property
    def best(self) -> Fit:
        """The best one."""
        return self.fits[0]


class Fitter:
    """Fits for one batch; `host_of` by rank."""

    def __init__(self, batch: Batch, host_of: Sequence[int], params: ChoiceParams, epoch: int):
        self.batch, self.host_of, self.params, self.epoch = batch, tuple(host_of), params, epoch
        flows = batch.pattern.plan
        hosts = np.asarray(self.host_of)
        self.src_host, self.dst_host = hosts[flows.src], hosts[flows.dst]
        self.measured = _middle(batch.fct)
        self.luck = _luck(batch, self.measured)
        self.usable = batch.pattern.carries & (self.measured > 0)
        self.keys: list[SideKey] = [(h, d) for h in sorted(set(self.host_of)) for d in ("incoming", "outgoing")]
        self.spent = 0
        self.edges = {key: self._side_edges(key) for key in self.keys}
        self.cost = self._cost()
        # Late ranks change which flows run together: the model must see them as late, or it calls their links slow.
        self.arrive = batch.late if bool((batch.late > 0.02 * batch.time).any()) else None

    def run(self, prior: Model | None, enough: float = 0.0) -> Belief:
        """The models found from the prior and from a clean slate; the prior is kept where its loss is `enough`."""
        if not self.usable.any():
            return Belief((Fit(prior or Model(1.0), np.zeros(len(self.measured)), 0.0, 0.0, 1.0),), (1.0,))
        start = self.start(prior)
        if self._settled(start) or start.loss <= enough:
            return Belief((self._dated(start),), (1.0,))
        seen = self._explain(start)
        if self._poor(_best(seen)) or prior is None:
            # A poor rate calls for many excuses. It is sought anew: slow flows leave room to others, which then look
            # faster than the rate allows, so the middle of the deviations says little.
            rate, connection = _best(seen).model.rate, _best(seen).model.connection
            clean = self.evaluate([Model(rate * factor, connection) for factor in self._rate_factors(start)])
            tries = [self._descend(f, self._first_guesses, 1) for f in clean]
            seen += self._explain(_best([fit for part in tries for fit in part]))
        if self._poor(_best(seen)):
            # Perhaps the transport shares out its connections in the other way; a quiet network can't tell.
            other = "edge" if _best(seen).model.connection == "pair" else "pair"
            seen += self._explain(self.evaluate([Model(_best(seen).model.rate, other)])[0])
        return self._belief(seen + self._grouped_otherwise(_best(seen)))

    def _rate_factors(self, fit: Fit) -> list[float]:
        """Slower by a part, or as fast as the fastest flows say."""
        fast = np.percentile(fit.residual[self.usable], [10, 25])
        return [*_RATES, *(float(np.exp(-shift)) for shift in fast)]

    def _first_guesses(self, fit: Fit) -> list[Model]:
        return self._side_guesses(fit) + self._group_guesses(fit)

    def _poor(self, fit: Fit) -> bool:
        return fit.loss > 0.6 * self.params.misfit or fit.model.items > 3

    def _explain(self, start: Fit) -> list[Fit]:
        """Models with sides, then with pairs and groups, from `start` on."""
        seen = self._descend(start, self._side_guesses)
        clean = min((f for f in seen if f.model.clean), key=lambda f: f.score, default=start)
        for base in dict.fromkeys([_best(seen), clean]):
            seen += self._descend(base, lambda f: [*self._pair_guesses(f), *self._group_guesses(f)], 3)[1:]
        return seen

    def _descend(self, start: Fit, guesses: Callable[[Fit], list[Model]], depth: int = 6) -> list[Fit]:
        """All models looked at on the way down, the start first."""
        seen, best = [start], start
        for _ in range(depth):
            if self.spent > _WORK:
                break
            models = guesses(best)
            fits = self.evaluate(models) if models else []
            seen += fits
            better = min(fits, key=lambda f: f.score, default=best)
            if better.score >= best.score - _STEP:
                break
            best = better
        return seen

    def _belief(self, seen: list[Fit]) -> Belief:
        """The best model of each shape, as long as it is nearly as likely as the best of all."""
        shapes: dict[tuple[object, ...], Fit] = {}
        for fit in sorted(seen, key=lambda f: f.score):
            shapes.setdefault(fit.model.shape, fit)
        fits = list(shapes.values())[:4]
        likely = [f for f in fits if f.score < fits[0].score + 2 * _LIKELY]
        raw = [math.exp(-(f.score - fits[0].score) / _LIKELY) for f in likely]
        return Belief(tuple(self._dated(f) for f in likely), tuple(w / sum(raw) for w in raw))

    def _settled(self, fit: Fit) -> bool:
        """Whether nothing at all is left to explain."""
        sides = [abs(float(np.median(fit.residual[e]))) for e in self.edges.values() if e.any()]
        return fit.loss <= self.params.misfit and max(sides, default=0.0) < 0.1 and float(fit.residual.max()) < 0.25

    def start(self, prior: Model | None) -> Fit:
        """The prior, and clean models, whichever fits best."""
        if prior is None:
            rate = self._first_rate()
            fits = [self._rescaled(f) for f in self.evaluate([Model(rate, "pair"), Model(rate, "edge")])]
            return min(fits, key=lambda f: f.score)
        guesses = [prior] if prior.clean else [prior, Model(prior.rate, prior.connection)]
        fits = self.evaluate(guesses)
        # Another rate for all only where all flows agree on it: slow links must not make the rest look fast.
        fits += [self._rescaled(f) for f in fits if abs(self._shift(f)) > 0.05 and self._spread(f) < 0.1]
        return min(fits, key=lambda f: f.score)

    def _first_rate(self) -> float:
        speed = self.batch.pattern.plan.size[self.usable] / self.measured[self.usable]
        return float(np.percentile(speed, 75)) * max(1, int(np.median(self.batch.pattern.degree[self.usable])))

    def _spread(self, fit: Fit) -> float:
        low, high = np.percentile(fit.residual[self.usable], [10, 90])
        return float(high - low)

    def evaluate(self, models: Sequence[Model]) -> list[Fit]:
        """Simulates all models side by side."""
        plan = self.batch.pattern.plan
        self.spent += len(models) * len(plan.src)
        jobs = [Job(plan, m.network(self.host_of, self.params.alpha), self.arrive) for m in models]
        return [self._compare(m, r) for m, r in zip(models, simulate(jobs), strict=True)]

    def _compare(self, model: Model, result: Result) -> Fit:
        residual = np.zeros(len(self.measured))
        use = self.usable & (result.busy > 0)
        residual[use] = np.log(self.measured[use] / result.busy[use])
        size = np.minimum(np.abs(residual), 1.0)
        loss = float(size[use].mean()) if use.any() else 0.0
        sides = sum(float(size[edges].mean()) for edges in self.edges.values() if edges.any()) / 2
        late = float(self.arrive.max()) if self.arrive is not None else 0.0
        seconds = max(result.total - late, 1e-12)
        off = math.log(self.batch.time / seconds / self.luck) if self.batch.time > 0 else 0.0
        total = max(0.0, off - _BUBBLES, -off - _SLACK)
        return Fit(model, residual, loss, sides + _TOTAL * min(total, 1.0) + self.cost * model.items, seconds)

    def _cost(self) -> float:
        """What an assumption must explain: more than chance does (least description length), in the score's measure.

        Else all that is slow by chance is explained by slow pairs, and the link that they share isn't seen.
        """
        use = self.usable
        with np.errstate(divide="ignore", invalid="ignore"):
            off = np.abs(np.log(self.batch.fct[:, use] / self.measured[use]))
        off = off[np.isfinite(off)]
        error = 1.25 * float(off.mean()) / math.sqrt(len(self.batch.fct)) if len(off) else 0.0
        per_side = np.mean([e.sum() for e in self.edges.values() if e.any()] or [1.0])
        return max(_COST, _NATS * error / float(per_side))

    def _shift(self, fit: Fit) -> float:
        return float(np.median(fit.residual[self.usable]))

    def _rescaled(self, fit: Fit) -> Fit:
        model = fit.model
        for _ in range(2):
            model = dataclasses.replace(model, rate=model.rate * float(np.exp(-self._shift(fit))))
            fit = self.evaluate([model])[0]
        return fit

    def _side_edges(self, key: SideKey) -> npt.NDArray[np.bool_]:
        at = self.src_host if key[1] == "outgoing" else self.dst_host
        return (at == key[0]) & (self.src_host != self.dst_host) & self.usable

    def _side_guesses(self, fit: Fit) -> list[Model]:
        """Strangers, or a lower rate, at the sides whose flows are slowest against the model; less at those assumed."""
        found = [(float(np.median(fit.residual[e])), key) for key, e in self.edges.items() if e.any()]
        worst = [key for residual, key in sorted(found, reverse=True)[:2] if residual > 0.04]
        known = [side.key for side in fit.model.sides]
        models: list[Model] = []
        for key in dict.fromkeys([*worst, *known]):
            models += [self._with_side(fit.model, side) for side in self._variants(fit, key)]
        return models

    def _with_side(self, model: Model, side: Side) -> Model:
        """A side takes the blame for the slow pairs that end there."""
        at = 0 if side.direction == "outgoing" else 1
        pairs = tuple(p for p in model.pairs if self.host_of[(p.src, p.dst)[at]] != side.host)
        return dataclasses.replace(model.with_side(side), pairs=pairs)

    def _variants(self, fit: Fit, key: SideKey) -> list[Side]:
        edges = self.edges[key]
        side = fit.model.side(key)
        if not edges.any():
            return []
        ratio = np.exp(fit.residual[edges])
        size, took = self.batch.pattern.plan.size[edges], self.measured[edges]
        # k flows of ours at C/(k + p) each: the time per byte grows by p/C.
        more = float(np.median(fit.model.rate * took * (1 - 1 / ratio) / size))
        slower = float(np.exp(-np.median(fit.residual[edges])))
        p = side.strangers
        counts = {max(0.0, p + more * f) for f in (0.6, 1.0, 1.5)} | ({0.0, p * 0.85} if p else set())
        factors = {min(1.0, side.factor * slower)} | ({1.0} if side.factor < 1 else set())
        out = [Side(*key, strangers=c, seen=self.epoch) for c in sorted(counts) if c <= 64]
        return out + [Side(*key, factor=f, seen=self.epoch) for f in sorted(factors) if f > 0.02]

    def _pair_guesses(self, fit: Fit) -> list[Model]:
        """Pairs that no side explains, held to what they reach."""
        flows = self.batch.pattern.plan
        slow = np.flatnonzero(self.usable & (fit.residual > _SLOW))
        rates: dict[tuple[int, int], float] = {}
        for edge in slow.tolist():
            pair = (int(flows.src[edge]), int(flows.dst[edge]))
            rate = float(flows.size[edge] / self.measured[edge])
            rates[pair] = max(rate, rates.get(pair, 0.0))
        if not rates or len(rates) > len(self.measured) / 2:
            return []
        kept = tuple(p for p in fit.model.pairs if (p.src, p.dst) not in rates)
        new = tuple(SlowPair(a, b, rate, self.epoch) for (a, b), rate in sorted(rates.items()))
        models = [dataclasses.replace(fit.model, pairs=(*kept, *new))]
        if fit.model.pairs:
            models.append(dataclasses.replace(fit.model, pairs=kept))
        return models

    def _group_guesses(self, fit: Fit) -> list[Model]:
        """Groups of ranks whose flows among themselves are fast, where all slow flows run between groups."""
        base = dataclasses.replace(fit.model, pairs=(), groups=None)
        clean = self.evaluate([base])[0] if fit.model.pairs or fit.model.groups else fit
        apart, together = self._evidence(clean, fit.model)
        slow = self.usable & (clean.residual > _SLOW)
        size, took = self.batch.pattern.plan.size[slow], self.measured[slow]
        rate = float(np.median(size / took)) if slow.any() else base.rate
        old = [fit.model.groups.uplink * f for f in (0.85, 1.0, 1.2)] if fit.model.groups else []
        uplinks = [*(rate * u for u in _UPLINKS), *old]
        known = [(fit.model.groups.labels, fit.model.groups.loaded)] if fit.model.groups else []
        strict = [(labels, None) for labels in groupings(len(self.host_of), apart, together)]
        shapes = dict.fromkeys([*known, *strict, *self._halves(clean, apart, together)])
        groups = [Groups(g, u, self.epoch, apart, together, loaded) for g, loaded in shapes for u in uplinks]
        models = [dataclasses.replace(base, groups=g) for g in groups]
        return [*models, base] if fit.model.groups else models

    def _grouped_otherwise(self, fit: Fit) -> list[Fit]:
        """The fit with other groups that the same evidence allows: they explain the batch alike, and promise others."""
        groups = fit.model.groups
        if groups is None or groups.loaded is not None:
            return []
        labels = [g for g in groupings(len(self.host_of), groups.apart, groups.together) if g != groups.labels]
        other = [dataclasses.replace(groups, labels=g, uplink=groups.uplink * f) for g in labels for f in _REGROUPED]
        return self.evaluate([dataclasses.replace(fit.model, groups=g) for g in other]) if other else []

    def _halves(self, clean: Fit, apart: Pairs, together: Pairs) -> list[tuple[Labels, int | None]]:
        """The ranks in two groups, such that slow flows run between them and fast ones inside, as far as can be; and
        such that slow ones run from the first to the second.

        One flow that is slow, or fast, by chance contradicts every grouping that must explain all; it costs this one
        little.
        """
        flows, n = self.batch.pattern.plan, len(self.host_of)
        use = self.usable & (self.src_host != self.dst_host)
        residual = clean.residual[use]
        edge = boundary(residual, _SLOW)
        if edge is None:
            return []
        total, count = np.zeros((n, n)), np.zeros((n, n))
        np.add.at(total, (flows.src[use], flows.dst[use]), np.clip(residual - edge, -_CLEAR, _CLEAR))
        np.add.at(count, (flows.src[use], flows.dst[use]), 1)
        pull = total / np.maximum(count, 1)
        for pairs, sign in ((apart, 1), (together, -1)):
            for a, b in pairs:
                pull[a, b] = pull[a, b] if count[a, b] else sign * _CLEAR / 2
        both: list[tuple[Labels, int | None]] = [(labels, None) for labels in halves(pull)]
        return both + [(labels, 0) for labels in halves(pull, directed=True) if _is_crossed(pull, labels)]

    def _evidence(self, clean: Fit, model: Model) -> tuple[Pairs, Pairs]:
        """Pairs slow and pairs fast in this batch, and before it where this one says nothing."""
        flows = self.batch.pattern.plan
        pairs: dict[tuple[int, int], list[float]] = {}
        for edge in np.flatnonzero(self.usable).tolist():
            pair = (int(flows.src[edge]), int(flows.dst[edge]))
            pairs.setdefault(pair, []).append(float(clean.residual[edge]))
        typical = {pair: float(np.median(values)) for pair, values in pairs.items()}
        slow = {pair for pair, value in typical.items() if value > _SLOW}
        fast = {pair for pair, value in typical.items() if value < _FAST}
        before = model.groups
        if before is not None:
            slow |= {pair for pair in before.apart if pair not in typical}
            fast |= {pair for pair in before.together if pair not in typical}
        return frozenset(slow), frozenset(fast)

    def _dated(self, fit: Fit) -> Fit:
        """What this batch's flows could show bears its epoch; the rest keeps its own."""
        flows = self.batch.pattern.plan
        crossing = set(zip(flows.src[self.usable].tolist(), flows.dst[self.usable].tolist(), strict=True))
        now = self.epoch
        model = fit.model
        sides = tuple(dataclasses.replace(s, seen=now) if self.edges[s.key].any() else s for s in model.sides)
        pairs = tuple(dataclasses.replace(p, seen=now) if (p.src, p.dst) in crossing else p for p in model.pairs)
        groups = model.groups
        if groups is not None and any(crossing.intersection(link) for link in groups.shared()):
            groups = dataclasses.replace(groups, seen=now)
        return dataclasses.replace(fit, model=dataclasses.replace(model, sides=sides, pairs=pairs, groups=groups))


def _is_crossed(pull: Floats, labels: Labels) -> bool:
    """Whether slow flows out of group 0 show that they share a link: some have an end in common, at each side.

    Any slow pairs without a common end can be cut by some grouping; one rank against all others is a side of its host.
    """
    slow = [(a, b) for a, b in np.argwhere(pull > 0).tolist() if labels[a] == 0 != labels[b]]
    sources, destinations = {a for a, _ in slow}, {b for _, b in slow}
    return min(len(sources), len(destinations)) > 1 and len(slow) > max(len(sources), len(destinations))


def _best(fits: Sequence[Fit]) -> Fit:
    return min(fits, key=lambda f: f.score)


def _middle(fct: Floats) -> Floats:
    """The middle of each edge's times: what befalls a third of the epochs, such as a lost packet, isn't the link's."""
    return np.array([float(np.median(c[np.isfinite(c)])) if np.isfinite(c).any() else 0.0 for c in fct.T])


def _luck(batch: Batch, middle: Floats) -> float:
    """How many times longer the chains of transfers are for their spread: each epoch waits for its unluckiest one."""
    plan = batch.pattern.plan
    usual = float(middle[critical_path(plan, middle)].sum())
    if usual <= 0 or len(batch.fct) < 2:
        return 1.0
    times = np.where(np.isfinite(batch.fct), batch.fct, middle)
    longest = [float(row[critical_path(plan, row)].sum()) for row in times]
    return max(1.0, float(np.mean(longest)) / usual)
