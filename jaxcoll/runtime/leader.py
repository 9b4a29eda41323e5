"""The leader: one thread of process 0 that gathers records, runs the policy of every set, and sees swaps through.

When it is gone, or slow, tuning stops; collectives don't notice.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from jaxcoll.errors import JaxcollError
from jaxcoll.runtime.control import LeaderEnd, Message
from jaxcoll.runtime.job import Job, Store
from jaxcoll.runtime.policy import Policy
from jaxcoll.runtime.runlog import RunLog
from jaxcoll.runtime.swap import CANCEL, COMMIT, Place, SetId, settle, verdict_key
from jaxcoll.runtime.tuned import Tuned, points_behind
from jaxcoll.telemetry import Epoch, as_records
from jaxcoll.telemetry import Store as RecordStore
from jaxcoll.tuner import Decision

log = logging.getLogger("jaxcoll")

ANSWER_S = 3.0  # how long an answer may take before an attempt is given up
_TRIES = 8  # attempts at one decision, each with twice the margin
_MAX_MARGIN = 1 << 20  # launches
_FIRST_EXCHANGE_S = 0.05
_LIMIT_PER_S = 30_000  # records; above it epochs are sampled
_PENDING_PER_ROUND = 64  # epochs of a set handed to its policy before messages are looked at again


@dataclasses.dataclass(frozen=True)
class Swap:
    """How an attempt at a decision ended: `tries` attempts, a `margin` in launches, the longest stall of any process."""

    committed: bool
    tries: int
    margin: int
    exchange_s: float
    stall_s: float
    waiting: int
    refusal: str = ""


Answers = dict[int, Message]


class Leader:
    """Runs until `stop`. `hosts`: the host's number of every process."""

    def __init__(self, job: Job, store: Store, channel: LeaderEnd, policy: Policy, hosts: Sequence[int], run_log: RunLog):
        self._job, self._store, self._channel, self._policy = job, store, channel, policy
        self._hosts, self._log = tuple(hosts), run_log
        self._process_of = {d: p for p, devices in enumerate(job.devices) for d in devices}
        self._records = RecordStore()
        self.sets: dict[SetId, Tuned] = {}
        self._here: set[int] = set()
        self._attempts = 0
        self._exchange_s = _FIRST_EXCHANGE_S
        self._came = self._stride = 1
        self._counted_at = time.monotonic()
        self.history: collections.deque[dict[str, Any]] = collections.deque(maxlen=200)
        self.error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxcoll-leader", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and closes the channel and the log."""
        self._stopping.set()
        self._thread.join(ANSWER_S)
        if not self._thread.is_alive():
            self._channel.close()
        self._log.close()

    @property
    def running(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    @property
    def counts(self) -> Any:
        """Of the record store."""
        return self._records.counts()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.round()
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"
            log.exception("the tuner has stopped; collectives go on with the tables in force")

    def round(self) -> None:
        """One turn: messages, then the epochs that are complete."""
        for who, message, payload in self._channel.receive(0.05):
            self._handle(who, message, payload)
        self._throttle()
        for tuned in list(self.sets.values()):
            for epoch in self._records.take(tuned.set_id, tuned.expected)[-_PENDING_PER_ROUND:]:
                if self._stopping.is_set():
                    return
                self._feed(tuned, epoch)

    def _handle(self, who: int, message: Message, payload: bytes) -> None:
        match message["do"]:
            case "hello":
                self._here.add(who)
            case "records":
                self._push(message, payload)
            case "set":
                self._announced(message)
            case _:
                pass  # the answer to a question that is no longer asked

    def _push(self, message: Message, payload: bytes) -> None:
        records = as_records(payload)
        self._came += len(records)
        set_id = (int(message["set"][0]), int(message["set"][1]))
        for site in set(records["site"].tolist()):
            self._records.bind(set_id[0], int(site), set_id)
        self._records.push(records, int(message["dropped"]))

    def _announced(self, message: Message) -> None:
        set_id = (int(message["set"][0]), int(message["set"][1]))
        if set_id in self.sets or message["deterministic"]:
            return
        processes = [self._process_of[d] for d in message["devices"]]
        hosts = [self._hosts[p] for p in processes]
        try:
            self.sets[set_id] = Tuned(set_id, message, sorted(set(processes)), hosts, self._policy)
        except JaxcollError as error:
            log.warning("a %s over %d ranks isn't tuned: %s", message["kind"], len(hosts), error)

    def _throttle(self) -> None:
        """Too many records: every process sends the same one epoch in `stride`."""
        now = time.monotonic()
        if now - self._counted_at < 1.0:
            return
        rate = self._came / (now - self._counted_at)
        self._came, self._counted_at = 0, now
        stride = self._stride
        if rate > _LIMIT_PER_S:
            stride *= 2
        elif rate < _LIMIT_PER_S / 4 and stride > 1:
            stride //= 2
        if stride != self._stride:
            self._stride = stride
            for process in self._here:
                self._channel.send(process, {"do": "stride", "stride": stride})

    # ---------------------------------------------------------------------------------------------------------- deciding

    def _feed(self, tuned: Tuned, epoch: Epoch) -> None:
        if tuned.spec is None:
            tuned.begin(epoch)
            assert tuned.spec is not None
            self._log.write_set(tuned.policy.to_json(tuned.spec))
        seconds = tuned.note(epoch)
        self._log.write_epoch(tuned.key, epoch, seconds)
        before = tuned.state
        tuned.state, decision, why = tuned.policy.step(before, [epoch])
        if why != tuned.last and tuned.epochs > 1:
            tuned.last = why
        if decision is None:
            return
        swap = self.commit(tuned, decision)
        entry = {**decision.to_json(), **dataclasses.asdict(swap), "epochs": tuned.epochs, "time": time.time()}
        self._log.write("decision", entry)
        self.history.append({k: v for k, v in entry.items() if k != "table"})
        if swap.committed:
            tuned.took(decision)
            log.info("%s: %s", tuned.key, decision.reason)
        else:
            # As if the decision had not been taken: the policy is pure, so its earlier state says all.
            tuned.state = before
            tuned.failed += 1
            tuned.last = f"couldn't be brought into force: {swap.refusal}"
            log.warning("%s: %s (%s)", tuned.key, decision.reason, tuned.last)

    # -------------------------------------------------------------------------------------------------------- committing

    def commit(self, tuned: Tuned, decision: Decision) -> Swap:
        """Brings a decision into force on all ranks at one execution, or nowhere."""
        margin, swap = self._margin(tuned), Swap(False, 0, 0, 0.0, 0.0, 0)
        for tries in range(1, _TRIES + 1):
            swap = dataclasses.replace(self._attempt(tuned, decision, margin), tries=tries)
            if swap.committed or self._stopping.is_set():
                return swap
            margin = min(2 * margin + 1, _MAX_MARGIN)
        return swap

    def _margin(self, tuned: Tuned) -> int:
        """Launches that begin while a proposal makes its round, twice over, and one."""
        return 1 + math.ceil(2 * self._exchange_s * tuned.launch_rate() * 1.0)

    def _attempt(self, tuned: Tuned, decision: Decision, margin: int) -> Swap:
        self._attempts += 1
        attempt = f"{self._attempts}.{decision.version}"
        about = {"attempt": attempt, "set": list(tuned.set_id), "version": decision.version, "program": decision.program}
        staged, refusal = self._stage(tuned, decision, about)
        if refusal:
            return Swap(False, 1, margin, 0.0, 0.0, 0, refusal)
        began = time.monotonic()
        places: list[list[Place]] = [[(p[0], p[1], p[2]) for p in a["places"]] for a in staged.values()]
        points = points_behind(places, margin)
        promised = self._ask(tuned.processes, "promised", {"do": "propose", **about, "points": points})
        refusal = _refusal(tuned.processes, promised)
        verdict = settle(self._store, attempt, CANCEL if refusal else COMMIT)
        decided = self._ask(tuned.processes, "decided", {"do": "decide", **about, "verdict": verdict})
        exchange = time.monotonic() - began
        self._exchange_s = max(exchange, 0.8 * self._exchange_s + 0.2 * exchange)
        if len(decided) == len(tuned.processes):
            self._store.delete(verdict_key(attempt))  # nobody will ask for it any more
        stall = max((float(a["stall_s"]) for a in decided.values()), default=0.0)
        waiting = sum(int(a["waiting"]) for a in decided.values())
        refusal = refusal or ("" if verdict == COMMIT else "a process asked for the verdict before it was given")
        return Swap(verdict == COMMIT, 1, margin, exchange, stall, waiting, refusal)

    def _stage(self, tuned: Tuned, decision: Decision, about: Message) -> tuple[Answers, str]:
        table = decision.table.to_bytes()
        question = {"do": "stage", **about}
        staged = self._ask(tuned.processes, "staged", question, table)
        unknown = [p for p, a in staged.items() if a["unknown"]]
        if unknown:
            # Parsed and checked now, off every collective's path, and kept: it is sent once.
            self._ask(unknown, "loaded", {**about, "do": "program"}, tuned.blobs[decision.program])
            staged |= self._ask(unknown, "staged", question, table)
        return staged, _refusal(tuned.processes, staged)

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
        return f"no answer from process {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
    return next((f"process {p}: {a['error']}" for p, a in answers.items() if a["error"]), "")
