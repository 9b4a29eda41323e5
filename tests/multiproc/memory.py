"""A rank that tells how much memory a large sum takes beyond its argument and result. Usage: memory.py MIB"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import launch


def peak_kib() -> int:
    """The highest resident size so far."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")


def main(mib: int) -> None:
    launch.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("i",))
    step = jax.jit(jax.shard_map(lambda x: jaxcoll.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    n = (mib << 20) // 4
    kept: list[Any] = []

    def operand(count: int) -> jax.Array:
        kept.append(np.ones((1, count), np.float32))
        row = jax.device_put(kept[-1], jax.local_devices()[0])
        return jax.make_array_from_single_device_arrays((mesh.size, count), NamedSharding(mesh, P("i")), [row])

    step(operand(1024)).block_until_ready()  # the world is made, the first program compiled
    x = operand(n)
    compiled = step.lower(x).compile()
    # XLA's own code is paged in by a program of the same shape that sends nothing; its result stays, so that no freed
    # memory hides ours.
    kept.append(jax.jit(lambda v: v * 2)(x).block_until_ready())
    with open("/proc/self/status") as status:
        before = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    reset_peak()
    result = compiled(x)
    result.block_until_ready()
    more = (peak_kib() - before) / 1024 - mib
    print(f"rank {jax.process_index()}: beyond argument and result {more:.1f} MiB", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
