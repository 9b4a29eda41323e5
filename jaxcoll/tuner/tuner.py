"""The tuner's face: one pure `step` for both policies."""

from __future__ import annotations

from collections.abc import Sequence

from jaxcoll.errors import UsageError
from jaxcoll.telemetry import Epoch
from jaxcoll.tuner.adaptive import step_adaptive
from jaxcoll.tuner.params import POLICIES, ChoiceParams, Policy, ReactParams
from jaxcoll.tuner.react import ReactState, init_react, step_react
from jaxcoll.tuner.state import AdaptiveState, init_adaptive
from jaxcoll.tuner.types import Decision, ScheduleSet, Verdict

State = AdaptiveState | ReactState


def init(
    spec: ScheduleSet,
    *,
    policy: Policy = "jaxcoll",
    seed: int = 0,
    react: ReactParams | None = None,
    choice: ChoiceParams | None = None,
) -> State:
    """The tuner's state for one set, before its first epoch.

    Args:
        policy: "jaxcoll" (the default) or "react-paper" (swaps only, as the paper has it).
        react: Table 3's parameters; the default policy uses `B`, `delta1`, `delta2` and `H` of them.
        choice: the default policy's own parameters.
    """
    if policy == "react-paper":
        return init_react(spec, react, seed)
    if policy == "jaxcoll":
        return init_adaptive(spec, react, choice, seed)
    raise UsageError(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")


def step(state: State, samples: Sequence[Epoch]) -> tuple[State, Decision | None, str]:
    """Takes the epochs that have ended since the last call; pure: no clock, no thread, chance out of the seed alone.

    Returns the new state, what to stage and commit (or None), and why. After a decision, epochs that still ran the old
    table may be handed in; they are told by their version and left out.
    """
    return step_react(state, samples) if isinstance(state, ReactState) else step_adaptive(state, samples)


def verdict(state: State) -> Verdict | None:
    """On the last move that was judged, by the batch that ended after it; None if there was none."""
    return state.verdict
