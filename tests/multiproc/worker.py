"""A rank of the failure tests: sums in a loop until something happens, then says what, and if jaxcoll still works."""

from __future__ import annotations

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import launch

VICTIM = 3


def placed(mesh: jax.sharding.Mesh, n: int) -> jax.Array:
    """Ones, one row a rank."""
    row = jax.device_put(np.ones((1, n), np.float32), jax.local_devices()[0])
    return jax.make_array_from_single_device_arrays((mesh.size, n), NamedSharding(mesh, P("i")), [row])


def summed(mesh: jax.sharding.Mesh):
    # One number of each row, so that the program has a result also where the row is empty.
    def largest(x: jax.Array) -> jax.Array:
        return jnp.max(jaxcoll.psum(x, "i"), axis=1, keepdims=True, initial=0)

    return jax.jit(jax.shard_map(largest, mesh=mesh, in_specs=P("i"), out_specs=P()))


def main(mode: str) -> None:
    launch.initialize()
    me, devices = jax.process_index(), jax.devices()
    mesh = jax.make_mesh((len(devices),), ("i",))
    odd = {"mismatch": 20_001, "nothing": 0}.get(mode)
    step, n = summed(mesh), odd if odd is not None and me == VICTIM else 20_000
    x = placed(mesh, 20_000)
    for _ in range(5):
        step(x).block_until_ready()
    print("ready", flush=True)
    begin = time.monotonic()
    if mode == "kill" and me == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "stop" and me == VICTIM:
        os.kill(os.getpid(), signal.SIGSTOP)  # alive, connected, and silent
    if mode == "late" and me == VICTIM:
        time.sleep(2.5)
    if odd is not None:
        x = placed(mesh, n)
    try:
        for _ in range(3 if mode == "late" else 10_000):
            assert float(step(x).addressable_data(0)[0, 0]) == len(devices)
    except Exception as error:
        text = " ".join(str(error).split())
        print(f"raised after {time.monotonic() - begin:.2f} s: {text}", flush=True)
    else:
        print("no error", flush=True)
    if mode in ("kill", "stop") and me == VICTIM:
        return
    alive = [d for d in devices if d.process_index != VICTIM] if mode in ("kill", "stop") else devices
    smaller = jax.make_mesh((len(alive),), ("i",), devices=alive)
    total = summed(smaller)(placed(smaller, 777))
    assert float(jnp.asarray(total.addressable_data(0))[0, 0]) == len(alive)
    print("still works", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
