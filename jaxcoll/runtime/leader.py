"""The leader: one thread of process 0 that hands records to the brain and sees its decisions through on all ranks.

The thread does next to nothing itself: it must not take the interpreter's lock from the training beside it. When it, or
the brain, is gone or slow, tuning stops; collectives don't notice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxcoll.runtime.control import AWAY_S, LeaderEnd, Message, set_id_of
from jaxcoll.runtime.job import Job, Store
from jaxcoll.runtime.swap import CANCEL, COMMIT, Place, points_behind, settle, verdict_key
from jaxcoll.steering import wire
from jaxcoll.steering.board import Board

log = logging.getLogger("jaxcoll")

ANSWER_S = 3.0  # how long an answer may take before an attempt is given up
_ROUND_S = 0.25  # it wakes when something comes; a pause is only there to see that it is to stop
_SILENT_S = 15.0  # a process that says nothing for so long while others do is named in a warning
_UNANSWERED = "no answer"
_TRIES = 8  # attempts at one decision, each with twice the margin
_MAX_MARGIN = 1 << 16  # launches
_FIRST_EXCHANGE_S = 0.05
_ROOM = 3.0
_TAKES_S = 30  # the brain thinks for seconds at most, and reads between two thoughts
_LATE_S = 15.0  # a process that hasn't been heard of for so long at the start is named in a warning


@dataclasses.dataclass(frozen=True)
class Swap:
    """How an attempt at a decision ended: `tries` attempts, a `margin` in launches, the longest stall of any process.

    `exchange_s`: from the proposal to the last process's word that it has obeyed; `waiting`: executions that waited;
    `final`: another attempt would be refused, too.
    """

    committed: bool
    tries: int
    margin: int
    exchange_s: float
    stall_s: float
    waiting: int
    refusal: str = ""
    final: bool = False


Answers = dict[int, Message]


class BrainProcess:
    """The brain's process and the connection to it."""

    def __init__(self, settings: Mapping[str, Any]):
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _TAKES_S, 0))
        with theirs:
            root = str(Path(__file__).parents[2])
            path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "jaxcoll.steering.brain", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._connection = Connection(ours.detach())
        self.tell("start", dict(settings))

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def fileno(self) -> int:
        """The connection's descriptor: it can be read when the brain has said something, or is gone."""
        return self._connection.fileno()

    def tell(self, *message: Any) -> None:
        """Sends a message; OSError if the brain is gone, or takes nothing for `_TAKES_S`."""
        self._connection.send_bytes(wire.pack(message))

    def offer(self, *message: Any) -> bool:
        """Sends a message unless the brain is behind with reading. Returns whether it did."""
        poller = select.poll()
        poller.register(self._connection.fileno(), select.POLLOUT)
        ready = bool(poller.poll(0))
        if ready:
            self.tell(*message)
        return ready

    def heard(self) -> list[list[Any]]:
        """What it has said. EOFError if it is gone."""
        out: list[list[Any]] = []
        while self._connection.poll(0):
            out.append(wire.unpack(self._connection.recv_bytes()))
        return out

    def fate(self, error: Exception) -> str:
        """What has become of it, after an error of its connection, in words."""
        if isinstance(error, BlockingIOError):
            return f"its process (pid {self.pid}) has taken no message for {_TAKES_S} s: is it stopped?"
        try:
            status = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return f"its process (pid {self.pid}) has hung up ({type(error).__name__})"
        if status >= 0:
            return f"its process has ended with status {status}; what it wrote stands above"
        more = ", as the kernel does where memory has run out" if -status == signal.SIGKILL else ""
        return f"its process was ended by signal {-status} ({signal.strsignal(-status)}){more}"

    def close(self) -> None:
        """Hangs up, which ends it."""
        self._connection.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Leader:
    """Runs until `stop`. `hosts`: the number of the host of every process; `settings`: what the brain starts with."""

    def __init__(self, job: Job, store: Store, channel: LeaderEnd, hosts: Sequence[int], settings: Mapping[str, Any]):
        self._job, self._store, self._channel, self._hosts = job, store, channel, tuple(hosts)
        self._process_of = {d: p for p, devices in enumerate(job.devices) for d in devices}
        self._settings = settings
        self._here: set[int] = set()
        self._heard: dict[int, float] = {}
        self._silent: set[int] = set()
        self._warned_at = time.monotonic() + _LATE_S
        self._attempts = 0
        self._stride = 1
        self._exchange_s = _FIRST_EXCHANGE_S
        self.lost = 0
        self.report: dict[str, Any] = {"swaps": 0, "reverts": 0, "sets": [], "decisions": []}
        self.error: str | None = None
        self.brain: BrainProcess | None = None
        self._board = Board()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxcoll-leader", daemon=True)

    def start(self) -> None:
        """Starts the brain and the thread."""
        self.brain = BrainProcess(self._settings)
        self._thread.start()

    def stop(self) -> None:
        """Ends both."""
        self._stopping.set()
        self._thread.join(ANSWER_S)
        self._board.remove()
        if self.brain is not None:
            self.brain.close()
        if not self._thread.is_alive():
            self._channel.close()

    @property
    def running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def _run(self) -> None:
        assert self.brain is not None
        try:
            while not self._stopping.is_set():
                self._round(self.brain)
        except (EOFError, OSError) as error:
            if not self._stopping.is_set():
                self._give_up(self.brain.fate(error))
        except BaseException as error:
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, why: str) -> None:
        self.error = why
        self._board.pin({"policy": self._settings["policy"], **self.report, "state": f"stopped: {why}"})
        log.error("the tuner has stopped: %s; collectives go on with the tables in force", why)
        with contextlib.suppress(Exception):  # the channel may be why; the records that then come on are bounded
            for process in self._here:
                self._channel.send(process, {"do": "over"})

    def _round(self, brain: BrainProcess) -> None:
        for who, message, payload in self._channel.receive(_ROUND_S, [brain.fileno()]):
            self._handle(who, message, payload)
        for message in brain.heard():
            match message:
                case ("decision", question):
                    brain.tell("outcome", dataclasses.asdict(self.commit(question)))
                case ("status", report):
                    self.report = report
                    self._board.pin({"policy": self._settings["policy"], "state": "on", **report})
                case ("stride", stride):
                    self._stride = stride
                    for process in self._here:
                        self._channel.send(process, {"do": "stride", "stride": stride})
                case ("warning", text):
                    log.warning("%s", text)
                case _:
                    pass
        self._look_for_all()
        self._look_for_silent()

    def _look_for_all(self) -> None:
        if time.monotonic() < self._warned_at:
            return
        self._warned_at = math.inf
        missing = sorted(set(range(self._job.processes)) - self._here)
        if missing:
            log.warning(
                "the tuner has not heard of processes %s: what they take part in stays untuned. Does the control "
                "network (JAXCOLL_CONTROL_IFNAME) reach them, and is the tuner on in all processes?", missing
            )  # fmt: skip

    def _look_for_silent(self) -> None:
        """Says whom it doesn't hear any more, and when it does again; who has nothing to say says that."""
        now = time.monotonic()
        newest = max(self._heard.values(), default=now)
        silent = {p for p, at in self._heard.items() if newest - at > _SILENT_S}
        if silent - self._silent:
            log.warning(
                "the tuner hears nothing from processes %s for %.0f s: the control network is cut, or they are stuck; "
                "collectives go on with the tables in force", sorted(silent), _SILENT_S
            )  # fmt: skip
        if self._silent - silent:
            log.warning("the tuner hears processes %s again and goes on", sorted(self._silent - silent))
        self._silent = silent

    def _handle(self, who: int, message: Message, payload: bytes) -> None:
        assert self.brain is not None
        self._heard[who] = time.monotonic()
        if message["do"] == "hello":
            self._here.add(who)
            self._channel.send(who, {"do": "stride", "stride": self._stride})
        elif message["do"] == "records":
            if not self.brain.offer("records", set_id_of(message), int(message["dropped"]), payload):
                self.lost += 1
        elif message["do"] == "set":
            processes = [self._process_of[d] for d in message["devices"]]
            hosts = [self._hosts[p] for p in processes]
            self.brain.tell("set", set_id_of(message), message, sorted(set(processes)), hosts)
        # All else is the answer to a question that is no longer asked.

    # ------------------------------------------------------------------------------------------------- committing

    def commit(self, question: Mapping[str, Any]) -> Swap:
        """Brings a decision into force on all ranks at one execution, or nowhere."""
        # As many launches as begin while a proposal makes its round, with room to spare, and one.
        margin = min(1 + math.ceil(_ROOM * self._exchange_s * question["rate"]), _MAX_MARGIN)
        swap = Swap(False, 0, 0, 0.0, 0.0, 0)
        for tries in range(1, _TRIES + 1):
            swap = dataclasses.replace(self._attempt(question, margin), tries=tries)
            if swap.committed or swap.final or self._stopping.is_set():
                break
            if tries == 1 and swap.refusal.startswith(_UNANSWERED):
                log.warning("a table isn't in force yet: %s; trying again. Is the control network up?", swap.refusal)
            margin = min(2 * margin + 1, _MAX_MARGIN)
        return swap

    def _attempt(self, question: Mapping[str, Any], margin: int) -> Swap:
        self._attempts += 1
        processes: Sequence[int] = question["processes"]
        attempt = f"{self._attempts}.{question['version']}"
        about: Message = {"attempt": attempt, "set": list(question["set"])}
        about |= {"version": question["version"], "program": question["program"]}
        staged, refusal = self._stage(question, about)
        if refusal:
            return Swap(False, 1, margin, 0.0, 0.0, 0, refusal, final=not refusal.startswith(_UNANSWERED))
        began = time.monotonic()
        places: list[list[Place]] = [[(p[0], p[1], p[2]) for p in a["places"]] for a in staged.values()]
        promised = self._ask(processes, "promised", {"do": "propose", **about, "points": points_behind(places, margin)})
        refusal = _refusal(processes, promised)
        wish = CANCEL if refusal else COMMIT
        verdict = self._settled(attempt, wish)
        decided = self._ask(processes, "decided", {"do": "decide", **about, "verdict": verdict})
        exchange = time.monotonic() - began
        # Else somebody, or the store, was waited for: no measure of the next one.
        if verdict == wish and len(promised) == len(decided) == len(processes):
            self._exchange_s = max(exchange, 0.8 * self._exchange_s + 0.2 * exchange)
        if len(decided) == len(processes):
            with contextlib.suppress(Exception):  # nobody will ask for it any more; left there it does no harm
                self._store.delete(verdict_key(attempt))
        stall = max((float(a["stall_s"]) for a in decided.values()), default=0.0)
        waiting = sum(int(a["waiting"]) for a in decided.values())
        refusal = refusal or ("" if verdict == COMMIT else "a process asked for the verdict before it was given")
        return Swap(verdict == COMMIT, 1, margin, exchange, stall, waiting, refusal)

    def _settled(self, attempt: str, wish: str) -> str:
        """The verdict on an attempt; a store that is away for a while is asked again."""
        until, said = time.monotonic() + AWAY_S, False
        while True:
            try:
                return settle(self._store, attempt, wish)
            except Exception as error:
                if time.monotonic() > until or self._stopping.is_set():
                    raise
                if not said:
                    log.warning("no word on table swap %s from the job's store, asking again: %s", attempt, error)
                said, wish = True, CANCEL  # unless the wish has come through; executions may be waiting
                self._stopping.wait(_ROUND_S)

    def _stage(self, question: Mapping[str, Any], about: Message) -> tuple[Answers, str]:
        processes, table = question["processes"], question["table"]
        message = {"do": "stage", **about}
        staged = self._ask(processes, "staged", message, table)
        unknown = [p for p, a in staged.items() if a["unknown"]]
        if unknown:
            # Parsed and checked now, off every collective's path, and kept: it is sent once.
            refusal = _refusal(unknown, self._ask(unknown, "loaded", {**about, "do": "program"}, question["blob"]))
            if refusal:
                return staged, refusal
            staged = {p: a for p, a in staged.items() if p not in unknown}
            staged |= self._ask(unknown, "staged", message, table)
        return staged, _refusal(processes, staged)

    def _ask(self, processes: Sequence[int], answer: str, message: Message, payload: bytes = b"") -> Answers:
        """The answers that come in time, by process. What else comes meanwhile is handled."""
        for process in processes:
            self._channel.send(process, message, payload)
        answers: Answers = {}
        deadline = time.monotonic() + ANSWER_S
        while len(answers) < len(processes) and (left := deadline - time.monotonic()) > 0:
            for who, got, data in self._channel.receive(min(left, 0.1)):
                if got["do"] == answer and got.get("attempt") == message["attempt"]:
                    answers[who] = got
                else:
                    self._handle(who, got, data)
            if self._stopping.is_set():
                break
        return answers


def _refusal(processes: Sequence[int], answers: Answers) -> str:
    """Why not all have agreed; "" if they have."""
    missing = [p for p in processes if p not in answers]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"{_UNANSWERED} from process {missing[0]}{more}"
    return next((f"process {p}: {a['error']}" for p, a in answers.items() if a.get("error")), "")
