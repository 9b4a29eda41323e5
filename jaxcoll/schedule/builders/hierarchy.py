"""Two levels: a schedule inside every group (a host), another one across the groups.

Position j of a group serves slot j: it reduces (or gathers) slot j inside the group and speaks for its group in slot
j's exchange across groups. In a smaller group a position serves several slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.builders.registry import REGISTRY, Builder, Request
from jaxcoll.schedule.ir import Chunk, Edge, Kind, Schedule, home_chunks, independent_graphs, joined_edges

ChunkMap = Callable[[int], tuple[int, ...]]  # a chunk of the part's own schedule -> chunks of the whole


@dataclass(frozen=True)
class Layout:
    """The groups of positions; slot j of group k is served by `groups[k][j % len(groups[k])]`."""

    groups: tuple[tuple[int, ...], ...]

    @property
    def slots(self) -> int:
        return max(len(g) for g in self.groups)

    def server(self, group: int, slot: int) -> int:
        return self.groups[group][slot % len(self.groups[group])]

    def team(self, slot: int) -> list[int]:
        """The positions that serve `slot`, one a group."""
        return [self.server(k, slot) for k in range(len(self.groups))]

    def served(self, group: int, member: int) -> range:
        """The slots that the group's member serves."""
        return range(member, self.slots, len(self.groups[group]))


@dataclass
class _Assembly:
    """Collects edges of sub-schedules phase by phase."""

    request: Request
    layout: Layout
    inner: str
    inter: str
    edges: list[Edge]
    step: int = 0
    canonical: bool = False

    def part(self, name: str, kind: Kind, n: int) -> Schedule:
        """A sub-schedule; its name is a parameter of this builder, so an error says which."""
        try:
            return REGISTRY.build(name, kind, n, {})
        except ScheduleError as error:
            raise ScheduleError(f"hierarchical: its part {name!r} across {n} positions: {error}") from None

    def phase(self, parts: Sequence[tuple[Schedule, Sequence[int], ChunkMap]]) -> None:
        """Runs parts side by side from the present step on; the next phase starts when the longest has ended."""
        for schedule, positions, chunk_map in parts:
            self.canonical |= schedule.canonical
            for e in schedule.edges:
                chunks = tuple(sorted(c for inner in e.chunks for c in chunk_map(inner)))
                if chunks:
                    self.edges.append(Edge(self.step + e.step, positions[e.src], positions[e.dst], e.op, chunks))
        self.step += max((schedule.steps for schedule, _, _ in parts), default=0)

    def inside(self, kind: Kind, of_member: Callable[[int, int], tuple[int, ...]]) -> None:
        """One phase inside all groups; `of_member(group, member)` are the chunks that belong at this member."""
        parts: list[tuple[Schedule, Sequence[int], ChunkMap]] = []
        for k, group in enumerate(self.layout.groups):
            schedule = self.part(self.inner, kind, len(group))
            members = [c.dst if kind is Kind.REDUCE_SCATTER else c.src for c in schedule.chunks]
            parts.append((schedule, group, _by_member(of_member, k, members)))
        self.phase(parts)

    def across(self, kind: Kind, chunk_map: Callable[[int, int], tuple[int, ...]]) -> Schedule:
        """One phase across groups, every slot with its own team; `chunk_map(slot, chunk)`. Returns the sub-schedule."""
        schedule = self.part(self.inter, kind, len(self.layout.groups))
        slots = range(self.layout.slots)
        self.phase([(schedule, self.layout.team(j), _by_slot(chunk_map, j)) for j in slots])
        return schedule

    def finish(self, chunks: tuple[Chunk, ...]) -> Schedule:
        r = self.request
        # One message where a position that serves several slots would send several to one peer in one step.
        graphs = tuple(joined_edges(g) for g in independent_graphs(self.edges, "slot"))
        return Schedule(r.name, r.collective, self.step, chunks, graphs, r.pipeline, self.canonical)


def _by_member(of_member: Callable[[int, int], tuple[int, ...]], group: int, members: Sequence[int | None]) -> ChunkMap:
    def mapped(chunk: int) -> tuple[int, ...]:
        member = members[chunk]
        assert member is not None  # reduce_scatter and all_gather chunks name their home
        return of_member(group, member)

    return mapped


def _by_slot(chunk_map: Callable[[int, int], tuple[int, ...]], slot: int) -> ChunkMap:
    return lambda chunk: chunk_map(slot, chunk)


def _all_reduce(a: _Assembly) -> Schedule:
    # Every slot is cut as the exchange across groups cuts its data: chunk (slot, c) = slot * width + c.
    weights = [c.weight for c in a.part(a.inter, Kind.ALL_REDUCE, len(a.layout.groups)).chunks]
    width = len(weights)

    def of_member(group: int, member: int) -> tuple[int, ...]:
        return tuple(j * width + c for j in a.layout.served(group, member) for c in range(width))

    a.inside(Kind.REDUCE_SCATTER, of_member)
    a.across(Kind.ALL_REDUCE, lambda slot, c: (slot * width + c,))
    a.inside(Kind.ALL_GATHER, of_member)
    return a.finish(tuple(Chunk(None, None, w) for _ in range(a.layout.slots) for w in weights))


def _gather_or_scatter(a: _Assembly) -> Schedule:
    # Chunk p is at home at position p = groups[k][j]: its slot is j, and its group's turn in the exchange is k.
    kind, layout = a.request.kind, a.layout
    gather = kind is Kind.ALL_GATHER
    part = a.part(a.inter, kind, len(layout.groups))
    turns = [c.src if gather else c.dst for c in part.chunks]

    def at_home(slot: int, chunk: int) -> tuple[int, ...]:
        group = layout.groups[turns[chunk] or 0]
        return (group[slot],) if slot < len(group) else ()

    def of_member(group: int, member: int) -> tuple[int, ...]:
        return tuple(g[j] for j in layout.served(group, member) for g in layout.groups if j < len(g))

    if gather:
        a.across(kind, at_home)
        a.inside(kind, of_member)
    else:
        a.inside(kind, of_member)
        a.across(kind, at_home)
    return a.finish(home_chunks(a.request.collective))


def _groups(value: Any, n: int) -> Layout:
    try:
        groups = tuple(tuple(int(p) for p in group) for group in value)
    except (TypeError, ValueError, OverflowError):
        raise ScheduleError(f"hierarchical: groups={value!r}; give lists of positions, e.g. [[0, 1], [2, 3]]") from None
    if not groups or not all(groups) or sorted(p for g in groups for p in g) != list(range(n)):
        raise ScheduleError(f"hierarchical: groups={value!r}; every position 0..{n - 1} must stand in one group")
    return Layout(groups)


def _make(request: Request) -> Schedule:
    layout = _groups(request.params["groups"], request.nranks)
    inner, inter = request.params.get("inner", "direct"), request.params.get("inter", "ring")
    for param, name in (("inner", inner), ("inter", inter)):
        if not isinstance(name, str):
            raise ScheduleError(f"hierarchical: {param}={name!r}; give a schedule's name")
    assembly = _Assembly(request, layout, inner, inter, [])
    return _all_reduce(assembly) if request.kind is Kind.ALL_REDUCE else _gather_or_scatter(assembly)


BUILDERS = (
    Builder(
        "hierarchical",
        (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER),
        _make,
        "reduce-scatter inside each host, exchange across hosts, all-gather inside",
        {
            "groups": "lists of positions, one a host, of any sizes",
            "inner": "the schedule inside a group (direct)",
            "inter": "the schedule across groups (ring)",
        },
        ("groups",),
    ),
)
