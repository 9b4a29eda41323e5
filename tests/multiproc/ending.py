"""A rank that starts its last steps and ends without waiting for them; process 0 takes part in them later.

Usage: ending.py kept|dropped
"""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import launch

ROWS, STEPS, LATE_S = 600, 4, 1.5  # a step computes for some tens of milliseconds between its collectives


def body(x: jax.Array) -> jax.Array:
    for _ in range(20):
        x = jnp.tanh(x @ x) + 1
    return jaxcoll.pmean(x, "i") / ROWS


def train() -> jax.Array:
    mesh = jax.make_mesh((len(jax.devices()),), ("i",))
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    row = jax.device_put(np.ones((ROWS, ROWS), np.float32), jax.local_devices()[0])
    x = jax.make_array_from_single_device_arrays((mesh.size * ROWS, ROWS), NamedSharding(mesh, P("i")), [row])
    x = step(x)
    x.block_until_ready()
    if jax.process_index() == 0:
        time.sleep(LATE_S)
    for _ in range(STEPS):
        x = step(x)
    return x


launch.initialize()
began = time.monotonic()
last = train()
if jax.process_index() == 0:
    print(f"result {float(last.addressable_data(0)[0, 0]):.3f}", flush=True)
else:
    print(f"started all after {time.monotonic() - began:.2f} s", flush=True)
    if sys.argv[1] == "dropped":
        del last
