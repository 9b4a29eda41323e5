"""What is expected of a move, and how much must be."""

from __future__ import annotations

import numpy as np

from jaxcoll.tuner.choice import Candidate
from jaxcoll.tuner.fit import Belief
from jaxcoll.tuner.groups import Pairs
from jaxcoll.tuner.measure import Batch
from jaxcoll.tuner.model import Model
from jaxcoll.tuner.state import AdaptiveState


def least_gain(state: AdaptiveState) -> float:
    """What a move must promise: more than chance, more from where it is known to be right, and after each failure."""
    at_home = state.config.key == state.spec.home.key
    least = state.params.margin * (1 + state.failures + at_home)
    return max(least, state.params.content if state.paid else 0.0, state.here.chance)


def situation(state: AdaptiveState, batch: Batch, belief: Belief) -> tuple[object, ...]:
    """All that a search and the margin asked of its result go by, amounts roughly."""
    known = frozenset(m.config.key for m in state.measured)
    what = (state.fits, belief.best.model.shape, round(4 * np.log(batch.time)), known, state.doubt)
    return *what, state.failures, state.paid, len(state.here.epochs)


def crossed(state: AdaptiveState) -> Pairs:
    """Pairs of ranks between which the evidence shows a flow."""
    batch = state.evidence
    assert batch is not None
    flows, seen = batch.pattern.plan, batch.pattern.carries & np.isfinite(batch.fct).any(axis=0)
    return frozenset(zip(flows.src[seen].tolist(), flows.dst[seen].tolist(), strict=True))


def expected_of(state: AdaptiveState, now: float, candidate: Candidate) -> float:
    """Time of a candidate over the present one: as measured, where it was, else as modelled.

    What makes one program slower than its model, such as flows that collide on links that the model doesn't know, is
    likely to meet another one, too; the program in force was fitted. What makes its tables slower meets all.
    """
    known = state.seconds_of(candidate.config)
    if known:
        return known / state.here.seconds
    stays, doubt = candidate.config.program == state.config.program, state.doubt
    factor = 1.0 if doubt is None or (stays and doubt.program) else doubt.factor
    assert state.evidence is not None
    return factor * candidate.seconds / now * state.evidence.time / state.here.seconds


def is_heap(state: AdaptiveState, model: Model) -> bool:
    """Whether so much departs from the usual that it explains nothing: what it promises of other tables is chance."""
    return len(model.sides) + len(model.pairs) > max(4, state.spec.nranks // 2)


def rank(state: AdaptiveState, candidate: Candidate, expected: float) -> float:
    """What to go by between candidates: the time, few swaps, and what was measured rather than what a model promises.

    The best of many promises is one that the model is wrong about.
    """
    promise = 0.0 if state.seconds_of(candidate.config) else 2 * state.params.margin
    return expected + 0.002 * len(candidate.swaps) + promise
