"""The one table of builders: what each can build, and what it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxcoll.errors import ScheduleError
from jaxcoll.schedule.ir import Collective, Kind, Schedule

PIPELINE_HELP = "lanes into which an executor cuts every chunk (1)"


@dataclass(frozen=True)
class Request:
    """What a builder is asked for; `params` holds its own parameters, `pipeline` taken out."""

    name: str
    collective: Collective
    pipeline: int
    params: Mapping[str, Any]

    @property
    def kind(self) -> Kind:
        return self.collective.kind

    @property
    def nranks(self) -> int:
        return self.collective.nranks

    @property
    def root(self) -> int:
        """The root of a rooted collective, else position 0."""
        return self.collective.root or 0


@dataclass(frozen=True)
class Builder:
    """One entry of the table: `params` maps each parameter to its help; those in `required` have no default."""

    name: str
    kinds: tuple[Kind, ...]
    make: Callable[[Request], Schedule] = field(repr=False)
    doc: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()


class Registry:
    """Builders by name."""

    def __init__(self) -> None:
        self._builders: dict[str, Builder] = {}

    def add(self, builder: Builder) -> None:
        if builder.name in self._builders:
            raise ScheduleError(f"a builder named {builder.name!r} is registered already; choose another name")
        params = {"pipeline": PIPELINE_HELP, **builder.params}
        if any(k.rooted for k in builder.kinds):
            params["root"] = "the root of reduce and broadcast (0)"
        object.__setattr__(builder, "params", params)
        self._builders[builder.name] = builder

    def select(self, kind: Kind | str | None = None) -> dict[str, Builder]:
        """The builders, or those that can build `kind`."""
        wanted = None if kind is None else Kind.parse(kind)
        return {n: b for n, b in self._builders.items() if wanted is None or wanted in b.kinds}

    def build(self, name: str, kind: Kind | str, nranks: int, params: Mapping[str, Any]) -> Schedule:
        kind = Kind.parse(kind)
        builder = self._builders.get(name)
        if builder is None:
            raise ScheduleError(f"unknown schedule {name!r}; known are {_names(self._builders)}")
        if kind not in builder.kinds:
            raise ScheduleError(
                f"schedule {name!r} can't do {kind.label}, only {', '.join(k.label for k in builder.kinds)}; "
                f"for {kind.label} there are {_names(self.select(kind))}"
            )
        return builder.make(self._request(builder, kind, nranks, dict(params)))

    @staticmethod
    def _request(builder: Builder, kind: Kind, nranks: int, params: dict[str, Any]) -> Request:
        unknown = [p for p in params if p not in builder.params]
        if unknown:
            raise ScheduleError(
                f"schedule {builder.name!r} has no parameter {unknown[0]!r}; it takes {_names(builder.params)}"
            )
        missing = [p for p in builder.required if p not in params]
        if missing:
            raise ScheduleError(f"schedule {builder.name!r} needs {missing[0]}=: {builder.params[missing[0]]}")
        root = params.pop("root", None)
        if kind.rooted:
            root = 0 if root is None else root
        pipeline = params.pop("pipeline", 1)
        return Request(builder.name, Collective(kind, nranks, root), pipeline, params)


def _names(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"


REGISTRY = Registry()


def build(name: str, kind: Kind | str, nranks: int, **params: Any) -> Schedule:
    """Builds schedule `name` for the collective `kind` over `nranks` positions.

    `params` are the builder's own (see `builders`), `pipeline` and `root` among them. Raises `ScheduleError`, listing
    what is known, for an unknown name or parameter, or for a kind or number of ranks that the builder can't do.
    """
    return REGISTRY.build(name, kind, nranks, params)


def builders(kind: Kind | str | None = None) -> dict[str, Builder]:
    """All builders by name, or those that can build `kind`."""
    return REGISTRY.select(kind)
