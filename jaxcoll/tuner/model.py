"""What the measurements say about the network: one capacity model, on which every (schedule, table) can be scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxcoll.sim.network import Connection, Direction, Network, star
from jaxcoll.tuner.detect import rate_text

SideKey = tuple[int, Direction]


@dataclasses.dataclass(frozen=True)
class Side:
    """One direction of a host: `strangers` flows of others share it, or it has `factor` of the usual rate."""

    host: int
    direction: Direction
    strangers: float = 0.0
    factor: float = 1.0
    seen: int = 0

    @property
    def key(self) -> SideKey:
        """Which side this is."""
        return self.host, self.direction

    def text(self) -> str:
        """For people."""
        if self.factor < 1:
            return f"host {self.host} {self.direction} at {self.factor:.2f} of the usual rate"
        return f"host {self.host} {self.direction} shared with {self.strangers:.1f} flows of others"


@dataclasses.dataclass(frozen=True)
class SlowPair:
    """Flows from rank `src` to rank `dst` together reach at most `rate` bytes/s."""

    src: int
    dst: int
    rate: float
    seen: int = 0


@dataclasses.dataclass(frozen=True)
class Groups:
    """Ranks in groups (label by rank); what leaves or enters a group shares a link of `uplink` bytes/s each way.

    With `loaded`, only what leaves that group does: others load a link between racks in one direction more than in the
    other.

    `apart` and `together` are the pairs of ranks seen to be slow and fast: the evidence, kept over changes of table.
    """

    labels: tuple[int, ...]
    uplink: float
    seen: int = 0
    apart: frozenset[tuple[int, int]] = frozenset()
    together: frozenset[tuple[int, int]] = frozenset()
    loaded: int | None = None

    def shared(self) -> list[list[tuple[int, int]]]:
        """The (src, dst) ranks of the flows on each link."""
        n, labels = range(len(self.labels)), self.labels
        leave = [[(a, b) for a in n for b in n if labels[a] == g != labels[b]] for g in sorted(set(labels))]
        if self.loaded is not None:
            return [leave[self.loaded]]
        return leave + [[(b, a) for a, b in link] for link in leave]

    def members(self) -> list[list[int]]:
        """Ranks of each group."""
        return [[r for r, own in enumerate(self.labels) if own == label] for label in sorted(set(self.labels))]


@dataclasses.dataclass(frozen=True)
class Model:
    """A host's usual `rate` in bytes/s each way, and what departs from it; `seen` is the epoch of the last evidence."""

    rate: float
    connection: Connection = "pair"
    sides: tuple[Side, ...] = ()
    pairs: tuple[SlowPair, ...] = ()
    groups: Groups | None = None

    @property
    def clean(self) -> bool:
        """Whether nothing departs from the usual."""
        return not (self.sides or self.pairs or self.groups)

    @property
    def items(self) -> float:
        """How much the model assumes: what a simpler one must be worse by to lose."""
        # Of two groupings that explain alike, the one with fewer groups is the likelier.
        groups = 1 + 0.1 * len(set(self.groups.labels)) if self.groups else 0
        return len(self.sides) + len(self.pairs) + groups

    @property
    def shape(self) -> tuple[object, ...]:
        """Which things are assumed, without their amounts."""
        sides = sorted((s.host, s.direction, s.factor < 1) for s in self.sides)
        groups = (self.groups.labels, self.groups.loaded) if self.groups else None
        return self.connection, tuple(sides), tuple(sorted((p.src, p.dst) for p in self.pairs)), groups

    def side(self, key: SideKey) -> Side:
        """What is assumed of a side."""
        return next((s for s in self.sides if s.key == key), Side(*key))

    def with_side(self, side: Side) -> Model:
        """With one side changed; a side that is as usual is left out."""
        rest = tuple(s for s in self.sides if s.key != side.key)
        usual = side.strangers <= 0.05 and side.factor >= 0.98
        return dataclasses.replace(self, sides=rest if usual else (*rest, side))

    def network(self, host_of: Sequence[int], alpha: float) -> Network:
        """The network that the model stands for."""
        net = star(max(host_of) + 1, self.rate, alpha=alpha)
        if list(host_of) != list(range(len(host_of))):
            net = dataclasses.replace(net, host=tuple(host_of), routes=_routes(host_of, max(host_of) + 1))
        net = dataclasses.replace(net, connection=self.connection)
        for side in self.sides:
            net = net.slow(side.host, side.direction, side.factor) if side.factor < 1 else net
            net = net.congest(side.host, side.strangers, side.direction)
        for pair in self.pairs:
            net = net.limit_pairs([(pair.src, pair.dst)], pair.rate)
        if self.groups is not None:
            for link in self.groups.shared():
                net = net.limit_pairs(link, self.groups.uplink)
        return net

    def hot_ranks(self, host_of: Sequence[int]) -> list[int]:
        """Ranks that a swap could take out of the way of something."""
        hosts = {side.host for side in self.sides}
        hot = {rank for rank, host in enumerate(host_of) if host in hosts}
        hot |= {end for pair in self.pairs for end in (pair.src, pair.dst)}
        if self.groups is not None:
            hot |= set(range(len(host_of)))
        return sorted(hot)

    def forget(self, before: int) -> Model:
        """Without what no flow has shown since epoch `before`."""
        return dataclasses.replace(
            self,
            sides=tuple(s for s in self.sides if s.seen >= before),
            pairs=tuple(p for p in self.pairs if p.seen >= before),
            groups=self.groups if self.groups is not None and self.groups.seen >= before else None,
        )

    def text(self) -> str:
        """For people."""
        parts = [side.text() for side in self.sides]
        parts += [f"pair {p.src}->{p.dst} at {rate_text(p.rate)}" for p in self.pairs[:4]]
        if len(self.pairs) > 4:
            parts.append(f"{len(self.pairs) - 4} more slow pairs")
        if self.groups is not None:
            groups = [",".join(map(str, group)) for group in self.groups.members()]
            rate, loaded = rate_text(self.groups.uplink), self.groups.loaded
            apart = f"groups {' | '.join(groups)} behind links of {rate}"
            parts.append(apart if loaded is None else f"what leaves the ranks {groups[loaded]} shares {rate}")
        return "; ".join(parts) or "as usual"


def _routes(host_of: Sequence[int], hosts: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    host = np.asarray(host_of, np.int64)
    n = len(host)
    routes = np.full((1, n, n, 2), -1, np.int64)
    routes[0, :, :, 0] = host[:, None]
    routes[0, :, :, 1] = hosts + host[None, :]
    same = host[:, None] == host[None, :]
    routes[0, same, 0] = 2 * hosts + np.broadcast_to(host[:, None], (n, n))[same]
    routes[0, same, 1] = -1
    return routes
