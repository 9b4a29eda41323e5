"""Replace `jax.lax.psum` by `jaxcoll.psum` in a shard_map program: one word, the same numbers.

python examples/replace_psum.py                    one process, 8 devices
jaxcoll launch -n 8 examples/replace_psum.py       8 processes
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import launch


def standardise(ops: ModuleType, mesh: jax.sharding.Mesh, rows: jax.Array) -> jax.Array:
    """Shift and scale every column to mean 0 and variance 1 over all rows, which lie spread over the ranks.

    ops: `jax.lax` or `jaxcoll`; both have the operations under the same names.
    """

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"))
    def run(part: jax.Array) -> jax.Array:
        count, total = ops.psum((jnp.float32(len(part)), part.sum(axis=0)), "rows")
        centred = part - total / count
        variance = ops.psum((centred**2).sum(axis=0), "rows") / count
        return centred / jnp.sqrt(variance)

    return run(rows)


def main() -> int:
    launch.initialize(devices=8)
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    data = np.random.default_rng(0).normal(3.0, 2.0, (1024, 16)).astype(np.float32)
    rows = jax.make_array_from_callback(data.shape, NamedSharding(mesh, P("rows")), lambda index: data[index])
    ours, theirs = standardise(jaxcoll, mesh, rows), standardise(jax.lax, mesh, rows)
    apart = max(
        float(np.max(np.abs(np.asarray(a.data) - np.asarray(b.data))))
        for a, b in zip(ours.addressable_shards, theirs.addressable_shards, strict=True)
    )
    print(f"{jax.device_count()} ranks; largest difference between jaxcoll and jax.lax: {apart:.1e}")
    return 0 if apart < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
