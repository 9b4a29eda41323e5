"""Schedules of other synthesisers as inputs: SCCL's `.msccl.json` and TE-CCL's result JSON.

Both are lists of sends with a time, which is what a schedule is here; what has to be worked out is which collective
they compute, where the two differ from it: SCCL addresses chunks by a number, TE-CCL sends through switches.
The result is not verified here; `jaxcoll.schedule.check` does that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxcoll.errors import MALFORMED, ScheduleError
from jaxcoll.schedule.ir import MAX_RANKS, Chunk, Collective, Edge, Kind, Op, Schedule, independent_graphs

_FLOW = re.compile(r"Chunk (\d+) from (\d+) traveled over (\d+)->(\d+) in epoch (\d+)")
_NUMBER = re.compile(r"(\d+)\D*$")


def load_foreign(path: str | Path) -> Schedule:
    """A schedule from an SCCL or TE-CCL JSON file, told apart by their keys.

    Raises:
        ScheduleError: neither form, or a fault in it; the message names the file and the line or key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path}: can't be read: {error}") from None
    return loads_foreign(text, str(path))


def loads_foreign(text: str, source: str = "<string>") -> Schedule:
    """As `load_foreign`, from text."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{source}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from None
    except RecursionError:
        raise ScheduleError(f"{source}: no schedule: its lists lie too deep in each other") from None
    except ValueError as error:  # a number of thousands of digits
        raise ScheduleError(f"{source}: no schedule: {error}") from None
    reader = foreign_reader(data)
    if reader is None:
        raise ScheduleError(f"{source}: neither SCCL ('msccl_type': 'algorithm') nor TE-CCL ('7-Flows') JSON")
    try:
        return reader(data, Path(source).name.split(".")[0])
    except ScheduleError as error:
        raise ScheduleError(f"{source}: {error}") from None
    except MALFORMED as error:
        raise ScheduleError(f"{source}: malformed: {type(error).__name__}: {error}") from None


def foreign_reader(data: Any) -> Callable[[Any, str], Schedule] | None:
    """The reader for parsed JSON of either form, None for any other."""
    if isinstance(data, dict):
        if data.get("msccl_type") == "algorithm":
            return _from_sccl
        if "7-Flows" in data or "6-Flows" in data:
            return _from_teccl
    return None


def _from_sccl(data: dict[str, Any], name: str) -> Schedule:
    collective: dict[str, Any] = data["collective"]
    ranks = int(collective["nodes"])
    if not 1 <= ranks <= MAX_RANKS:
        raise ScheduleError(f"collective.nodes is {ranks}; it must lie in 1..{MAX_RANKS}")
    pre: dict[int, set[int]] = {}
    post: dict[int, set[int]] = {}
    for position, chunk in enumerate(collective["chunks"]):
        address = int(chunk["addr"])
        for key, sets in (("pre", pre), ("post", post)):
            members = {int(rank) for rank in chunk[key]}
            if not all(0 <= rank < ranks for rank in members):
                raise ScheduleError(f"collective.chunks[{position}].{key} names ranks outside 0..{ranks - 1}")
            sets.setdefault(address, set()).update(members)
    kind, root = _kind(ranks, pre, post)
    order = sorted(pre, key=lambda address: (_home(kind, pre[address], post[address]), address))
    number = {address: i for i, address in enumerate(order)}
    chunks = tuple(_chunk(kind, pre[address], post[address]) for address in order)
    holds: dict[int, dict[int, set[int]]] = {address: {rank: {rank} for rank in pre[address]} for address in order}
    edges: list[Edge] = []
    for step, content in enumerate(data["steps"]):
        arrived: list[tuple[int, int, set[int]]] = []
        for position, (address, src, dst) in enumerate(content["sends"]):
            if address not in holds or src not in holds[address]:
                raise ScheduleError(
                    f"steps[{step}].sends[{position}]: rank {src} has nothing of chunk {address} to send"
                )
            value, own = holds[address][src], holds[address].get(dst, set())
            # A sum grows where the two sides hold different contributions; otherwise the value is handed on.
            op = Op.REDUCE if kind.reduces and own and not own & value else Op.COPY
            edges.append(Edge(step, src, dst, op, (number[address],)))
            arrived.append((address, dst, value | own if op is Op.REDUCE else value))
        for address, dst, value in arrived:
            holds[address][dst] = holds[address].get(dst, set()) | value if kind.reduces else value
    steps = len(data["steps"])
    return Schedule(name, Collective(kind, ranks, root), steps, chunks, independent_graphs(edges, "sccl"))


def _kind(ranks: int, pre: dict[int, set[int]], post: dict[int, set[int]]) -> tuple[Kind, int | None]:
    """The collective of these pre- and postconditions, and its root."""
    everybody = set(range(ranks))
    sources = {frozenset(members) for members in pre.values()}
    dests = {frozenset(members) for members in post.values()}
    single_source, single_dest = (all(len(m) == 1 for m in sets) for sets in (sources, dests))
    if sources == {frozenset(everybody)} and ranks > 1:
        if dests == {frozenset(everybody)}:
            return Kind.ALL_REDUCE, None
        if single_dest:
            return (Kind.REDUCE, next(iter(*dests))) if len(dests) == 1 else (Kind.REDUCE_SCATTER, None)
    if single_source:
        if dests == {frozenset(everybody)}:
            return (Kind.BROADCAST, next(iter(*sources))) if len(sources) == 1 < ranks else (Kind.ALL_GATHER, None)
        if single_dest:
            return Kind.ALL_TO_ALL, None
    raise ScheduleError(
        "the chunks' pre- and postconditions are none of all_gather, all_to_all, broadcast, reduce, reduce_scatter, "
        "all_reduce; only these can be imported"
    )


def _home(kind: Kind, pre: set[int], post: set[int]) -> tuple[int, int]:
    return (min(pre) if kind.has_src else 0, min(post) if kind.has_dst else 0)


def _chunk(kind: Kind, pre: set[int], post: set[int]) -> Chunk:
    return Chunk(min(pre) if kind.has_src else None, min(post) if kind.has_dst else None)


def _from_teccl(data: dict[str, Any], name: str) -> Schedule:
    flows: list[str] = data.get("7-Flows") or data.get("6-Flows") or []
    if "6-Demand_Met" not in data or any("with volume" in line for line in flows):
        raise ScheduleError(
            "its flows are fractions of chunks ('with volume ...'), which are no schedule yet; solve with whole chunks "
            "(a MILP objective) and import that"
        )
    # GPUs are numbered in one row with the switches: those that ask for data become ranks 0, 1, ... in their order.
    demand = _teccl_demand(data["6-Demand_Met"])
    nodes = sorted({node for (src, _), dests in demand.items() for node in (src, *dests)})
    rank = {node: i for i, node in enumerate(nodes)}
    wanted = {(rank[src], part): {rank[dst] for dst in dests} for (src, part), dests in demand.items()}
    ranks = len(nodes)
    fewest, most = (f(len(dests) for dests in wanted.values()) for f in (min, max))
    if fewest == most == ranks - 1:
        kind = Kind.ALL_GATHER
    elif fewest == most == 1:
        kind = Kind.ALL_TO_ALL
    else:
        raise ScheduleError("6-Demand_Met is neither an AllGather (every chunk to all) nor an AllToAll (each to one)")
    homes = {key: (key[0], min(dests) if kind.has_dst else 0) for key, dests in wanted.items()}
    order = sorted(wanted, key=lambda key: (homes[key], key))
    chunks = [Chunk(src, homes[src, part][1] if kind.has_dst else None) for src, part in order]
    if kind is Kind.ALL_TO_ALL:  # a rank's part for itself never travels, but has a place in the block
        chunks += [Chunk(rank, rank) for rank in range(ranks)]
    sends = _without_switches(_teccl_flows(flows), rank)
    number = {key: i for i, key in enumerate(order)}
    times = {epoch: step for step, epoch in enumerate(sorted({epoch for epoch, *_ in sends}))}
    edges: list[Edge] = []
    have = {(key, key[0]) for key in order}
    for epoch, key, src, dst in sends:
        if key not in number:
            raise ScheduleError(f"7-Flows: chunk {key[1]} of {key[0]} travels, but 6-Demand_Met doesn't ask for it")
        if (key, dst) not in have:  # a second delivery of the same chunk changes nothing
            have.add((key, dst))
            edges.append(Edge(times[epoch], src, dst, Op.COPY, (number[key],)))
    return Schedule(name, Collective(kind, ranks), len(times), tuple(chunks), independent_graphs(edges, "teccl"))


Key = tuple[int, int]  # source rank, chunk of it


def _teccl_demand(demand: dict[str, dict[str, dict[str, Any]]]) -> dict[Key, set[int]]:
    wanted: dict[Key, set[int]] = {}
    for src, dests in demand.items():
        for dst, parts in dests.items():
            for part in parts:
                wanted.setdefault((_number(src), _number(part)), set()).add(_number(dst))
    if not wanted:
        raise ScheduleError("6-Demand_Met is empty")
    return wanted


def _number(text: str) -> int:
    match = _NUMBER.search(text)
    if match is None:
        raise ScheduleError(f"6-Demand_Met: {text!r} has no number")
    return int(match[1])


def _teccl_flows(lines: Iterable[str]) -> list[tuple[int, Key, int, int]]:
    flows: list[tuple[int, Key, int, int]] = []
    for position, line in enumerate(lines):
        match = _FLOW.search(line)
        if match is None:
            raise ScheduleError(f"7-Flows[{position}]: {line!r} is not 'Chunk c from s traveled over a->b in epoch e'")
        part, src, tail, head, epoch = map(int, match.groups())
        flows.append((epoch, (src, part), tail, head))
    return sorted(flows, key=lambda flow: flow[0])


def _without_switches(flows: list[tuple[int, Key, int, int]], rank: dict[int, int]) -> list[tuple[int, Key, int, int]]:
    """Rank to rank, at the epoch in which the data leaves the rank; nodes that are no ranks are switches."""
    came: dict[tuple[Key, int], tuple[int, int]] = {}  # chunk at a switch -> (epoch when it left a rank, that rank)
    sends: list[tuple[int, Key, int, int]] = []
    for epoch, (home, part), tail, head in flows:
        if home not in rank:
            raise ScheduleError(f"7-Flows: chunk {part} of {home} travels, but 6-Demand_Met doesn't know {home}")
        key = rank[home], part
        start, origin = (epoch, rank.get(tail, -1))
        if tail not in rank:
            if (key, tail) not in came:
                raise ScheduleError(f"7-Flows: switch {tail} sends chunk {key[1]} of {key[0]} before it gets it")
            start, origin = came[key, tail]
        if head in rank:
            sends.append((start, key, origin, rank[head]))
        else:
            came.setdefault((key, head), (start, origin))
    return sends
