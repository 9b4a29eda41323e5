"""Background flows: traffic of others, real TCP between stations."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxcoll.errors import JaxcollError, UsageError
from jaxcoll.testbed import traffic

MOST_CONNECTIONS = 256
_FIRST_PORT = 20_000
_START_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Flow:
    """Bulk data from one station to another.

    connections: TCP connections that carry it. burst: (seconds on, seconds off), repeated; None: all the time.
    congestion: TCP's congestion control; the kernel's default (often bbr) doesn't share a queue evenly.
    """

    src: str
    dst: str
    connections: int = 1
    burst: tuple[float, float] | None = None
    congestion: str = "cubic"

    def __post_init__(self) -> None:
        if self.src == self.dst:
            raise UsageError(f"A flow from {self.src} to itself crosses no link.")
        if not 1 <= self.connections <= MOST_CONNECTIONS:
            raise UsageError(f"A flow has 1 to {MOST_CONNECTIONS} connections, not {self.connections}.")
        if self.burst is not None and not (self.burst[0] > 0 and self.burst[1] >= 0):
            raise UsageError(f"A burst needs seconds on (above 0) and off (0 or more), not {self.burst}.")


def toward(victim: str, sources: Sequence[str], connections: int = 1) -> list[Flow]:
    """One flow into `victim` from each source."""
    return [Flow(source, victim, connections) for source in sources]


class Running:
    """Flows under way: two processes each. `spawn(node, command)` starts a program inside a station; `folder`: where
    they write what has arrived."""

    _ports = itertools.count(_FIRST_PORT)

    def __init__(
        self,
        flows: Sequence[Flow],
        spawn: Callable[[str, Sequence[str]], subprocess.Popen[bytes]],
        address: Callable[[str], str],
        folder: Path,
    ):
        self.flows = tuple(flows)
        self._folder = tempfile.TemporaryDirectory(prefix="flows-", dir=folder)
        self._processes: list[subprocess.Popen[bytes]] = []
        program = [sys.executable, "-I", "-S", traffic.__file__]
        try:
            for i, flow in enumerate(self.flows):
                address(flow.src)
                port, where = str(next(self._ports)), address(flow.dst)
                self._processes.append(spawn(flow.dst, [*program, "receive", where, port, str(self._log(i))]))
                burst = [f"{seconds:g}" for seconds in flow.burst or ()]
                command = [*program, "send", where, port, str(flow.connections), flow.congestion, *burst]
                self._processes.append(spawn(flow.src, command))
            self._wait_for_data()
        except BaseException:
            self.stop()
            raise

    def _log(self, i: int) -> Path:
        return Path(self._folder.name) / f"flow{i}"

    def _wait_for_data(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        for i, flow in enumerate(self.flows):
            while not (self._samples(i) and self._samples(i)[-1][1]):
                self.check()
                if time.monotonic() > deadline:
                    raise JaxcollError(
                        f"No byte of the flow {flow.src} -> {flow.dst} has arrived in {_START_SECONDS:g} s."
                    )
                time.sleep(0.02)

    def _samples(self, i: int) -> list[tuple[float, int]]:
        if not self._log(i).exists():
            return []
        lines = self._log(i).read_text().splitlines(keepends=True)
        pairs = [line.split() for line in lines if line.endswith("\n")]
        return [(float(when), int(count)) for when, count in pairs]

    def check(self) -> None:
        """Raises JaxcollError if an end of a flow has died."""
        for i, process in enumerate(self._processes):
            if process.poll() is not None:
                flow, end = self.flows[i // 2], ("receiver", "sender")[i % 2]
                said = (process.stderr.read().decode(errors="replace") if process.stderr else "").strip()
                last = said.splitlines()[-1] if said else "it said nothing"
                raise JaxcollError(
                    f"The {end} of the flow {flow.src} -> {flow.dst} ended with {process.returncode}: {last}"
                )

    def rates(self, since: float | None = None, until: float | None = None) -> list[float]:
        """Bits per second that arrived, by flow, between two readings of time.monotonic() (default: all the time)."""
        rates: list[float] = []
        for i in range(len(self.flows)):
            samples = [
                s for s in self._samples(i) if (since is None or s[0] >= since) and (until is None or s[0] <= until)
            ]
            whole = len(samples) > 1 and samples[-1][0] > samples[0][0]
            rates.append(8 * (samples[-1][1] - samples[0][1]) / (samples[-1][0] - samples[0][0]) if whole else 0.0)
        return rates

    def stop(self) -> None:
        """End the flows; returns when their processes are gone."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            if process.stderr is not None:
                process.stderr.close()
        self._folder.cleanup()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
