"""Many independent collectives in one program, many launches in flight: what deadlocks a handler that waits.

Usage: inflight.py DEVICES RUNS
"""

from __future__ import annotations

import os
import sys

DEVICES, RUNS = int(sys.argv[1]), int(sys.argv[2])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["PJRT_NPROC"] = str(2 * DEVICES)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxcoll  # noqa: E402

CALLS, LAUNCHES = 24, 30


def program(x: jax.Array) -> jax.Array:
    """24 sums that depend on nothing but the operand, each of other numbers, so that a mixed-up pair shows."""
    return jnp.stack([jaxcoll.psum(x * float(k + 1), "i") for k in range(CALLS)])


def main() -> None:
    mesh = jax.make_mesh((DEVICES,), ("i",))
    step = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("i"), out_specs=P(None)))
    sharding = NamedSharding(mesh, P("i"))
    for run in range(RUNS):
        inputs = [jax.device_put(np.full((DEVICES, 512), run + i, np.float32), sharding) for i in range(LAUNCHES)]
        results = [step(x) for x in inputs]
        for i, result in enumerate(results):
            want = DEVICES * float(run + i) * np.arange(1, CALLS + 1)
            assert (np.asarray(result).reshape(CALLS, -1) == want[:, None]).all(), (run, i)
    print(
        f"{RUNS} runs of {LAUNCHES} launches in flight, {CALLS} independent collectives, {DEVICES} devices, "
        f"jax {jax.__version__}: ok"
    )


if __name__ == "__main__":
    main()
