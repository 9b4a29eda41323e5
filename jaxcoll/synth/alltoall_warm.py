"""What an all-to-all solve leaves for the next one, and its file form."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from jaxcoll.errors import UsageError
from jaxcoll.synth.alltoall_cg import Columns
from jaxcoll.synth.alltoall_net import FloatArray, IntArray, Net
from jaxcoll.synth.alltoall_round import Router, Routing, arc_loads
from jaxcoll.synth.alltoall_schedule import hops

FORMAT, VERSION = "jaxcoll-all-to-all-warm", 1


@dataclass(frozen=True)
class AllToAllWarm:
    """The solved network, the trees of the last master basis, and the routing of the schedule."""

    net: Net
    columns: Columns
    routing: Routing

    def links(self) -> list[tuple[int, int, int, float]]:
        """Every used link: (tail, head, chunks on it, share of its capacity left unused at the schedule's rate).

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
                f"the warm start is of {self.net.ranks} ranks and {self.net.nodes - self.net.ranks} switches, the topology "
                f"has {net.ranks} and {net.nodes - net.ranks}; leave warm out"
            )
        index = net.arc_index
        return np.array([*(index.get(key, -1) for key in self.net.arc_index), -1])

    def columns_in(self, net: Net, arcs: IntArray) -> Columns:
        """The trees that still exist, and prices for the arcs (new arcs: the mean price)."""
        lost = arcs[:-1] < 0
        keep = np.flatnonzero(self.columns.load[lost].sum(axis=0) == 0)
        load = np.zeros((net.arcs, len(keep)))
        load[arcs[:-1][~lost]] = self.columns.load[np.ix_(~lost, keep)]
        weight = np.full(net.arcs, self.columns.weight.mean())
        weight[arcs[:-1][~lost]] = self.columns.weight[~lost]
        return Columns(self.columns.source[keep], load, weight)

    def routing_in(self, net: Net, arcs: IntArray, router: Router, steps: int) -> Routing:
        """The old routing on `net`; paths over lost links, or longer than `steps`, are replaced."""
        old = self.routing
        path = arcs[old.path].astype(np.int32)
        broken = ((path < 0) & (old.path >= 0)).any(axis=1) | (hops(self.net, old.path) > steps)
        path[broken] = -1
        routing = Routing(old.chunks, old.source, old.dest, path, arc_loads(path, net.arcs))
        router.repair(routing, broken)
        return routing


def _pack(**arrays: FloatArray | IntArray) -> str:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return base64.b64encode(buffer.getvalue()).decode()


def warm_to_json(warm: AllToAllWarm) -> str:
    """A JSON object; the arrays are inside as base64 of numpy's compressed form."""
    net, columns, routing = warm.net, warm.columns, warm.routing
    rows, cols = np.nonzero(columns.load)
    data = _pack(
        tail=net.tail, head=net.head, source=columns.source, weight=columns.weight,
        load_row=rows, load_col=cols, load=columns.load[rows, cols], path=routing.path,
    )  # fmt: skip
    head = {"format": FORMAT, "version": VERSION, "ranks": net.ranks, "nodes": net.nodes, "names": net.names}
    return json.dumps(
        {**head, "capacity": [str(c) for c in net.capacity], "chunks": routing.chunks, "data": data}, indent=1
    )


def warm_from_json(text: str, source: str = "<string>") -> AllToAllWarm:
    """Reads what `warm_to_json` wrote. Raises UsageError that names the file and what is wrong with it."""
    try:
        head = json.loads(text)
        if head["format"] != FORMAT or head["version"] != VERSION:
            raise ValueError(f"format {head['format']!r} version {head['version']!r}")
        data = np.load(io.BytesIO(base64.b64decode(head["data"])), allow_pickle=False)
        net = Net(
            head["ranks"], head["nodes"], data["tail"], data["head"], tuple(map(Fraction, head["capacity"])), tuple(head["names"])
        )
        load = np.zeros((net.arcs, len(data["source"])))
        load[data["load_row"], data["load_col"]] = data["load"]
        source_, dest = _pairs(net.ranks, head["chunks"])
        path = data["path"]
        if path.shape[0] != len(source_) or path.max(initial=-1) >= net.arcs:
            raise ValueError("paths that don't fit the network")
        routing = Routing(head["chunks"], source_, dest, path, arc_loads(path, net.arcs))
        return AllToAllWarm(net, Columns(data["source"], load, data["weight"]), routing)
    except (ValueError, KeyError, TypeError, OSError, IndexError) as error:
        raise UsageError(
            f"{source}: not a warm start of all_to_all, version {VERSION} ({error}); write one with --warm-out or warm_to_json"
        ) from None


def _pairs(ranks: int, chunks: int) -> tuple[IntArray, IntArray]:
    source, dest = np.divmod(np.arange(ranks * ranks), ranks)
    keep = source != dest
    return np.repeat(source[keep], chunks), np.repeat(dest[keep], chunks)
