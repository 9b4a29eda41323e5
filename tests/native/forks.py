"""Rank 1 of two, in a process of its own, which forks a child that sleeps. Arguments: its connections."""

from __future__ import annotations

import os
import sys
import time

from jaxcoll.runtime.native import load


def member(connections: list[int]) -> None:
    native = load()
    world = native.lib.jc_world_create(native.ffi.new("jc_options*", {"threads": 1, "timeout_ns": 10**10}), 2, 1)
    for p in range(2):
        native.check(native.lib.jc_world_add_devices(world, p, native.int64s([p]), 1))
    fds = native.ffi.new("int[]", connections)
    native.check(native.lib.jc_world_tcp_peer(world, 0, fds, len(connections), 1))
    native.check(native.lib.jc_world_start(world))
    if os.fork() == 0:
        print(os.getpid(), flush=True)
    time.sleep(60)


if __name__ == "__main__":
    member([int(a) for a in sys.argv[1:]])
