"""The processes that the benchmark's variants run in."""

from __future__ import annotations

import base64
import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence

from jaxcoll.bench.control import Listener, Message
from jaxcoll.bench.groups import Group
from jaxcoll.errors import JaxcollError
from jaxcoll.schedule import Schedule, Table, decode
from jaxcoll.testbed.net import Testbed
from jaxcoll.testbed.plan import Plan, environment, group_of
from jaxcoll.testbed.ranks import COORDINATOR_PORT, HostRanks


class Variants:
    """Groups of ranks, started when needed and kept while that is fair.

    `wrong`: wrong elements while they warmed up.
    """

    def __init__(self, bed: Testbed, plan: Plan, say: Callable[[str], None]):
        self._bed, self._plan, self._say = bed, plan, say
        self._groups: dict[str, tuple[Group, contextlib.ExitStack]] = {}
        self._ports = iter(range(COORDINATOR_PORT, 65_000))
        self._versions = itertools.count(1)
        self._tables: dict[str, Table | None] = {}
        self.wrong = 0

    def get(self, variant: str, hosts: Sequence[str]) -> Group:
        """The variant's group; a new one has compiled and warmed up when this returns."""
        name = group_of(variant)
        if name not in self._groups:
            self._say(f"starting {len(hosts)} ranks of {name}")
            stack = contextlib.ExitStack()
            try:
                listener = stack.enter_context(Listener())
                command = [sys.executable, "-m", "jaxcoll.testbed.worker"]
                # A crash in native code leaves a stack in the process's last words.
                env = {**listener.env, "PYTHONFAULTHANDLER": "1", **environment(self._plan, name)}
                ranks = stack.enter_context(HostRanks(self._bed, command, hosts, env=env, port=next(self._ports)))
                group = Group(ranks, listener, len(hosts))
                stack.callback(group.close)
                what: Message = {"impl": "lax" if name == "lax" else "jaxcoll", "schedule": self._plan.schedule}
                what |= {"nbytes": self._plan.size, "warmup": self._plan.warmup, "tuned": self._plan.is_tuned(name)}
                answers = group.ask(self._plan.deadline, do="prepare", **what)
                self.wrong += sum(answer["wrong"] for answer in answers)
            except BaseException:
                stack.close()
                raise
            self._groups[name] = (group, stack)
            self._tables[name] = None
        return self._groups[name][0]

    def drop(self, variants: Sequence[str]) -> None:
        """End these variants' processes."""
        for name in {group_of(variant) for variant in variants}:
            if name in self._groups:
                self._groups.pop(name)[1].close()

    def schedule(self, variant: str) -> Schedule:
        """The schedule that a variant's running group started with."""
        group = self._groups[group_of(variant)][0]
        return decode(base64.b64decode(group.ask(self._plan.deadline, do="program")[0]["blob"]))

    def install(self, variant: str, table: Table | None) -> None:
        """Bring a table into force in a variant's running group, unless it is; None: the one that it started with."""
        name = group_of(variant)
        before = self._tables[name]
        if table is before:
            return
        data = Table.identity(self.schedule(name)) if table is None else table
        text = base64.b64encode(data.to_bytes()).decode("ascii")
        group = self._groups[name][0]
        answers = group.ask(self._plan.deadline, do="install", table=text, version=next(self._versions))
        if any(answer["points"] != answers[0]["points"] for answer in answers):
            raise JaxcollError(f"the ranks of {name} have not all begun the same calls: a table can't be put in force")
        self._tables[name] = table

    def __enter__(self) -> Variants:
        return self

    def __exit__(self, *error: object) -> None:
        self.drop(list(self._groups))
