"""What a batch says of the past: what was measured, whether the last move has paid, what is evidence no longer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxcoll.telemetry import behind
from jaxcoll.tuner.measure import Batch
from jaxcoll.tuner.params import ChoiceParams
from jaxcoll.tuner.past import Doubt, Measured, Trial
from jaxcoll.tuner.state import AdaptiveState
from jaxcoll.tuner.types import Verdict

_EVIDENCE = 3
"""Batches that a model is fitted to at most: what has moved elsewhere, in the same time, outweighs the rest soon."""


def lateness_changed(state: AdaptiveState, stragglers: Sequence[int], batch: Batch) -> bool:
    """Whether a rank has begun to be late, or has ceased: which flows run together is another matter then.

    Every epoch of the batch lies on one side of the middle of the evidence: it may begin within a batch.
    """
    assert state.evidence is not None
    changed = list(set(stragglers) ^ set(late_ranks(state.evidence, state.params)))
    now, before = batch.lateness[:, changed], state.evidence.late[changed]
    return bool(((now > before).all(axis=0) | (now < before).all(axis=0)).any())


def late_ranks(batch: Batch, params: ChoiceParams) -> tuple[int, ...]:
    """The ranks that are late by a good part of an epoch."""
    return tuple(np.flatnonzero(behind(batch.late) > params.lateness * batch.time).tolist())


def note(state: AdaptiveState, batch: Batch) -> AdaptiveState:
    """Takes the batch's time down; forgets what is old, and what a change of the network has made stale."""
    now, horizon = state.collector.seen, state.react.H * (1 + state.failures)
    # The start is kept in mind until it is time to try it again.
    longer = max(horizon, 2 * state.revisit_after)
    measured, last = state.measured, None
    if state.trial is None:
        last = next((m for m in measured if m.config.key == state.config.key), None)
    if last is not None and last.differs(batch):
        # The network has changed: what was measured before says nothing now, nor that no fit did better. What is newer
        # than the time that has proved stale stands: it made the move look bad that it was a change to try out.
        measured = tuple(m for m in measured if m.epoch > last.epoch)
        state = dataclasses.replace(state, fitted=None, paid=False)
        if batch.time > state.params.worse * last.seconds:
            state = dataclasses.replace(state, worse=True, failures=0, probes=0, doubt=None)
        last = None
    home = state.spec.home.key
    recent = (m for m in measured if m.epoch > now - (longer if m.config.key == home else horizon))
    kept = tuple(m for m in recent if m.config.key != state.config.key)
    here = Measured.of(state.config, batch, now, last)
    evidence = batch.after(state.evidence, _EVIDENCE * state.react.B) if last and state.evidence else batch
    doubt = state.doubt if state.doubt is not None and state.doubt.epoch > now - horizon else None
    return dataclasses.replace(state, measured=(*kept, here), evidence=evidence, doubt=doubt)


def judge(state: AdaptiveState, batch: Batch) -> tuple[AdaptiveState, str]:
    """Whether the last move has paid."""
    trial, state = state.trial, dataclasses.replace(state, surprised=False)
    if trial is None:
        return state, ""
    ratio = batch.time / trial.seconds
    paid = ratio < 1 - state.params.keep or (trial.action in ("recover", "probe") and ratio < 1 + state.params.keep)
    probe = trial.action == "probe"
    failures = 0 if paid else state.failures + (not probe)  # a look in vain speaks against the next look alone
    probes = 0 if probe and paid else state.probes + probe
    surprised = not paid and ratio > state.params.worse * trial.expected
    doubt = _doubt(state, trial, ratio)
    verdict = Verdict(state.config.table.version, ratio, paid)
    state = dataclasses.replace(
        state,
        trial=None,
        failures=failures,
        astray=not paid,
        probes=probes,
        surprised=surprised,
        doubt=doubt,
        verdict=verdict,
        paid=_content(state, trial, ratio) if paid else state.paid,
    )
    return state, f"the last move {verdict.text()}. "


def _content(state: AdaptiveState, trial: Trial, ratio: float) -> bool:
    """Whether it is well where it is, after a move that has paid: one that gave half of what was promised at least."""
    if trial.action in ("swap", "program"):
        return state.paid or ratio <= (1 + trial.expected) / 2
    return False


def _doubt(state: AdaptiveState, trial: Trial, ratio: float) -> Doubt | None:
    """What is left of the doubt in promises after a move: one that keeps its promise ends the doubt in its kind."""
    program, short = trial.action == "program", ratio / trial.expected
    if trial.action not in ("swap", "program"):
        return state.doubt
    if short > state.params.worse:
        return Doubt(short, program, state.collector.seen)
    return None if state.doubt is not None and state.doubt.program == program else state.doubt
