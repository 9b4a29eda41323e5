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
from jaxcoll.schedule.ir import MAX_WEIGHT
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
    net = _net(head, data)
    weight = _array(data, "weight", np.float64)
    if len(weight) != net.arcs or not (np.isfinite(weight) & (weight >= 0)).all() or not weight.any():
        raise ValueError(f"weight is not a price for each of the {net.arcs} links")
    return AllToAllWarm(net, _trees(data, net), weight, _routing(data, net, head["parts"]))


def _net(head: dict[str, Any], data: Any) -> Net:
    ranks, nodes, names = head["ranks"], head["nodes"], tuple(head["names"])
    if not (type(ranks) is type(nodes) is int and 1 <= ranks <= nodes == len(names)):
        raise ValueError(f"{ranks} ranks among {nodes} nodes of {len(names)} names")
    ends = _array(data, "tail", np.int64), _array(data, "head", np.int64)
    net = Net(ranks, nodes, *ends, tuple(map(Fraction, head["capacity"])), names)
    for name, end in zip(("tail", "head"), ends, strict=True):
        _check_range(name, end, 0, nodes - 1)
        if len(end) != net.arcs:
            raise ValueError(f"{len(end)} numbers in {name} for {net.arcs} capacities")
    if (np.diff(net.key) <= 0).any():
        raise ValueError("links that are not in the order of tail and head")
    if not (np.isfinite(net.cap) & (net.cap > 0)).all():
        raise ValueError("a capacity that is not above 0")
    return net


def _trees(data: Any, net: Net) -> Trees:
    source, start, arc = (_array(data, name, np.int64) for name in ("source", "start", "arc"))
    trees = Trees(source, start, arc, _array(data, "units", np.float64))
    _check_range("source", source, 0, net.ranks - 1)
    _check_range("arc", arc, 0, net.arcs - 1)
    if len(start) != len(source) + 1 or start[0] != 0 or (np.diff(start) < 0).any():
        raise ValueError(f"start doesn't cut {len(source)} trees")
    if not start[-1] == len(arc) == len(trees.units) or (np.diff(trees.tree * net.arcs + arc) <= 0).any():
        raise ValueError("trees whose arcs are not in order")
    if not (np.isfinite(trees.units) & (trees.units > 0)).all():
        raise ValueError("a tree with units that are not above 0")
    return trees


def _routing(data: Any, net: Net, parts: int) -> Routing:
    path = _array(data, "path", np.int32, 2)
    pair, weight = _array(data, "pair", np.int64), _array(data, "parts", np.int64)
    _check_range("path", path, -1, net.arcs - 1)
    _check_range("pair", pair, 0, net.ranks**2 - 1)
    _check_range("parts", weight, 1, parts)
    pairs = net.ranks * (net.ranks - 1)
    if not pairs <= len(pair) == len(weight) == len(path) or type(parts) is not int or not 1 <= parts <= MAX_WEIGHT:
        raise ValueError(f"{len(path)} paths in {parts} parts for {len(pair)} of {pairs} pairs")
    whole = np.zeros(net.ranks**2, np.int64)
    np.add.at(whole, pair, weight)
    if (whole.reshape(net.ranks, -1) != parts * (1 - np.eye(net.ranks, dtype=np.int64))).any():
        raise ValueError("pairs whose blocks are not routed as a whole")
    source, dest = np.divmod(pair, net.ranks)
    if not _leads(net, path, source, dest):
        raise ValueError("a path that doesn't lead from its source to its destination")
    return Routing.of(parts, source, dest, weight, path, net.arcs)


def _leads(net: Net, path: Int32Array, source: IntArray, dest: IntArray) -> bool:
    at, fits = source.copy(), True
    for column in path.T:
        moves = np.flatnonzero(column >= 0)
        fits = fits and bool((net.tail[column[moves]] == at[moves]).all())
        at[moves] = net.head[column[moves]]
    return fits and bool((at == dest).all())


def _array(data: Any, name: str, dtype: type[np.generic], dimensions: int = 1) -> Any:
    array = data[name]
    if array.dtype != dtype or array.ndim != dimensions:
        raise ValueError(f"{name} is not of {np.dtype(dtype)}, in {dimensions} dimensions")
    return array


def _check_range(name: str, values: IntArray | Int32Array, low: int, high: int) -> None:
    if ((values < low) | (values > high)).any():
        raise ValueError(f"{name} has numbers outside {low}..{high}")
