"""What a tuner of one set begins with, also as plain data: the run log holds it, so that a run can be decided again."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxcoll.errors import MALFORMED, UsageError
from jaxcoll.schedule import Table, dumps, loads
from jaxcoll.tuner.params import ChoiceParams, Policy, ReactParams
from jaxcoll.tuner.tuner import State, init
from jaxcoll.tuner.types import Program, ScheduleSet


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
        except KeyError as error:
            raise UsageError(f"this is no tuner set-up: {error} is missing") from None
        except MALFORMED as error:
            raise UsageError(f"this is no tuner set-up: {error}") from error


def _pack(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
