"""The control channel: frames, both carriers, and who is let in."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
from needs import need

from jaxcoll.runtime import control
from jaxcoll.runtime.job import MemoryStore
from jaxcoll.runtime.swap import CANCEL, COMMIT, points_behind, settle, verdict_key
from jaxcoll.runtime.worker import Worker


def test_frames_hold_message_and_payload():
    message = {"do": "x", "number": 2**64 - 1}
    assert control.unpack(control.pack(message, b"\0\1")) == (message, b"\0\1")


@pytest.mark.parametrize("frame", [b"", b"\1", control.pack({"no": 1}, b""), b"\4\0\0\0[12]"])
def test_a_frame_that_is_none_is_refused(frame: bytes):
    with pytest.raises(ValueError):
        control.unpack(frame)


def exchange(leader: control.LeaderEnd, worker: control.WorkerEnd, me: int) -> None:
    """A word up, two down in order, and one pushed."""
    worker.send({"do": "hello"})
    assert worker.push({"do": "records"}, b"abc")
    got: list[tuple[int, control.Message, bytes]] = []
    deadline = time.monotonic() + 20
    while len(got) < 2 and time.monotonic() < deadline:
        got += leader.receive(0.5)
    assert sorted(got, key=lambda g: g[1]["do"]) == [(me, {"do": "hello"}, b""), (me, {"do": "records"}, b"abc")]
    for i in range(2):
        leader.send(me, {"do": "stage", "i": i}, b"t")
    answers: list[tuple[control.Message, bytes]] = []
    while len(answers) < 2 and time.monotonic() < deadline:
        answers += worker.receive(0.5)
    assert answers == [({"do": "stage", "i": 0}, b"t"), ({"do": "stage", "i": 1}, b"t")]
    assert worker.receive(0.01) == []


def test_the_store_carries_messages():
    store = MemoryStore()
    exchange(control.KvLeader(store, 3), control.KvWorker(store, 2), 2)
    assert store.list_bytes("loop/") == [], "read messages must not stay in the store"


def test_what_nobody_reads_does_not_heap_up_in_the_store():
    store = MemoryStore()
    leader, worker = control.KvLeader(store, 2), control.KvWorker(store, 1)
    pushed = [worker.push({"do": "records"}, b"x") for _ in range(200)]
    assert sum(pushed) == len(store.list_bytes("loop/up/")) < 100
    assert not pushed[-1]
    assert len(leader.receive(0)) == sum(pushed)
    assert worker.push({"do": "records"}), "there is room again"
    while worker.push({"do": "records"}):
        pass
    assert not worker.send({"do": "set"}), "who announces must know that it was in vain"


def test_descriptors_of_any_number_can_be_waited_for():
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need(hard > 2100, "2100 open files", "FILES")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2100), hard))
    read, write = os.pipe()
    try:
        high = os.dup2(read, 2000)
        assert not control.readable([high], 0)
        os.write(write, b"!")
        assert control.readable([high], 1.0)
        os.close(high)
    finally:
        os.close(read)
        os.close(write)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_queues_carry_messages_inside_a_process():
    local = control.Local()
    exchange(control.LocalLeader(local), local, 0)


def test_a_descriptor_ends_the_leaders_wait():
    store, local = MemoryStore(), control.Local()
    ends = [control.LocalLeader(local), control.JoinedLeader(control.Local(), control.KvLeader(store, 2))]
    if control.has_zmq():
        ends.append(control.JoinedLeader(local, control.ZmqLeader(MemoryStore(), "127.0.0.1")))
    read, write = os.pipe()
    os.write(write, b"!")
    for end in ends:
        began = time.monotonic()
        assert end.receive(5.0, [read]) == []
        assert time.monotonic() - began < 2.0
    local.push({"do": "hello"})
    assert [got[1]["do"] for got in ends[-1].receive(5.0)] == (["hello"] if control.has_zmq() else [])
    for end in ends:
        end.close()
    os.close(read)
    os.close(write)


@contextlib.contextmanager
def over_zmq(store: MemoryStore) -> Generator[tuple[control.ZmqLeader, control.ZmqWorker]]:
    """The leader's end, and that of process 1, which have spoken to each other."""
    need(control.has_zmq(), "pyzmq", "ZMQ")
    leader = control.ZmqLeader(store, "127.0.0.1")
    with contextlib.closing(leader), contextlib.closing(control.ZmqWorker(store, 1, 5.0)) as worker:
        exchange(leader, worker, 1)
        yield leader, worker


def test_zmq_carries_messages_and_lets_in_the_jobs_key_only():
    store = MemoryStore()
    with over_zmq(store) as (leader, _):
        import zmq

        found = json.loads(store.get("loop/endpoint", 1))
        public, secret = zmq.curve_keypair()
        store.set("loop/endpoint", json.dumps({**found, "public": public.decode(), "secret": secret.decode()}))
        with contextlib.closing(control.ZmqWorker(store, 2, 5.0)) as stranger:
            stranger.send({"do": "hello"})
            assert leader.receive(0.7) == []


def test_a_worker_that_comes_again_takes_its_old_connections_place():
    # After a cut its old connection may still look alive to the leader.
    store = MemoryStore()
    with over_zmq(store) as (leader, _), contextlib.closing(control.ZmqWorker(store, 1, 5.0)) as new:
        exchange(leader, new, 1)


class Shaky(MemoryStore):
    """A store that can be away."""

    away = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("set_bytes", "get_bytes", "list_bytes", "delete", "set_once", "get") and self.away:
            raise RuntimeError("UNAVAILABLE: socket closed")
        return super().__getattribute__(name)


def test_a_store_that_is_away_for_a_while_ends_nothing(caplog: pytest.LogCaptureFixture):
    store = Shaky()
    leader, worker = control.KvLeader(store, 3), control.KvWorker(store, 2)
    exchange(leader, worker, 2)
    store.away = True
    with caplog.at_level(logging.WARNING, "jaxcoll"):
        leader.send(2, {"do": "stage"})
        assert leader.receive(0.02) == leader.receive(0.02) == []
    assert len(caplog.records) == 1
    store.away = False
    exchange(leader, worker, 2)


def test_a_store_that_is_gone_for_good_ends_the_worker_with_one_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(control, "AWAY_S", 0.2)
    store, stopped = Shaky(), list[str]()

    class Part:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: stopped.append(name)

    one = Worker.__new__(Worker)
    one._channel, one.swaps, one._drain, one._stopping = control.KvWorker(store, 1), Part(), Part(), threading.Event()  # type: ignore[assignment]
    one._over, one._said_at, one._looked = False, None, time.monotonic() + 60
    store.away = True
    with caplog.at_level(logging.WARNING, "jaxcoll"):
        one._run()
        assert not one._channel.push({"do": "records"})
    assert one.over
    assert "stop" in stopped
    away, over = (record.getMessage() for record in caplog.records)
    assert "trying again" in away
    assert "the tuner has stopped here: the job's store has been away" in over


def test_where_no_socket_can_be_opened_all_use_the_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    need(control.has_zmq(), "pyzmq with encryption", "NATIVE")
    # An address of another machine (RFC 5737).
    monkeypatch.setattr(control.links, "local_address", lambda *_: "203.0.113.1")
    store = MemoryStore()
    store.set("loop/zmq/1", "1")
    with caplog.at_level(logging.WARNING, "jaxcoll"):
        leads, end, name = control.open_channel(store, 0, 2, "", None, 10.0)
    assert name == "store"
    assert "can't be opened on 203.0.113.1" in caplog.text
    assert leads is not None
    leads.close()
    end.close()


def test_without_pyzmq_in_one_process_all_use_the_store(monkeypatch: pytest.MonkeyPatch):
    store = MemoryStore()
    names: dict[int, str] = {}
    has = threading.local()
    monkeypatch.setattr(control, "has_zmq", lambda: has.zmq)

    def join(me: int) -> None:
        has.zmq = me != 1
        _, end, names[me] = control.open_channel(store, me, 3, "", "127.0.0.1:1", 10.0)
        end.close()

    threads = [threading.Thread(target=join, args=(me,)) for me in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert names == {0: "store", 1: "store", 2: "store"}


def test_the_first_verdict_stands():
    store = MemoryStore()
    assert settle(store, "1", CANCEL) == CANCEL
    assert settle(store, "1", COMMIT) == CANCEL
    store.delete(verdict_key("1"))
    assert settle(store, "1", COMMIT) == COMMIT


def test_points_lie_behind_the_furthest_launch():
    wrapped = [[(7, 2**31 - 1, 3)], [(7, 2**31 + 1, 0), (8, -5, 9)]]
    assert points_behind(wrapped, 4) == [(7, 2**31 + 5, 0), (8, -1, 0)]
