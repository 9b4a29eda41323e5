"""Records of a run, back into the tuner: the same records give the same decisions."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxcoll.errors import UsageError
from jaxcoll.schedule import Table, dumps, loads
from jaxcoll.telemetry import Epoch, Records, group_epochs, read_jsonl, write_event, write_jsonl
from jaxcoll.tuner.params import ChoiceParams, Policy, ReactParams
from jaxcoll.tuner.tuner import State, init, step
from jaxcoll.tuner.types import Decision, Program, ScheduleSet


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that a tuner of one set began with."""

    spec: ScheduleSet
    policy: Policy = "jaxcoll"
    seed: int = 0
    react: ReactParams = dataclasses.field(default_factory=ReactParams)
    choice: ChoiceParams = dataclasses.field(default_factory=ChoiceParams)

    def init(self) -> State:
        """The state before the first epoch."""
        return init(self.spec, policy=self.policy, seed=self.seed, react=self.react, choice=self.choice)

    def to_json(self) -> dict[str, Any]:
        """Plain data; schedules in their text form (it keeps the names that reasons use), tables in base64."""
        spec = self.spec
        programs = [{"id": p.id, "label": p.label, "schedule": dumps(p.schedule)} for p in spec.programs]
        table = None if spec.start_table is None else _pack(spec.start_table.to_bytes())
        return {
            "key": spec.key,
            "nbytes": spec.nbytes,
            "start": spec.start,
            "start_table": table,
            "hosts": list(spec.hosts),
            "programs": programs,
            "policy": self.policy,
            "seed": self.seed,
            "react": dataclasses.asdict(self.react),
            "choice": dataclasses.asdict(self.choice),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Setup:
        """What `to_json` wrote."""
        try:
            programs = tuple(Program(int(p["id"]), loads(p["schedule"]), p["label"]) for p in data["programs"])
            packed = data["start_table"]
            table = None if packed is None else Table.from_bytes(base64.b64decode(packed))
            spec = ScheduleSet(data["key"], programs, data["nbytes"], data["start"], table, tuple(data["hosts"]))
            react, choice = ReactParams(**data["react"]), ChoiceParams(**data["choice"])
            return Setup(spec, data["policy"], data["seed"], react, choice)
        except (KeyError, TypeError) as error:
            raise UsageError(f"this is no tuner set-up: {error} is missing or of the wrong kind") from None


def _pack(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


@dataclasses.dataclass(frozen=True)
class Taken:
    """One call of `step` that decided something: after how many epochs of the set, and what."""

    epochs: int
    decision: Decision


def replay(setup: Setup, epochs: Sequence[Epoch]) -> list[Taken]:
    """Runs the tuner over `epochs`, one at a time in the order in which they started."""
    state = setup.init()
    taken: list[Taken] = []
    for i, epoch in enumerate(epochs, 1):
        state, decision, _ = step(state, [epoch])
        if decision is not None:
            taken.append(Taken(i, decision))
    return taken


def write_run(out: TextIO, setup: Setup, records: Records, taken: Sequence[Taken]) -> None:
    """A run of one set as JSON lines: its set-up, its records, its decisions."""
    write_event(out, "set", setup.to_json())
    write_jsonl(out, records)
    for entry in taken:
        write_event(out, "decision", {"epochs": entry.epochs, **entry.decision.to_json()})


def replay_run(source: TextIO | Path | str) -> tuple[list[Taken], list[Taken]]:
    """(decisions recorded in the run, decisions taken again from its records) of a file that `write_run` wrote."""
    records, events = read_jsonl(source)
    setups = [event for event in events if event["type"] == "set"]
    if len(setups) != 1:
        raise UsageError(f"the run holds {len(setups)} sets; replay takes one: split the file by its sets")
    recorded = [Taken(int(e["epochs"]), Decision.from_json(e)) for e in events if e["type"] == "decision"]
    return recorded, replay(Setup.from_json(setups[0]), group_epochs(records))
