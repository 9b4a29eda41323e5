"""The leader's thinking, in a process of its own: records in, decisions out.

Speaks with the leader's thread over one connection (see `wire`); the first element of a message says what it is.
In: ("start", settings), ("set", set id, announcement, processes, hosts), ("records", set id, dropped, bytes),
("outcome", dict). Out: ("decision", dict), ("status", dict), ("stride", n), ("warning", text).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from jaxcoll.errors import JaxcollError
from jaxcoll.steering import policy, wire
from jaxcoll.steering.runlog import RunLog
from jaxcoll.steering.tuned import SetId, Tuned
from jaxcoll.telemetry import Epoch, Store, as_records
from jaxcoll.tuner import Decision

log = logging.getLogger("jaxcoll")

# After thinking for a second it thinks of nothing for so many: while nothing moves an eighth of a core is used at most.
# While something does it hurries: a full look takes up to 0.2 s on eight ranks, a second and more where the library is
# missing, and seven times that are batches lost.
REST, _HURRIED_REST = 7.0, 1.0
_LIMIT_PER_S = 4_000  # records; above it epochs are sampled: a policy looks at a few dozen a second at most
_CALM_PER_S = 800  # the same while all epochs are alike
_STATUS_S = 1.0
_CALM_STATUS_S = 4.0
_NICE = 10
_MESSAGES = 256  # taken before thinking again

Out = list[tuple[Any, ...]]


class Brain:
    """Everything but the connection: `take` a message, then `think`; both return what is to be sent."""

    def __init__(self, chosen: policy.Policy, run_log: RunLog, rest: float = REST):
        self._policy, self._log, self._rest = chosen, run_log, rest
        self._records = Store()
        self.sets: dict[SetId, Tuned] = {}
        self._open: tuple[Tuned, Decision, Any] | None = None
        self._last: SetId | None = None  # that was handed an epoch
        self._said: dict[str, set[str]] = {}
        self._rest_until = 0.0
        self._came, self._stride, self._counted_at = 0, 1, time.monotonic()
        self.history: collections.deque[dict[str, Any]] = collections.deque(maxlen=200)

    def take(self, message: Sequence[Any]) -> Out:
        """Handles one message from the leader."""
        match message:
            case ("set", set_id, announced, processes, hosts):
                return self._announced(tuple(set_id), announced, processes, hosts)
            case ("records", set_id, dropped, data):
                return self._push(tuple(set_id), dropped, data)
            case ("outcome", outcome):
                self._outcome(outcome)
            case _:
                pass
        return []

    def _announced(
        self, set_id: SetId, announced: Mapping[str, Any], processes: Sequence[int], hosts: Sequence[int]
    ) -> Out:
        if set_id not in self.sets and not announced["deterministic"]:
            try:
                self.sets[set_id] = Tuned(set_id, announced, processes, hosts, self._policy)
            except JaxcollError as error:
                return [("warning", f"a {announced['kind']} over {len(hosts)} ranks isn't tuned: {error}")]
        return []

    def _push(self, set_id: SetId, dropped: int, data: bytes) -> Out:
        records = as_records(data)
        self._came += len(records)
        if set_id not in self.sets:  # it isn't tuned; the store would keep for ever what nobody takes
            return self._throttle()
        for site in set(records["site"].tolist()):
            self._records.bind(set_id[0], int(site), set_id)
        self._records.push(records, dropped)
        return self._throttle()

    def _throttle(self) -> Out:
        """Too many records: every process sends the same one epoch in `stride`."""
        now = time.monotonic()
        if now - self._counted_at < 1.0:
            return []
        rate, before = self._came / (now - self._counted_at), self._stride
        self._came, self._counted_at = 0, now
        limit = _CALM_PER_S if self.calm else _LIMIT_PER_S
        while rate > limit:
            self._stride, rate = self._stride * 2, rate / 2
        while rate < limit / 4 and self._stride > 1:
            self._stride, rate = self._stride // 2, rate * 2
        return [("stride", self._stride)] if self._stride != before else []

    @property
    def calm(self) -> bool:
        """Whether all that runs is as it was for a while; what runs no more, or never did, says nothing."""
        sets = self.sets.values()
        return any(tuned.epochs for tuned in sets) and all(tuned.pace.steady for tuned in sets if tuned.running)

    def think(self) -> Out:
        """Hands complete epochs to their sets' policies, until one decides or it is time to rest."""
        if self._open is not None:
            return []
        for tuned in self.sets.values():
            # Of what comes during a rest the newest is kept: a slow job's epochs all, a quick one's last ones.
            tuned.offer(self._records.take(tuned.set_id, tuned.expected))
        for tuned in self._in_turn():
            while tuned.pending and time.monotonic() >= max(self._rest_until, tuned.rest_until):
                epoch = tuned.next_look()
                if epoch is None:
                    break
                self._last = tuned.set_id
                began = time.thread_time()
                out = self._feed(tuned, epoch)
                rest = self._rest if self.calm else min(self._rest, _HURRIED_REST)
                self._rest_until = time.monotonic() + rest * (time.thread_time() - began)
                if out:
                    return out
        return []

    def _in_turn(self) -> list[Tuned]:
        """All sets, the one that was handed an epoch last at the end: a busy one must not starve the others."""
        sets = list(self.sets.values())
        after = next((i for i, tuned in enumerate(sets, 1) if tuned.set_id == self._last), 0)
        return sets[after:] + sets[:after]

    def _feed(self, tuned: Tuned, epoch: Epoch) -> Out:
        if tuned.spec is None:
            tuned.begin(epoch)
            assert tuned.spec is not None
            self._log.write_set(tuned.policy.to_json(tuned.spec))
        seconds = tuned.note(epoch)
        self._log.write_epoch(tuned.key, epoch, seconds)
        before = tuned.state
        try:
            tuned.state, decision, tuned.last = tuned.policy.step(before, [epoch])
        except Exception as error:
            # A fault of ours in one set must not end the tuning of all others.
            tuned.stop(f"{type(error).__name__}: {error}")
            log.exception("the tuning of %s ends", tuned.key)
            return [("warning", f"{tuned.key} isn't tuned any more, a fault of the tuner: {tuned.stopped}")]
        self._judge(tuned)
        if decision is None:
            return []
        self._open = (tuned, decision, before)
        question = {
            "set": tuned.set_id,
            "processes": tuned.processes,
            "version": decision.version,
            "program": decision.program,
            "blob": tuned.blobs[decision.program],
            "table": decision.table.to_bytes(),
            "rate": tuned.launch_rate(),
        }
        return [("decision", question)]

    def _judge(self, tuned: Tuned) -> None:
        """Puts what a move has come to beside it, once."""
        verdict = tuned.policy.verdict(tuned.state)
        if verdict is None:
            return
        for entry in reversed(self.history):
            if entry["key"] == tuned.key and entry["version"] == verdict.version and entry["committed"]:
                if "measured" not in entry:
                    entry.update(measured=verdict.ratio, kept=verdict.kept)
                    log.info("%s: %s; %s", tuned.key, entry["reason"], verdict.text())
                return

    def _outcome(self, outcome: Mapping[str, Any]) -> None:
        """Notes whether the open decision is in force."""
        assert self._open is not None
        (tuned, decision, before), self._open = self._open, None
        entry = {**decision.to_json(), **outcome, "epochs": tuned.epochs, "time": time.time()}
        self._log.write("decision", entry)
        self.history.append({k: v for k, v in entry.items() if k != "table"})
        if outcome["committed"]:
            tuned.took(decision)
            log.info("%s: %s", tuned.key, decision.reason)
        else:
            # As if the decision had not been taken: the policy is pure, so its earlier state says all.
            tuned.state = before
            tuned.refused()
            tuned.last = f"couldn't be brought into force: {outcome['refusal']}"
            log.warning("%s: %s (%s)", tuned.key, decision.reason, tuned.last)

    def status(self) -> dict[str, Any]:
        """Plain data about all sets."""
        sets = [tuned.summary() for tuned in self.sets.values()]
        for tuned in self.sets.values():
            self._say(tuned)
        return {
            "swaps": sum(s["swaps"] for s in sets),
            "reverts": sum(s["reverts"] for s in sets),
            "sets": sets,
            "decisions": list(self.history),
            "store": vars(self._records.counts()),
            "stride": self._stride,
        }

    def _say(self, tuned: Tuned) -> None:
        """Logs who is late or slow, once."""
        said = self._said.setdefault(tuned.key, set())
        for line in tuned.seen()["findings"]:
            about = line.split(" is ")[0]  # the numbers behind change all the time
            if about not in said:
                said.add(about)
                log.info("%s: %s", tuned.key, line)


class Outbox:
    """Sends on a thread of its own: who reads on, whatever the other side does, can't come to a deadlock with it."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="jaxcoll-outbox", daemon=True).start()

    @property
    def empty(self) -> bool:
        """Whether all but the message under way has gone."""
        return self._messages.empty()

    def put(self, message: Sequence[Any]) -> None:
        """Sends the message as it is now, in order, some time. TypeError for what is no plain data."""
        self._messages.put(wire.pack(message))

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the leader has hung up, which is noticed where it is read
            while True:
                self._connection.send_bytes(self._messages.get())


def serve(connection: Connection) -> None:
    """Until the leader hangs up, or dies: what it has forked may hold the connection open."""
    leader = os.getppid()
    kind, settings = wire.unpack(connection.recv_bytes())
    assert kind == "start"
    logging.basicConfig(level=settings["log"].upper(), format="jaxcoll: %(message)s")
    run_log = RunLog(settings["run_log"])
    brain = Brain(policy.make(settings["policy"], **settings["params"]), run_log)
    outbox = Outbox(connection)
    told, decided = 0.0, 0
    try:
        while os.getppid() == leader:
            out: Out = []
            more = connection.poll(0.1)
            for _ in range(_MESSAGES):
                if not more:
                    break
                out += brain.take(wire.unpack(connection.recv_bytes()))
                more = connection.poll(0)
            out += brain.think()
            now = time.monotonic()
            due = now - told > (_CALM_STATUS_S if brain.calm else _STATUS_S) and outbox.empty
            if due or out or len(brain.history) != decided:
                told, decided = now, len(brain.history)
                out.append(("status", brain.status()))
            for message in out:
                outbox.put(message)
    except (EOFError, ConnectionError):
        return
    finally:
        run_log.close()


def main(argv: Sequence[str]) -> None:
    """The process: its one argument is the connection's file descriptor."""
    # An interrupt at the terminal goes to it, too, and the program may live on: the leader's hanging up ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICE)
    serve(Connection(int(argv[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
