"""What decides: the tuner's policies, and one that swaps at random to test programs against swaps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxcoll import tuner
from jaxcoll.errors import UsageError
from jaxcoll.telemetry import Epoch
from jaxcoll.tuner import ChoiceParams, Config, Decision, ReactParams, ScheduleSet, Setup, Verdict
from jaxcoll.tuner.params import check_number
from jaxcoll.tuner.transforms import Swap, swapped

SHUFFLE = "shuffle"
NAMES = (*tuner.POLICIES, SHUFFLE)


class Policy(Protocol):
    """Pure: `step(state, epochs) -> (state, decision, why)`, chance out of a seed alone."""

    @property
    def name(self) -> str: ...

    @property
    def free(self) -> bool:
        """Whether another schedule than the start's may be taken."""
        ...

    def start(self, spec: ScheduleSet) -> Any: ...

    def step(self, state: Any, samples: Sequence[Epoch]) -> tuple[Any, Decision | None, str]: ...

    def verdict(self, state: Any) -> Verdict | None:
        """On the last move that was judged; None if there was none."""
        ...

    def to_json(self, spec: ScheduleSet) -> dict[str, Any]:
        """What `from_json` needs, in the run log's "set" line."""
        ...


@dataclasses.dataclass(frozen=True)
class Tuner:
    """A policy of `jaxcoll.tuner`."""

    name: tuner.Policy = "jaxcoll"
    free: bool = True
    seed: int = 0
    react: ReactParams = dataclasses.field(default_factory=ReactParams)
    choice: ChoiceParams = dataclasses.field(default_factory=ChoiceParams)

    def _setup(self, spec: ScheduleSet) -> Setup:
        return Setup(spec, self.name, self.seed, self.react, self.choice)

    def start(self, spec: ScheduleSet) -> Any:
        return self._setup(spec).init()

    def step(self, state: Any, samples: Sequence[Epoch]) -> tuple[Any, Decision | None, str]:
        return tuner.step(state, samples)

    def verdict(self, state: Any) -> Verdict | None:
        return tuner.verdict(state)

    def to_json(self, spec: ScheduleSet) -> dict[str, Any]:
        return self._setup(spec).to_json()


@dataclasses.dataclass(frozen=True, eq=False)
class ShuffleState:
    """`seen`: epochs since the last move; `version`: of the last table."""

    spec: ScheduleSet
    config: Config
    seen: int = 0
    version: int = 0


@dataclasses.dataclass(frozen=True)
class Shuffle:
    """Every `every` epochs another valid table at random, and another schedule half of the time."""

    every: int = 4
    seed: int = 0
    free: bool = True
    name: str = SHUFFLE

    def start(self, spec: ScheduleSet) -> ShuffleState:
        return ShuffleState(spec, spec.home, version=spec.home.table.version)

    def step(self, state: ShuffleState, samples: Sequence[Epoch]) -> tuple[ShuffleState, Decision | None, str]:
        fits = sum(e.version == state.config.table.version for e in samples)
        state = dataclasses.replace(state, seen=state.seen + fits)
        if state.seen < self.every:
            return state, None, f"{state.seen} of {self.every} epochs"
        version = state.version + 1
        config, words = self._move(state, np.random.default_rng([self.seed, version]))
        target = Config(config.program, config.table.with_version(version))
        decision = Decision(state.spec.key, "swap", target.program, target.table, words, 1.0)
        return ShuffleState(state.spec, target, version=version), decision, words

    def verdict(self, state: ShuffleState) -> Verdict | None:
        return None  # it moves for moving's sake

    def _move(self, state: ShuffleState, rng: np.random.Generator) -> tuple[Config, str]:
        spec, config, words = state.spec, state.config, "shuffled"
        if len(spec.programs) > 1 and rng.random() < 0.5:
            program = spec.programs[int(rng.integers(len(spec.programs)))]
            config, words = Config(program.id, program.identity), f"shuffled; took {program.name}"
        schedule = spec.by_id[config.program].schedule
        graphs = [None, *range(len(schedule.graphs))]
        for _ in range(8):  # a swap that isn't valid is left out: few tries keep a step short
            a, b = (int(r) for r in rng.choice(spec.nranks, 2, replace=False))
            swap = Swap(graphs[int(rng.integers(len(graphs)))], None, a, b)
            table = swapped(schedule, config.table, swap)
            if table is not None:
                return Config(config.program, table), f"{words}; {swap.text(schedule)}"
        return config, words

    def to_json(self, spec: ScheduleSet) -> dict[str, Any]:
        return {**Setup(spec, seed=self.seed).to_json(), "policy": SHUFFLE, "every": self.every}


def make(name: str = "jaxcoll", **params: Any) -> Policy:
    """A policy by name with its parameters by theirs.

    `seed`, `free`, those of ReactParams and ChoiceParams; `every` for "shuffle".
    """
    if name not in NAMES:
        raise UsageError(f"unknown policy {name!r}; known are {', '.join(NAMES)}")
    own = {k: params.pop(k) for k in ("seed", "free", *(("every",) if name == SHUFFLE else ())) if k in params}
    for key, least in (("seed", 0), ("every", 1)):
        check_number(key, own.get(key, least), least)
    groups: dict[str, dict[str, Any]] = {"react": {}, "choice": {}}
    fields = {"react": ReactParams, "choice": ChoiceParams}
    for key, value in params.items():
        home = next((g for g, c in fields.items() if key in {f.name for f in dataclasses.fields(c)}), None)
        if home is None or name == SHUFFLE or (name == "react-paper" and home == "choice"):
            raise UsageError(f"policy {name!r} has no parameter {key!r}")
        groups[home][key] = value
    if name == SHUFFLE:
        return Shuffle(**own)
    if name == "react-paper":
        own["free"] = False
    return Tuner(name, react=ReactParams(**groups["react"]), choice=ChoiceParams(**groups["choice"]), **own)  # type: ignore[arg-type]


def from_json(data: Mapping[str, Any]) -> tuple[Policy, ScheduleSet]:
    """The policy and the set of a run log's "set" line. UsageError if it is no such line."""
    if data.get("policy") == SHUFFLE:
        plain = Setup.from_json({**data, "policy": "jaxcoll"})
        return Shuffle(int(data["every"]), plain.seed), plain.spec
    setup = Setup.from_json(data)
    return Tuner(setup.policy, True, setup.seed, setup.react, setup.choice), setup.spec
