"""The capacitated graph that every synthesiser reads.

Nodes are numbered: the ranks first (0..nranks-1), then the switches. A link is directed and carries an exact capacity
(`Fraction`), in the unit that the topology names (Gbit/s unless said otherwise). A switch forwards, it neither
duplicates nor holds data; a rank may do both.
"""

from __future__ import annotations

import functools
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from jaxcoll.errors import TopologyError

FORMAT = "jaxcoll-topology"
VERSION = 1

Capacity = int | Fraction | str | float


def exact(value: Capacity, where: str) -> Fraction:
    """`value` as an exact fraction; floats are taken at their shortest decimal form (0.1 is 1/10).

    Raises:
        TopologyError: not a number, not finite, zero or negative; `where` names the link in the message.
    """
    try:
        if isinstance(value, bool):
            raise ValueError
        number = Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
    except (ValueError, TypeError, ZeroDivisionError):
        raise TopologyError(
            f"{where}: capacity {value!r} is not a number; give an integer, a decimal or 'a/b'"
        ) from None
    if number <= 0:
        raise TopologyError(f"{where}: capacity {value} must be positive; leave a dead link out instead")
    return number


@dataclass(frozen=True)
class Topology:
    """A directed network. Build it with `Topology.of`, a builder, or `Topology.load`; equal graphs compare equal.

    Attributes:
        name: what messages and results call it.
        nranks: nodes 0..nranks-1 are ranks, the rest switches.
        nodes: a unique name for each node.
        capacity: (src node, dst node) -> capacity in `unit`, all positive, no self-links.
        unit: of the capacities.
        hosts: per rank, the host that it sits in (all 0 where the network has no hosts).
    """

    name: str
    nranks: int
    nodes: tuple[str, ...]
    capacity: Mapping[tuple[int, int], Fraction]
    unit: str = "Gbit/s"
    hosts: tuple[int, ...] = field(default=())

    @staticmethod
    def of(
        name: str,
        ranks: Sequence[str],
        switches: Sequence[str],
        links: Iterable[tuple[str, str, Capacity]],
        *,
        unit: str = "Gbit/s",
        hosts: Sequence[int] | None = None,
        both_ways: bool = False,
    ) -> Topology:
        """A checked topology from node names and links (src, dst, capacity); parallel links add up.

        Raises:
            TopologyError: a doubled or unknown node, a self-link, a bad capacity, or ranks that can't reach each other.
        """
        nodes = (*ranks, *switches)
        index: dict[str, int] = {}
        for node in nodes:
            if node in index:
                raise TopologyError(f"topology {name!r}: node {node!r} is listed twice; names must be unique")
            index[node] = len(index)
        capacity: dict[tuple[int, int], Fraction] = {}
        for position, (src, dst, value) in enumerate(links):
            where = f"topology {name!r}: links[{position}] ({src} -> {dst})"
            for node in (src, dst):
                if node not in index:
                    raise TopologyError(f"{where}: unknown node {node!r}; list it under ranks or switches")
            if src == dst:
                raise TopologyError(f"{where}: a link from a node to itself carries nothing; remove it")
            amount = exact(value, where)
            pair = (index[src], index[dst])
            for key in (pair, (pair[1], pair[0])) if both_ways else (pair,):
                capacity[key] = capacity.get(key, Fraction(0)) + amount
        groups = tuple(hosts) if hosts is not None else (0,) * len(ranks)
        topology = Topology(name, len(ranks), nodes, capacity, unit, groups)
        topology.validate()
        return topology

    @property
    def nswitches(self) -> int:
        """How many nodes are switches."""
        return len(self.nodes) - self.nranks

    def is_switch(self, node: int) -> bool:
        """True for a node that only forwards."""
        return node >= self.nranks

    def index(self, node: str) -> int:
        """The number of the node called `node`."""
        try:
            return self.nodes.index(node)
        except ValueError:
            raise TopologyError(f"topology {self.name!r} has no node {node!r}; it has {_some(self.nodes)}") from None

    def validate(self) -> None:
        """Raises TopologyError, naming the node, unless there are ranks and each reaches every other."""
        if "_valid" in self.__dict__:
            return
        if self.nranks < 1:
            raise TopologyError(f"topology {self.name!r} has no ranks; list at least one")
        if len(self.hosts) != self.nranks:
            raise TopologyError(
                f"topology {self.name!r}: {len(self.hosts)} hosts, {self.nranks} ranks; give one per rank"
            )
        for (src, dst), amount in self.capacity.items():
            if amount <= 0:
                raise TopologyError(
                    f"topology {self.name!r}: link {self.nodes[src]} -> {self.nodes[dst]} has capacity {amount}; "
                    "it must be positive (leave a dead link out)"
                )
        for forward, text in ((True, "can't be reached from"), (False, "can't reach")):
            seen = self._reach(forward)
            for rank in range(self.nranks):
                if rank not in seen:
                    raise TopologyError(
                        f"topology {self.name!r} is disconnected: rank {self.nodes[rank]!r} {text} rank "
                        f"{self.nodes[0]!r}; add the missing link or remove the rank"
                    )
        self.__dict__["_valid"] = True  # a topology doesn't change: checking it once is enough

    def _reach(self, forward: bool) -> set[int]:
        """Nodes reachable from rank 0 (or, against the links, that reach it)."""
        near: dict[int, list[int]] = {}
        for src, dst in self.capacity:
            a, b = (src, dst) if forward else (dst, src)
            near.setdefault(a, []).append(b)
        seen, queue = {0}, deque([0])
        while queue:
            for node in near.get(queue.popleft(), ()):
                if node not in seen:
                    seen.add(node)
                    queue.append(node)
        return seen

    def served(self) -> dict[int, set[int]]:
        """Per switch, the hosts of the ranks that it is linked to; -1 stands for a switch next to it."""
        hosts: dict[int, set[int]] = {switch: set() for switch in range(self.nranks, len(self.nodes))}
        for ends in self.capacity:
            for switch, other in (ends, ends[::-1]):
                if switch >= self.nranks:
                    hosts[switch].add(self.hosts[other] if other < self.nranks else -1)
        return hosts

    def unbalanced(self) -> list[int]:
        """Switches whose capacity in differs from their capacity out (such a switch wastes the difference)."""
        tails, heads, amounts, _ = self.integers()
        balance = [0] * len(self.nodes)
        for tail, head, amount in zip(tails, heads, amounts, strict=True):
            balance[tail] -= amount
            balance[head] += amount
        return [node for node in range(self.nranks, len(self.nodes)) if balance[node]]

    def reversed(self) -> Topology:
        """The same network with every link turned round (a ReduceScatter here is an AllGather there)."""
        turned = {(dst, src): amount for (src, dst), amount in self.capacity.items()}
        return Topology(f"{self.name}:reversed", self.nranks, self.nodes, turned, self.unit, self.hosts)

    def with_capacity(self, changes: Mapping[tuple[int, int], Capacity | None], name: str | None = None) -> Topology:
        """A copy with some links' capacities replaced, added, or (None) removed; checked anew."""
        capacity = dict(self.capacity)
        for (src, dst), value in changes.items():
            if value is None:
                capacity.pop((src, dst), None)
            else:
                capacity[src, dst] = exact(value, f"topology {self.name!r}: {self.nodes[src]} -> {self.nodes[dst]}")
        changed = Topology(name or self.name, self.nranks, self.nodes, capacity, self.unit, self.hosts)
        changed.validate()
        return changed

    def integers(self) -> tuple[list[int], list[int], list[int], Fraction]:
        """(tails, heads, amounts, unit): every link, its capacity being amount * unit, with the greatest such unit."""
        return self._integers

    @functools.cached_property
    def _integers(self) -> tuple[list[int], list[int], list[int], Fraction]:
        capacities = list(self.capacity.values())
        numerators = [amount.numerator for amount in capacities]
        denominators = [amount.denominator for amount in capacities]
        scale = math.lcm(*set(denominators))
        whole = [n * (scale // d) for n, d in zip(numerators, denominators, strict=True)] if scale > 1 else numerators
        divisor = math.gcd(*whole) or 1
        return (
            [tail for tail, _ in self.capacity],
            [head for _, head in self.capacity],
            [amount // divisor for amount in whole],
            Fraction(divisor, scale),
        )

    def unit_capacity(self) -> Fraction:
        """The greatest fraction of which every capacity is a whole multiple (the gcd of all capacities)."""
        return self._integers[3]

    def to_json(self) -> str:
        """The file form: names and links; `Topology.from_json` gives an equal topology back."""
        links = [
            [self.nodes[s], self.nodes[d], int(c) if c.denominator == 1 else str(c)]
            for (s, d), c in self.capacity.items()
        ]
        head: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "unit": self.unit,
            "ranks": list(self.nodes[: self.nranks]),
            "switches": list(self.nodes[self.nranks :]),
            "hosts": list(self.hosts),
        }
        body = ",\n".join("    " + json.dumps(link) for link in links)
        return json.dumps(head, indent=2)[:-2] + ',\n  "links": [\n' + body + "\n  ]\n}\n"

    @staticmethod
    def from_json(text: str, source: str = "<string>") -> Topology:
        """Reads the file form.

        Raises:
            TopologyError: names the line (malformed JSON), the field, the link or the node at fault.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise TopologyError(f"{source}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
        except RecursionError:
            raise TopologyError(f"{source}: no topology: its lists lie too deep in each other") from None
        except ValueError as error:  # a number of thousands of digits
            raise TopologyError(f"{source}: no topology: {error}") from None
        try:
            return _from_data(data, source)
        except TopologyError as error:
            line = _line_of(text, str(error))
            raise TopologyError(f"{source}{line}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes the file form."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Topology:
        """Reads a file written by `save`, or by hand in the same form."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TopologyError(f"{path}: can't be read as a topology: {error}") from None
        return Topology.from_json(text, str(path))


def _from_data(data: Any, source: str) -> Topology:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TopologyError(f'a topology file is a JSON object with "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise TopologyError(f"version {data.get('version')!r} is unknown; this reader knows version {VERSION}")
    for key in ("ranks", "switches"):
        names = data.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TopologyError(f"{key!r} must be a list of node names")
    links = data.get("links")
    if not isinstance(links, list):
        raise TopologyError("'links' must be a list of [src, dst, capacity]")
    for position, link in enumerate(links):
        if not (isinstance(link, list) and len(link) == 3 and isinstance(link[0], str) and isinstance(link[1], str)):
            raise TopologyError(f"links[{position}]: {link!r} is not [src, dst, capacity]")
    hosts = data.get("hosts")
    if hosts is not None and not (isinstance(hosts, list) and all(type(host) is int for host in hosts)):
        raise TopologyError("'hosts' must be a list of integers, one per rank")
    return Topology.of(
        str(data.get("name", Path(source).stem)),
        data.get("ranks", []),
        data.get("switches", []),
        [(link[0], link[1], link[2]) for link in links],
        unit=str(data.get("unit", "Gbit/s")),
        hosts=hosts,
        both_ways=data.get("both_ways") is True,
    )


def _line_of(text: str, message: str) -> str:
    """', line 12' for a message about links[i], where each link starts with '[' below the key "links"."""
    start, mark = text.find('"links"'), message.find("links[")
    if start < 0 or mark < 0:
        return ""
    position = int(message[mark + 6 : message.index("]", mark)])
    at = text.find("[", start)
    for _ in range(position + 1):
        at = text.find("[", at + 1)
    return f", line {text.count(chr(10), 0, at) + 1}" if at >= 0 else ""


def _some(names: Sequence[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
