"""Groups of ranks: starting them, and timing their implementations in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import selectors
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxcoll import config
from jaxcoll.bench.control import Channel, Listener, Message
from jaxcoll.bench.definitions import Case, timing
from jaxcoll.bench.table import Row
from jaxcoll.errors import JaxcollError, UsageError
from jaxcoll.launch import Ranks

_ALIVE_EVERY = 1.0
_MPI_ENV = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # More ranks than cores: a rank that polls without yielding would time the scheduler, not MPI.
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


# Calls at the head of every block that don't count: as many as take this long, by the warm-up's quickest, between these
# numbers. Ranks come out of the command loop, or out of another implementation, at different times and asleep, and
# where they outnumber the cores the kernel needs some 0.1 s to spread them again (a 4 KiB psum of 8 ranks on 2 cores
# falls from 0.5 to 0.3 ms; with every rank bound to a core it starts at its final time).
_SETTLE_SECONDS = 0.1
_SETTLE_CALLS = (2, 400)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run for each case: the schedule asked for (None: jaxcoll's choice), warm-up calls, timed calls, and into
    how many blocks those are cut, between which the implementations take turns."""

    schedule: str | None
    warmup: int
    iters: int
    blocks: int


class Group:
    """Processes that hold one or several implementations, and the channels that command them."""

    def __init__(self, ranks: Ranks, listener: Listener, processes: int):
        self._ranks = ranks
        self._channels: list[Channel] = listener.accept(processes, self._check_alive)

    def _check_alive(self) -> None:
        for rank, code in enumerate(self._ranks.poll()):
            if code is not None:
                raise JaxcollError(f"Process {rank} ended with {code}. Its last output:\n{self._ranks.tail(rank)}")

    def ask(self, timeout: float, **message: Any) -> list[Message]:
        """Send a command to every process; see `ask_each`."""
        return self.ask_each(timeout, [message] * len(self._channels))

    def ask_each(self, timeout: float, messages: Sequence[Message]) -> list[Message]:
        """Send each process, by rank, its command; returns their answers in rank order.

        Raises `JaxcollError` at the first process that answers with an error, ends, or takes over `timeout` seconds:
        the others may then wait for it in vain.
        """
        deadline = time.monotonic() + timeout
        answers: dict[int, Message] = {}
        with selectors.DefaultSelector() as selector:
            for rank, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, rank)
                channel.send(messages[rank])
            while len(answers) < len(self._channels):
                events = selector.select(_ALIVE_EVERY)
                if not events:
                    self._check_alive()
                    if time.monotonic() > deadline:
                        late = sorted(set(range(len(self._channels))) - set(answers))
                        raise JaxcollError(
                            f"Processes {late} did not answer {messages[0]['do']!r} within {timeout:g} s."
                        )
                for key, _ in events:
                    answers[key.data] = self._answer(key.data)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(len(self._channels))]

    def _answer(self, rank: int) -> Message:
        try:
            answer = self._channels[rank].receive(30.0)
        except (EOFError, TimeoutError, ConnectionError):
            time.sleep(0.5)  # its exit code and last words are a moment behind its socket
            self._check_alive()
            raise JaxcollError(f"Process {rank} closed its connection.\n{self._ranks.tail(rank)}") from None
        if "error" in answer:
            raise JaxcollError(f"Process {rank}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Let the processes leave, and end those that don't."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send({"do": "quit"})
        with contextlib.suppress(TimeoutError):
            self._ranks.wait(20.0)
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.close()


def _start(
    resources: contextlib.ExitStack,
    command: Sequence[str],
    nprocs: int,
    expected: int,
    env: Mapping[str, str],
    **options: Any,
) -> Group:
    listener = resources.enter_context(Listener())
    ranks = resources.enter_context(Ranks(command, nprocs, env={**listener.env, **env}, **options))
    group = Group(ranks, listener, expected)
    resources.callback(group.close)
    return group


def start_jax(resources: contextlib.ExitStack, ranks: int, layout: str, env: Mapping[str, str]) -> Group:
    """A group that runs JAX: one process a rank (`procs`), or one process with a device a rank (`inproc`)."""
    nprocs, devices = (ranks, 1) if layout == "procs" else (1, ranks)
    return _start(resources, [sys.executable, "-m", "jaxcoll.bench.worker"], nprocs, nprocs, env, devices=devices)


def start_mpi(resources: contextlib.ExitStack, ranks: int) -> Group:
    """A group under mpirun. Raises `UsageError` where mpirun or mpi4py is missing."""
    mpirun = shutil.which("mpirun")
    if mpirun is None or importlib.util.find_spec("mpi4py") is None:
        lacking = "mpirun (apt install openmpi-bin)" if mpirun is None else "mpi4py (pip install 'jaxcoll[mpi]')"
        raise UsageError(f"--peers=mpi needs Open MPI and mpi4py; this environment has no {lacking}.")
    command = [mpirun, "-n", str(ranks), sys.executable, "-m", "jaxcoll.bench.mpi_worker"]
    return _start(resources, command, 1, ranks, _MPI_ENV)


def environment(impl: str, env: Mapping[str, str]) -> dict[str, str]:
    """Variables of an implementation's processes, `env` among them.

    They tune, and keep a run log, only where the implementation is "JAXCOLL_TUNER=value".
    """
    name, equals, value = impl.partition("=")
    asked = {name: value} if equals else {}
    untuned = {} if config.PREFIX + "TUNER" in asked else config.UNTUNED
    return {**untuned, **env, **asked}


class Bench:
    """The groups of one (ranks, layout), as a context manager; `measure` times one case on every implementation.

    impls: the first is the one that peers are compared with. Each has processes of its own, as a program has that uses
    it: what jaxcoll does for its process (JAXCOLL_KEEP_MEMORY) is no favour to jax.lax, and Gloo's threads no burden to
    jaxcoll. "NAME=value" is jaxcoll with that environment variable, to compare settings.
    """

    def __init__(self, impls: Sequence[str], ranks: int, layout: str, env: Mapping[str, str], deadline: float):
        self._layout, self._deadline = layout, deadline
        self._resources = contextlib.ExitStack()
        self._groups: dict[str, Group] = {}
        try:
            for impl in impls:
                if impl == "mpi":
                    self._groups[impl] = start_mpi(self._resources, ranks)
                else:
                    self._groups[impl] = start_jax(self._resources, ranks, layout, environment(impl, env))
        except BaseException:
            self._resources.close()
            raise

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self._resources.close()

    def measure(self, case: Case, plan: Plan, progress: Callable[[str], None]) -> tuple[list[Row], list[str]]:
        """One row for each implementation that can run the case, and a note for each that can't.

        Blocks of calls alternate between the implementations, so that a slow spell of the machine hits all alike.
        """
        checked: dict[str, list[Message]] = {}
        notes: list[str] = []
        for impl, group in self._groups.items():
            progress(f"{impl}: compile, check, warm up")
            arguments = {"case": dataclasses.asdict(case), "schedule": plan.schedule, "warmup": plan.warmup}
            answers = group.ask(self._deadline, do="prepare", impl=impl, **arguments)
            if "unavailable" in answers[0]:
                notes.append(f"{impl}: {answers[0]['unavailable']}")
            else:
                checked[impl] = answers
        seconds = self._time({impl: _settle(answers) for impl, answers in checked.items()}, plan, progress)
        for group in self._groups.values():
            group.ask(self._deadline, do="drop")
        rows: list[Row] = []
        for impl, answers in checked.items():
            extra = [answer["extra_bytes"] for answer in answers if answer["extra_bytes"] is not None]
            wrong = sum(answer["nwrong"] for answer in answers)
            times = timing(case, seconds[impl])
            rows.append(Row(impl, self._layout, case, times, wrong, max(extra) if extra else None))
        return rows, notes

    def _time(
        self, settle: Mapping[str, int], plan: Plan, progress: Callable[[str], None]
    ) -> dict[str, list[list[float]]]:
        seconds: dict[str, list[list[float]]] = {}
        blocks = min(plan.blocks, plan.iters)
        # One block of each is not counted: taking turns changes where the allocator finds room for results, and a page
        # that the machine hasn't touched before is slow (in a virtual machine above all: 40 ms for 20 MiB).
        for block in range(-1, blocks):
            iters = plan.iters * (block + 1) // blocks - plan.iters * block // blocks
            for impl, head in settle.items():
                progress(f"{impl}: block {block + 1} of {blocks}" if block >= 0 else f"{impl}: rehearsal")
                answers = self._groups[impl].ask(self._deadline, do="time", impl=impl, settle=head, iters=iters)
                of_ranks = seconds.setdefault(impl, [[] for _ in answers])
                if block < 0:
                    continue
                for all_times, answer in zip(of_ranks, answers, strict=True):
                    all_times.extend(answer["seconds"])
        return seconds


def _settle(answers: Sequence[Message]) -> int:
    """How many calls at the head of a block aren't counted, from the warm-up's seconds on every rank."""
    quickest = min((min(answer["seconds"]) for answer in answers if answer["seconds"]), default=_SETTLE_SECONDS)
    return int(min(max(_SETTLE_SECONDS / quickest, _SETTLE_CALLS[0]), _SETTLE_CALLS[1]))
