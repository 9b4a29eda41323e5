"""What an all-to-all solve leaves for the next one, and its file form."""

from __future__ import annotations

import base64
import io
import json
import zipfile
import zlib
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from jaxcoll.errors import MALFORMED, UsageError
from jaxcoll.schedule import Schedule
from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net
from jaxcoll.synth.alltoall_round import Router
from jaxcoll.synth.alltoall_routing import Routing
from jaxcoll.synth.alltoall_schedule import hops
from jaxcoll.synth.path_trees import Int32Array, Trees

FORMAT, VERSION = "jaxcoll-all-to-all-warm", 2

# What reading numpy's compressed form raises beyond `MALFORMED`: RuntimeError where it says that it is encrypted.
_BAD_ARCHIVE = (OSError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class AllToAllWarm:
    """The solved network, the trees in use at the LP's end, its arc prices (float64 [arcs]), and the routing of the
    schedule."""

    net: Net
    trees: Trees
    weight: FloatArray
    routing: Routing
    schedule: Schedule | None = field(default=None, compare=False)
    """Of `routing`, if it was made; not kept in the file."""

    def links(self) -> list[tuple[int, int, int, float]]:
        """Every used link: (tail, head, parts on it, share of its capacity left unused at the schedule's rate).

        Links with the least share left are the bottleneck cut that the planner watches (MCCL 3.1, base slack).
        """
        used = np.flatnonzero(self.routing.load)
        share = self.routing.load[used] / self.net.cap[used]
        slack = 1 - share / share.max()
        load = self.routing.load[used]
        return [
            (int(self.net.tail[a]), int(self.net.head[a]), int(n), float(s))
            for a, n, s in zip(used, load, slack, strict=True)
        ]

    def arcs_in(self, net: Net) -> IntArray:
        """For every arc of this network its number in `net` or -1, int64 [arcs + 1] (the last for the padding)."""
        if (net.ranks, net.nodes) != (self.net.ranks, self.net.nodes):
            raise UsageError(
                f"the warm start is of {self.net.ranks} ranks and {self.net.nodes - self.net.ranks} switches, "
                f"the topology has {net.ranks} and {net.nodes - net.ranks}; leave warm out"
            )
        at = np.minimum(np.searchsorted(net.key, self.net.key), net.arcs - 1)
        return np.append(np.where(net.key[at] == self.net.key, at, -1), -1)

    def columns_in(self, net: Net, arcs: IntArray) -> tuple[Trees, FloatArray]:
        """The trees that still exist, and prices for the arcs (new arcs: the mean price)."""
        gone = np.bincount(self.trees.tree, arcs[self.trees.arc] < 0, len(self.trees)) > 0
        kept = self.trees.take(np.flatnonzero(~gone))
        key = kept.tree * net.arcs + arcs[kept.arc]
        weight = np.full(net.arcs, self.weight.mean())
        there = arcs[:-1] >= 0
        weight[arcs[:-1][there]] = self.weight[there]
        return Trees.from_keys(kept.source, net.arcs, key, kept.units), weight

    def routing_in(self, net: Net, arcs: IntArray, router: Router, steps: int) -> Routing:
        """The old routing on `net`, itself where nothing changes; paths over lost links, or longer than `steps`, are
        replaced."""
        old = self.routing
        same = net.arcs == self.net.arcs and bool((arcs[:-1] == np.arange(net.arcs)).all())
        if same and steps >= net.ranks - 1:
            return old
        path = arcs[old.path].astype(np.int32)
        broken = ((path < 0) & (old.path >= 0)).any(axis=1) | (hops(self.net, old.path) > steps)
        path[broken] = -1
        routing = Routing.of(old.parts, old.source, old.dest, old.weight, path, net.arcs)
        router.repair(routing, broken)
        return routing


def _pack(**arrays: FloatArray | IntArray | Int32Array) -> str:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return base64.b64encode(buffer.getvalue()).decode()


def warm_to_json(warm: AllToAllWarm) -> str:
    """A JSON object; the arrays are inside as base64 of numpy's compressed form."""
    net, trees, routing = warm.net, warm.trees, warm.routing
    data = _pack(
        tail=net.tail, head=net.head, source=trees.source, start=trees.start, arc=trees.arc, units=trees.units,
        weight=warm.weight, path=routing.path, pair=routing.pair(), parts=routing.weight,
    )  # fmt: skip
    head = {"format": FORMAT, "version": VERSION, "ranks": net.ranks, "nodes": net.nodes, "names": net.names}
    capacity = [str(c) for c in net.capacity]
    return json.dumps({**head, "capacity": capacity, "parts": routing.parts, "data": data}, indent=1)


def warm_from_json(text: str, source: str = "<string>") -> AllToAllWarm:
    """Reads what `warm_to_json` wrote. Raises UsageError that names the file and what is wrong with it."""
    try:
        return _read(json.loads(text))
    except (*MALFORMED, *_BAD_ARCHIVE) as error:
        raise UsageError(
            f"{source}: not a warm start of all_to_all, version {VERSION} ({error}); write one with warm_to_json"
        ) from None


def load(path: str | Path) -> AllToAllWarm:
    """From a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't be read as warm-start data: {error}") from None
    return warm_from_json(text, str(path))


def _read(head: dict[str, Any]) -> AllToAllWarm:
    if head["format"] != FORMAT or head["version"] != VERSION:
        raise ValueError(f"format {head['format']!r} version {head['version']!r}")
    data = np.load(io.BytesIO(base64.b64decode(head["data"])), allow_pickle=False)
    capacity = tuple(map(Fraction, head["capacity"]))
    net = Net(head["ranks"], head["nodes"], data["tail"], data["head"], capacity, tuple(head["names"]))
    trees = Trees(data["source"], data["start"], data["arc"], data["units"])
    path, pair, parts = data["path"], data["pair"], data["parts"]
    used = max(path.max(initial=-1), trees.arc.max(initial=-1))
    if not len(net.tail) == len(net.head) == len(data["weight"]) == net.arcs or used >= net.arcs:
        raise ValueError("arrays that don't fit the network")
    source, dest = np.divmod(pair, net.ranks)
    whole = np.zeros(net.ranks**2, np.int64)
    np.add.at(whole, pair, parts)
    if not len(pair) == len(parts) == len(path) or (whole.reshape(net.ranks, -1) != _shares(net, head["parts"])).any():
        raise ValueError("pairs whose blocks are not routed as a whole")
    return AllToAllWarm(net, trees, data["weight"], Routing.of(head["parts"], source, dest, parts, path, net.arcs))


def _shares(net: Net, parts: int) -> IntArray:
    """Parts of every pair, int64 [ranks, ranks]."""
    return parts * (1 - np.eye(net.ranks, dtype=np.int64))
