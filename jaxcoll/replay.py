"""Run the tuner again over the records of a run: the same records give the same decisions.

JAXCOLL_TUNER=on JAXCOLL_RUN_LOG=run.jsonl python train.py
jaxcoll replay run.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxcoll.steering import policy, runlog
from jaxcoll.telemetry import Epoch
from jaxcoll.tuner import Decision, ScheduleSet


@dataclasses.dataclass(frozen=True)
class Step:
    """One decision: after how many epochs of the set, as recorded, as taken again (None: not taken), equal or not."""

    key: str
    epochs: int
    recorded: Decision | None
    again: Decision | None

    @property
    def same(self) -> bool:
        """Whether both are there and say the same, table and reason included."""
        if self.recorded is None or self.again is None:
            return False
        return self.recorded.to_json() == self.again.to_json()


class _Set:
    """A set's policy on its way through the log."""

    def __init__(self, chosen: policy.Policy, spec: ScheduleSet):
        self.policy = chosen
        self.state = self.before = self.policy.start(spec)
        self.epochs = 0
        self.open: Decision | None = None

    def feed(self, epoch: Epoch) -> None:
        self.before, self.epochs = self.state, self.epochs + 1
        self.state, self.open, _ = self.policy.step(self.state, [epoch])


def replay(path: str | Path) -> list[Step]:
    """All decisions of a run log, in order. UsageError where the file is no run log, or is damaged.

    What the last line's epoch decides is left out: the run ended before it was known to be in force.
    """
    sets: dict[str, _Set] = {}
    steps: list[Step] = []
    line: dict[str, Any] = {}
    for number, line in enumerate(runlog.read(path), 1):
        kind, key = line["type"], str(line.get("key"))
        with runlog.reading(path, number):  # not around what follows from it: an error there is the policy's own
            one = runlog.about(sets, line) if kind in ("epoch", "decision") else sets.get(key)
            content = _content(line)
        if kind == "set":
            if one is not None:  # its policy began anew
                _missed(one, steps)
            sets[key] = _Set(*content)
        elif one is not None and content is not None:
            _follow(one, content, steps)
    for key, one in sets.items():
        if line["type"] != "epoch" or line["key"] != key:
            _missed(one, steps)
    return steps


def _content(line: dict[str, Any]) -> Any:
    """What a line holds: a policy and its set; an epoch; or a decision, after how many epochs, and if committed."""
    kind = line["type"]
    if kind == "set":
        return policy.from_json(line)
    if kind == "epoch":
        return runlog.epoch_of(line)
    if kind == "decision":
        return Decision.from_json(line), int(line["epochs"]), bool(line["committed"])
    return None


def _follow(one: _Set, content: Epoch | tuple[Decision, int, bool], steps: list[Step]) -> None:
    if isinstance(content, Epoch):
        _missed(one, steps)
        one.feed(content)
        return
    recorded, epochs, committed = content
    steps.append(Step(recorded.key, epochs, recorded, one.open))
    one.open = None
    if not committed:
        one.state = one.before  # as the leader did


def _missed(one: _Set, steps: list[Step]) -> None:
    """A decision taken again that the log doesn't have."""
    if one.open is not None:
        steps.append(Step(one.open.key, one.epochs, None, one.open))
        one.open = None


def text(steps: Sequence[Step]) -> str:
    """What the command prints."""
    lines: list[str] = []
    for step in steps:
        shown = step.recorded or step.again
        assert shown is not None
        mark = "same" if step.same else "only in the replay" if step.recorded is None else "DIFFERENT"
        lines.append(f"{step.key}, epoch {step.epochs}, version {shown.version} [{mark}]: {shown.reason}")
    same = sum(step.same for step in steps)
    lines.append(f"{same} of {len(steps)} decisions are the same")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The command `jaxcoll replay`. Returns 0 if all decisions are the same, else 1."""
    parser = argparse.ArgumentParser(
        prog="jaxcoll replay",
        description="Take the tuner's decisions of a run again.",
        epilog="Make a run log with JAXCOLL_TUNER=on JAXCOLL_RUN_LOG=run.jsonl python "
        "train.py. The policy is pure: a decision that comes out otherwise, "
        "after a change of the tuner for one, is marked, and the exit status 1.",
    )
    parser.add_argument("run", type=Path, help="the file that JAXCOLL_RUN_LOG named")
    steps = replay(parser.parse_args(argv).run)
    print(text(steps))
    return 0 if all(step.same for step in steps) else 1
