"""How long a call sleeps: not past the end of its operation, whichever thread or carrier brings that."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from jaxcoll.schedule import Kind, build

from .harness import Cluster, on_threads

pytestmark = pytest.mark.timeout(60)

SPIN = 0.2  # seconds that a call stays with its operation, far more than anything here takes


class OneDeviceAProcess(Cluster):
    """Processes 0 and 1 share memory, 2 is on another host."""

    def _join(self) -> None:
        self._join_shm(range(2))
        for a, b in itertools.combinations(range(3), 2):
            self._join_tcp([(a, b)], carries_data=b == 2)


def quick(cluster: Cluster, peer: int) -> float:
    """Seconds from the beginning of a peer to the end of rank 0's call, which sleeps by then: of its quicker rounds."""
    rounds, devices, value = 60, [0, peer], np.ones(256, np.float32)
    came, over = np.zeros(rounds), np.zeros(rounds)
    key = cluster.define([build("one_shot", Kind.ALL_REDUCE, 2)], devices)
    together = threading.Barrier(2)

    def run(rank: int) -> None:
        for launch in range(rounds):
            together.wait(30)
            if rank == 1:
                time.sleep(0.0002)
                came[launch] = time.perf_counter()
            op = cluster.start(rank, Kind.ALL_REDUCE, value, key, launch=launch, devices=devices)
            assert op.wait(5)
            if rank == 0:
                over[launch] = time.perf_counter()

    on_threads([lambda r=r: run(r) for r in (0, 1)])
    return float(np.quantile(over - came, 0.2))


@pytest.mark.parametrize("peer", [1, 2])
def test_a_process_with_two_ways_in_hears_both(peer: int):
    """Whichever way a message comes, it wakes the call that sleeps until then; no timer does."""
    alone = Cluster("shm" if peer == 1 else "tcp", 3, spin=SPIN)
    with OneDeviceAProcess("shm", 3, spin=SPIN) as both, alone:
        found = [quick(both, peer) - quick(alone, peer)]
        while found[-1] > 0.0002 and len(found) < 10:  # others may have had the cores
            found.append(quick(both, peer) - quick(alone, peer))
    assert found[-1] <= 0.0002, found


@pytest.mark.parametrize("transport", ["shm", "shm-ring", "tcp", "mixed"])
def test_calls_return_when_another_thread_ends_their_operation(transport: str):
    """Two collectives at once in every process: whoever polls handles the messages of both."""
    ranks, sites, rounds = (8 if transport == "mixed" else 2), (1, 2), 60
    devices = [0, 2] if transport == "mixed" else [0, 1]
    value, late = np.ones(20_000, np.float32), []
    with Cluster(transport, ranks, spin=SPIN) as cluster:
        key = cluster.define([build("one_shot", Kind.ALL_REDUCE, 2)], devices)
        together = threading.Barrier(2 * len(sites))

        def run(rank: int, site: int) -> None:
            for launch in range(rounds):
                together.wait(30)
                begin = time.perf_counter()
                op = cluster.start(rank, Kind.ALL_REDUCE, value, key, launch=launch, site=site, devices=devices)
                if time.perf_counter() - begin > SPIN / 2:
                    late.append((rank, site, launch))
                assert op.wait(5)

        on_threads([lambda r=r, s=s: run(r, s) for r in (0, 1) for s in sites])
    assert not late
