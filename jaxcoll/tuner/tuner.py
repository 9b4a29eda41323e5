"""The tuner's face: one pure `step` for both policies, and a bank of sets that are tuned side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jaxcoll.errors import UsageError
from jaxcoll.telemetry import Epoch
from jaxcoll.tuner.adaptive import AdaptiveState, init_adaptive, step_adaptive
from jaxcoll.tuner.params import POLICIES, ChoiceParams, Policy, ReactParams
from jaxcoll.tuner.react import ReactState, init_react, step_react
from jaxcoll.tuner.types import Config, Decision, ScheduleSet

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


def in_force(state: State) -> Config:
    """The program and table that the tuner believes to be in force, or on their way."""
    return state.config


def stragglers(state: State) -> tuple[int, ...]:
    """Ranks that came late in the last batch (the default policy tells them)."""
    return state.stragglers if isinstance(state, AdaptiveState) else ()


@dataclasses.dataclass(frozen=True)
class Bank:
    """Tuner states by set key: (communicator, collective, size class) are tuned each by itself."""

    states: Mapping[str, State] = dataclasses.field(default_factory=dict)

    def add(self, spec: ScheduleSet, *, policy: Policy = "jaxcoll", seed: int = 0) -> Bank:
        """With one more set; UsageError if its key is taken."""
        if spec.key in self.states:
            raise UsageError(
                f"a set named {spec.key!r} is tuned already; give each communicator and size class its own"
            )
        return Bank({**self.states, spec.key: init(spec, policy=policy, seed=seed)})

    def step(self, key: str, samples: Sequence[Epoch]) -> tuple[Bank, Decision | None, str]:
        """`step` for one set."""
        if key not in self.states:
            raise UsageError(f"no set is named {key!r}; known are {', '.join(sorted(self.states)) or 'none'}")
        state, decision, why = step(self.states[key], samples)
        return Bank({**self.states, key: state}), decision, why
