"""A world that can't start leaves nothing behind; a forked child of one that has started is no member of the job."""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest

from jaxcoll import config
from jaxcoll.errors import CollectiveError, UsageError
from jaxcoll.runtime import job, world

_START = """
import multiprocessing, os, sys, warnings
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxcoll
from jaxcoll.runtime import probe, world

mesh = jax.make_mesh((2,), ("i",))

def total(n):
    x = jax.device_put(np.ones((2, n), np.float32), NamedSharding(mesh, P("i")))
    step = jax.shard_map(lambda x: jaxcoll.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    return float(jax.jit(step)(x)[0, 0])
"""

_FAILS = """
def fail():
    raise RuntimeError("no measurement")

jax.devices()
measure, probe.copy_beta = probe.copy_beta, fail
kept = []
for _ in range(4):
    try:
        jaxcoll.init()
    except RuntimeError as error:
        assert "no measurement" in str(error)
    kept.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), world.running()))
assert kept[1:] == kept[:-1] and kept[0][2] is None, kept
probe.copy_beta = measure
assert total(10) == 2
print("fine")
"""

_FORKS = """
def child():
    try:
        jaxcoll.init()
    except jaxcoll.errors.UsageError as error:
        print(error, flush=True)
        sys.exit(7)

assert total(10) == 2
warnings.simplefilter("ignore")
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(30)
assert process.exitcode == 7, process.exitcode
assert total(11) == 2
print("fine")
"""


@pytest.mark.parametrize("script", [_FAILS, _FORKS], ids=["fails", "forks"])
def test_start(script: str):
    done = subprocess.run([sys.executable, "-c", _START + script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("fine\n")
    if script is _FORKS:
        assert "was forked from process" in done.stdout
        assert "spawn" in done.stdout


@pytest.mark.parametrize(("local", "ranks"), [(1, 2), (1, 8), (1, 64), (8, 64)])
def test_a_late_process_keeps_what_24_collectives_in_30_launches_send_it(local: int, ranks: int):
    assert world.early_bytes(local, ranks) >= 24 * 30 * local * (ranks - local) * (16 << 10)
    assert world.early_bytes(local, ranks) >= 256 << 20


@pytest.mark.parametrize(
    ("alike", "address", "words"),
    [
        ({"tcp_connections": 8}, "10.0.0.2", "JAXCOLL_TCP_CONNECTIONS is '8' in process 1 and '4' in 0; set it alike"),
        ({"gpu_layout": "groups"}, "10.0.0.2", "JAXCOLL_GPU_LAYOUT is 'groups' in process 1"),
        ({"schedule": {"*": "ring"}}, "10.0.0.2", "JAXCOLL_SCHEDULE is 'ring' in process 1 and '' in 0; set it alike"),
        ({}, "127.0.0.1", "process 1 would be reached at 127.0.0.1, which leads only to its own host.*SOCKET_IFNAME"),
    ],
)
def test_what_must_be_alike_is_compared_before_anybody_waits(alike: dict[str, object], address: str, words: str):
    joined = world.World.__new__(world.World)
    joined.job = job.Job(2, 0, ((0,), (1,)), None, None)
    mine = world.Peer("1", "one", 0, "10.0.0.1", 0, [0], world.must_be_alike(config.Config()))
    joined.peers = [mine, world.Peer("1", "two", 0, address, 0, [1], world.must_be_alike(config.Config(**alike)))]
    with pytest.raises(UsageError, match=words):
        joined._check_peers(mine)  # pyright: ignore[reportPrivateUsage]
    joined.peers[1:] = [world.Peer("1", "two", 0, "10.0.0.2", 0, [1], mine.alike)]
    joined._check_peers(mine)  # pyright: ignore[reportPrivateUsage]


def test_the_order_of_schedules_by_kind_is_no_difference():
    one, other = (
        {"schedule": config.parse("JAXCOLL_SCHEDULE", text)} for text in ("*=ring,permute=x", "permute=x,ring")
    )
    assert world.must_be_alike(config.Config(**one)) == world.must_be_alike(config.Config(**other))


@pytest.mark.parametrize(
    ("transport", "numbers"), [("auto", (0, 0, 0, 1, 0, 2, 2)), ("tcp", (0, 0, 1, 2, 3, 4, 4))], ids=["auto", "tcp"]
)
def test_hosts_are_numbered_in_the_order_of_the_processes_without_gaps(transport: str, numbers: tuple[int, ...]):
    joined = world.World.__new__(world.World)  # only who has joined: no engine, no links
    devices = ((0, 1), (2,), (3,), (4,), (5, 6))
    joined.job = job.Job(5, 0, devices, None, None)
    joined.settings = config.Config(transport=transport)
    hosts = ("one", "one", "two", "one", "three")
    joined.peers = [world.Peer("", host, 0, "", 0, list(d), {}) for host, d in zip(hosts, devices, strict=True)]
    assert joined.hosts_of(range(7)) == numbers
    assert joined.hosts_of([6, 3]) == numbers[6:2:-3]


def test_a_process_that_is_waited_for_is_named_in_good_time(caplog: pytest.LogCaptureFixture) -> None:
    class Client:
        waits: ClassVar[list[int]] = []

        def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
            self.waits.append(milliseconds)
            if key == "jaxcoll/gone":
                raise RuntimeError("UNAVAILABLE: failed to connect")
            if len(self.waits) < 3:
                raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return "here"

    store = job.CoordinationStore(Client(), warn_after=2.0)
    with caplog.at_level("WARNING", "jaxcoll"), pytest.raises(CollectiveError, match="within 9 s: process 3 has not"):
        store.get("peer/3", 9.0)
    assert Client.waits == [2000, 7000]
    (warning,) = (record.getMessage() for record in caplog.records)
    assert "waiting for 'peer/3' since 2 s, for 9 at most: process 3 has not reached" in warning
    assert store.get("peer/3", 9.0) == "here"
    with pytest.raises(CollectiveError, match="can't be asked for 'gone': UNAVAILABLE"):
        store.get("gone", 9.0)
