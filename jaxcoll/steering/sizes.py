"""Which message size of a set is tuned by, where its call sites have several within one size class."""

from __future__ import annotations

import collections

from jaxcoll.telemetry import Epoch, near

_WINDOW = 64  # epochs over which the time of each size is counted
_ALIKE = 1.05  # bytes moved, as a ratio
_MORE = 2.0  # how many times the time of the present size another one must take to be tuned by instead


class Sizes:
    """Tells epochs apart by the bytes that they move: those of two sizes are no samples of the same thing.

    A call site of one executable has one size. Sites are alike where they move as many bytes under the same program
    (across programs bytes don't compare: a sum of a narrow type moves some of them wide). Sizes are numbered as they
    come; `chosen` is the one that takes the most time.
    """

    def __init__(self) -> None:
        self._executables: dict[int, list[list[int]]] = {}  # by call site: [newest launch, size]
        self._moved: list[dict[int, int]] = []  # by size: bytes by program
        self._recent: collections.deque[tuple[int, int]] = collections.deque(maxlen=_WINDOW)
        self._early = 0
        self.chosen = 0

    def admit(self, epoch: Epoch) -> bool:
        """Whether an epoch is of the chosen size, which it may have become just now."""
        size = self._size(epoch, int(epoch.receiver["bytes"].sum()))
        if size is None:
            return False
        self._recent.append((size, epoch.span_ns))
        if size != self.chosen and len(self._recent) == _WINDOW:
            mine, chosen = (sum(span for s, span in self._recent if s == one) for one in (size, self.chosen))
            if mine > _MORE * chosen:
                self.chosen = size
        self._early = 0 if size == self.chosen else self._early
        return size == self.chosen

    def _size(self, epoch: Epoch, moved: int) -> int | None:
        _, site, launch, _ = epoch.id
        executables = self._executables.setdefault(site, [])
        mine = next((e for e in executables if near(launch, e[0])), None)
        if mine is None:
            if self._is_early(epoch.program):
                return None
            mine = [launch, self._like(epoch.program, moved)]
            executables.append(mine)
        mine[0] = launch
        self._moved[mine[1]].setdefault(epoch.program, moved)
        return mine[1]

    def _is_early(self, program: int) -> bool:
        """Whether a new executable comes under a program that has just been taken before those of the chosen size.

        There is nothing yet to compare it with. They follow soon, unless they have ended.
        """
        if not self._moved or program in self._moved[self.chosen]:
            return False
        self._early += 1
        return self._early < _WINDOW

    def _like(self, program: int, moved: int) -> int:
        """The size that moves as many bytes under the program, else a new one."""
        for size, known in enumerate(self._moved):
            usual = known.get(program, -1)
            if usual <= _ALIKE * moved and moved <= _ALIKE * usual:
                return size
        self._moved.append({})
        return len(self._moved) - 1
