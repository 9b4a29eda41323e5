"""The default policy: fit one capacity model, score every (schedule, table) of the set on it, go where it pays.

What differs from the paper: a model of the hosts' capacities instead of times by pair; all viable swaps are scored
instead of a random one; the schedule may change; a move that doesn't pay is remembered with its measured time, so that
it isn't made again, and with how far it fell short, so that the next promise is believed less; a gain must be more than
chance; swaps that don't pay are rationed; the start is taken again where that pays when the congestion has gone, and
tried again where another program is hardly better; a late rank is told apart and causes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxcoll.telemetry import Epoch
from jaxcoll.tuner.choice import Scorer, search
from jaxcoll.tuner.detect import Congestion, detect, rate_text
from jaxcoll.tuner.fit import Belief, Fitter
from jaxcoll.tuner.judge import judge, late_ranks, lateness_changed, note
from jaxcoll.tuner.measure import Batch
from jaxcoll.tuner.params import ChoiceParams
from jaxcoll.tuner.past import Trial
from jaxcoll.tuner.promise import crossed, expected_of, is_heap, least_gain, rank, situation
from jaxcoll.tuner.state import AdaptiveState, Outcome
from jaxcoll.tuner.transforms import graph_name
from jaxcoll.tuner.types import Config, Decision


def step_adaptive(state: AdaptiveState, samples: Sequence[Epoch]) -> Outcome:
    """Takes the epochs that have ended since; decides once a batch is full."""
    collector = state.collector.add(samples, state.config).settled(state.params.quick, state.params.shift)
    state = dataclasses.replace(state, collector=collector)
    collector, batch = state.collector.batch(state.spec, state.config, state.react.B)
    if batch is None:
        return _quick(state) or (state, None, f"{len(state.collector.waiting)} of {state.react.B} epochs of the batch")
    return _full(dataclasses.replace(state, collector=collector), batch)


def _quick(state: AdaptiveState) -> Outcome | None:
    """A few epochs of the batch decide alone: where they show plain, steady congestion and a way to gain much, or that
    the last move has made it much worse."""
    params = state.params
    if len(state.collector.waiting) != params.quick:
        return None
    _, batch = state.collector.batch(state.spec, state.config, params.quick)
    if batch is None:
        return None
    alone = dataclasses.replace(state, evidence=None)
    if state.trial is not None:
        after, decision, why = _full(alone, batch) if _is_flop(state.trial, batch, params) else (state, None, "")
        return (after, decision, why) if decision is not None and decision.action == "revert" else None
    if state.searched is not None and not state.here.unlike(batch):
        return None  # more epochs than these few have shown that nothing better is known
    # Where the few don't agree among themselves, nothing is plain.
    agree = float(batch.seconds.max()) < params.worse * float(batch.seconds.min())
    if state.failures or not agree or not _congestion(state, batch).steady.any():
        return None
    after, decision, why = _full(alone, batch)
    if decision is None or decision.action not in ("swap", "program") or decision.expected > 1 - params.quick_gain:
        return None
    return after, decision, why


def _is_flop(trial: Trial, batch: Batch, params: ChoiceParams) -> bool:
    """Whether every epoch since the move has taken much longer than those before it did."""
    return float(batch.seconds.min()) > params.worse * trial.seconds


def _full(state: AdaptiveState, batch: Batch) -> Outcome:
    state = dataclasses.replace(state, round=state.round + 1)
    stragglers = late_ranks(batch, state.params)
    if state.evidence is not None and lateness_changed(state, stragglers, batch):
        state = dataclasses.replace(state, evidence=None)
    return _decide(dataclasses.replace(state, stragglers=stragglers), batch)


def _decide(state: AdaptiveState, batch: Batch) -> Outcome:
    state, verdict = judge(note(state, batch), batch)
    congestion = _congestion(state, batch)
    belief = _fit(state)
    model = belief.best.model
    state = dataclasses.replace(state, model=model, fitted=(state.fits, belief.best.loss))
    if state.stragglers:
        names = ", ".join(f"rank {r} is {batch.late[r] * 1e3:.0f} ms late" for r in state.stragglers)
        verdict += f"{names}. "
    again = _revisit(state, batch, verdict)
    if again is not None:
        return again
    if model.clean:
        return _when_clean(state, batch, belief, congestion, verdict)
    state = dataclasses.replace(state, calm=0)
    return _when_congested(state, batch, belief, congestion, verdict)


def _congestion(state: AdaptiveState, batch: Batch) -> Congestion:
    return detect(batch, state.react.delta1, state.react.delta2, state.spec.host_of)


def _fit(state: AdaptiveState) -> Belief:
    """What explains the evidence: one batch alone hid for minutes which links were slow, where they are noisy."""
    batch, prior = state.evidence, state.model
    assert batch is not None
    if prior is not None:
        # What no flow crosses any more can't be seen to end: it is believed for H epochs, longer after each vain look.
        prior = prior.forget(state.collector.seen - state.react.H * 2 ** min(state.probes, 5))
    # Where the last fit to as much of the same table did no better, another one won't either.
    enough = 1.25 * state.fitted[1] if state.fitted is not None and state.fitted[0] == state.fits else 0.0
    return Fitter(batch, state.spec.host_of, state.params, state.collector.seen).run(prior, enough)


def _when_clean(state: AdaptiveState, batch: Batch, belief: Belief, congestion: Congestion, verdict: str) -> Outcome:
    """Nothing departs from the usual: stay, or go back to the start after a while."""
    state = dataclasses.replace(state, calm=state.calm + 1)
    home = state.spec.home
    back = _failed_back(state, batch, verdict)
    if back is not None:
        return back
    if state.config.key == home.key:
        why = "some flows vary, but nothing explains them" if congestion else "no congestion"
        return state, None, verdict + why
    if state.calm < state.params.calm or not _may_swap(state, batch.now_ns):
        return state, None, f"{verdict}no congestion for {state.calm} batches"
    scorer = Scorer(state.spec, belief, crossed(state), state.params, np.random.default_rng([state.seed, state.round]))
    here, there = scorer.seconds([state.config, home])
    known = state.seconds_of(home)
    expected = known / state.here.seconds if known else there / here
    if expected > 1 - state.params.keep:
        return state, None, f"{verdict}no congestion, but the start would take {expected:.2f}x as long; stayed"
    words = f"no congestion for {state.calm} batches; went back to the start; expected {expected:.2f}x"
    return _move(state, batch, home, "recover", verdict + words, expected)


def _when_congested(
    state: AdaptiveState, batch: Batch, belief: Belief, congestion: Congestion, verdict: str
) -> Outcome:
    cause = _cause(state, batch, belief, congestion)
    if not _may_swap(state, batch.now_ns):
        back = _failed_back(state, batch, verdict)
        return back or (state, None, f"{verdict}{cause}; enough swaps for now, waiting")
    if state.here.unlike(batch) and not state.waited:
        state = dataclasses.replace(state, waited=True)
        return state, None, f"{verdict}{cause}; unlike what was measured before, waiting for another batch"
    state = dataclasses.replace(state, waited=False)
    here = situation(state, batch, belief)
    if state.searched == here:
        return state, None, f"{verdict}{cause}; nothing better is known"
    if state.surprised:
        # Either the model is wrong, and what it proposes next is worth no more; or the network has changed meanwhile,
        # and going back shows it.
        back = _failed_back(state, batch, verdict)
        if back is not None:
            return back
    rng = np.random.default_rng([state.seed, state.round])
    others = [m.config for m in state.measured]
    now, candidates = search(state.spec, belief, crossed(state), state.config, others, state.params, rng)
    options = [(c, expected_of(state, now, c)) for c in candidates if c.config.key != state.config.key]
    if is_heap(state, belief.best.model):
        options = [(c, expected) for c, expected in options if state.seconds_of(c.config)]
    best, expected = min(options, key=lambda o: rank(state, *o), default=(None, 1.0))
    margin = least_gain(state)
    if best is None or expected > 1 - margin:
        back = _failed_back(state, batch, verdict)
        what = f"nothing in the set is expected to gain {margin:.0%} (best {expected:.2f}x)"
        state = dataclasses.replace(state, searched=here)
        return back or (state, None, f"{verdict}{cause}; {what}")
    action = "swap" if best.config.program == state.config.program else "program"
    if best.config.key == state.spec.home.key:
        action = "probe"
    words = f"{cause}; {best.text(state.spec, state.config)}; expected {expected:.2f}x"
    return _move(state, batch, best.config, action, verdict + words, expected)


def _revisit(state: AdaptiveState, batch: Batch, verdict: str) -> Outcome | None:
    """The start once more, where another program is hardly better than it was long ago.

    Where links are erratic the start is often left in its worst minute, and that minute's time would speak against it
    for long.
    """
    params, home, here = state.params, state.spec.home, state.here
    known = next((m for m in state.measured if m.config.key == home.key), None)
    if known is None or state.config.program == home.program or here.seconds < (1 - params.little) * known.seconds:
        return None
    age = state.collector.seen - known.epoch
    if age < state.revisit_after or not _may_swap(state, batch.now_ns):
        return None
    ratio = known.seconds / here.seconds
    words = f"the start took {ratio:.2f}x as long {age} epochs ago; tried it again; expected {ratio:.2f}x or less"
    return _move(state, batch, home, "probe", verdict + words, ratio)


def _failed_back(state: AdaptiveState, batch: Batch, verdict: str) -> Outcome | None:
    """Back to the best that was measured, if the last move didn't pay, or an earlier one: whatever the ration, since
    each move has one way back at most."""
    if not (state.failures or state.astray):
        return None
    best = min(state.measured, key=lambda m: m.seconds)
    expected = best.seconds / state.here.seconds
    if best.config.key == state.config.key or expected > 1 - state.params.keep:
        return None
    return _move(state, batch, best.config, "revert", f"{verdict}went back: expected {expected:.2f}x", expected)


def _may_swap(state: AdaptiveState, now_ns: int) -> bool:
    """Few decisions in a window, one kept for the way back; the window doubles with each failure in a row.

    Where it has become much worse since the last decision, the one that is kept may be taken, too.
    """
    window = state.params.window_s * 2 ** min(max(0, state.failures - 1), 5)
    recent = sum(1 for at in state.swaps_ns if now_ns - at < window * 1e9)
    return recent < state.params.swaps - (0 if state.worse else 1)


def _move(
    state: AdaptiveState, batch: Batch, config: Config, action: str, words: str, expected: float
) -> tuple[AdaptiveState, Decision, str]:
    version = state.version + 1
    target = Config(config.program, config.table.with_version(version))
    decision = Decision(state.spec.key, action, target.program, target.table, words, expected)
    horizon = state.params.window_s * 64 * 1e9
    recent = tuple(at for at in state.swaps_ns if batch.now_ns - at < horizon)
    trial = None if action == "revert" else Trial(state.here.seconds, action, expected)
    state = dataclasses.replace(
        state,
        config=target,
        version=version,
        collector=state.collector.cleared(),
        trial=trial,
        evidence=None,
        searched=None,
        worse=False,
        astray=False,
        calm=0,
        swaps_ns=(*recent, batch.now_ns),
    )
    return state, decision, words


def _cause(state: AdaptiveState, batch: Batch, belief: Belief, congestion: Congestion) -> str:
    """The slowest edge that shows it, and what the model makes of it."""
    flows = batch.pattern.plan
    model = belief.best.model.text()
    if not congestion:
        return model
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(congestion.any, congestion.p90 / congestion.usual, np.inf)
    edge = int(np.argmin(ratio))
    kind = "steady" if congestion.steady[edge] else "erratic"
    schedule = state.spec.by_id[state.config.program].schedule
    where = f"edge {flows.src[edge]}->{flows.dst[edge]} of {graph_name(schedule, int(flows.graph[edge]))}"
    p90, usual = rate_text(float(congestion.p90[edge])), rate_text(float(congestion.usual[edge]))
    return f"{where} {kind} congested: p90 {p90} against {usual} ({model})"
