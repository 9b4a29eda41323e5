"""The one result type of every synthesiser, and how a long solve talks to its caller."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from jaxcoll.errors import SynthesisError

if TYPE_CHECKING:
    from jaxcoll.schedule import Schedule

Rate = Fraction | float


class Status(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"  # solved to the end; `gap` tells what rounding cost
    TIME_LIMIT = "time_limit"  # stopped early, the best so far is returned
    INFEASIBLE = "infeasible"  # no schedule; `why` says what stands in the way


class Cancelled(SynthesisError):
    """The caller's progress function asked to stop before there was a result."""


class TimeUp(SynthesisError):
    """The time limit struck inside a phase; synthesisers catch it and return the best so far."""


# Called with (phase, done 0..1 or None where unknown). Returning False cancels the solve.
Progress = Callable[[str, float | None], bool | None]


@dataclass(frozen=True)
class SynthResult:
    """What a synthesiser found.

    Attributes:
        collective: "all_gather", "reduce_scatter", "all_reduce", "all_to_all".
        ranks: how many.
        bound: proven upper bound of `throughput`, in the topology's unit, per rank (see the synthesiser's own text).
        throughput: of this schedule, same unit; exact (Fraction) where the synthesiser is exact.
        schedule: the common form; None when infeasible or when asked not to build it.
        depth: longest chain of hops between ranks that one piece of data travels.
        steps: logical steps of the schedule.
        seconds: wall time of each phase, in the order in which they ran.
        status, why: how it ended.
        warm: what the same synthesiser wants as `warm=` next time; `warm_to_json` of that synthesiser stores it.
        details: counts of a synthesiser's own (trees, k, columns, cuts, rounds ...), plain numbers and strings.
    """

    collective: str
    ranks: int
    bound: Rate
    throughput: Rate
    schedule: Schedule | None
    depth: int
    steps: int
    seconds: dict[str, float]
    status: Status = Status.OPTIMAL
    why: str = ""
    warm: Any = None
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def gap(self) -> float:
        """1 - throughput / bound: 0 is optimal."""
        return float(1 - self.throughput / self.bound) if self.bound else 0.0

    def to_json(self) -> str:
        """The command line's JSON form; rates as numbers in the topology's unit."""
        return json.dumps(
            {
                "collective": self.collective,
                "ranks": self.ranks,
                "bound": float(self.bound),
                "throughput": float(self.throughput),
                "gap": self.gap,
                "depth": self.depth,
                "steps": self.steps,
                "seconds": {"total": sum(self.seconds.values()), **self.seconds},
                "status": str(self.status),
                "why": self.why,
                "details": self.details,
            },
            indent=2,
        )


class Clock:
    """Times phases, passes progress on, and enforces the time limit and cancellation."""

    def __init__(self, progress: Progress | None = None, time_limit: float | None = None):
        self.seconds: dict[str, float] = {}
        self._progress = progress
        self._start, self._limit = time.perf_counter(), float("inf") if time_limit is None else time_limit
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Adds the time of its body to `seconds[name]`."""
        before, self._phase = self._phase, name
        start = time.perf_counter()
        try:
            self.tick(None)
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            self._phase = before

    def plus(self, seconds: dict[str, float]) -> Clock:
        """This clock, with the times of phases that ran on another one."""
        self.seconds = {**seconds, **self.seconds}
        return self

    def left(self) -> float:
        """Seconds to the time limit."""
        return self._start + self._limit - time.perf_counter()

    @contextmanager
    def within(self, share: float) -> Generator[None]:
        """The body gets this share of the time limit, counted from the clock's start."""
        whole, self._limit = self._limit, self._limit * share
        try:
            yield
        finally:
            self._limit = whole

    def tick(self, done: float | None) -> None:
        """Reports progress of the current phase. Raises Cancelled when the caller says stop, TimeUp past the limit."""
        if self.left() <= 0:
            raise TimeUp(f"time limit of {self._limit:g} s during {self._phase or 'the start'}")
        if self._progress is not None and self._progress(self._phase, done) is False:
            raise Cancelled(f"cancelled by the caller during {self._phase}")
