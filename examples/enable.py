"""`jaxcoll.enable()`: a program that knows nothing of jaxcoll, its gradients' own sums included.

python examples/enable.py                    one process, 8 devices
jaxcoll launch -n 8 examples/enable.py       8 processes
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import launch


def make_step(mesh: jax.sharding.Mesh) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """A step as one finds it: plain JAX. The weights are equal on all ranks, so JAX itself adds the sum of their
    gradient over the ranks; no collective for it stands in the source."""

    def loss(weights: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.lax.pmean(jnp.mean((rows @ weights - rows[:, :1]) ** 2), "data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    def step(weights: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(weights, rows)
        return weights - 0.1 * gradient, value

    return jax.jit(step)


def train(mesh: jax.sharding.Mesh, data: np.ndarray, steps: int = 20) -> tuple[np.ndarray, int]:
    """Returns (the loss at each step, how many collectives of the compiled step are jaxcoll's)."""
    rows = jax.make_array_from_callback(data.shape, NamedSharding(mesh, P("data")), lambda index: data[index])
    weights = jax.device_put(jnp.zeros((data.shape[1], 1)), NamedSharding(mesh, P()))
    step = make_step(mesh)
    ours = step.lower(weights, rows).as_text().count("@jaxcoll_collective")
    losses: list[float] = []
    for _ in range(steps):
        weights, loss = step(weights, rows)
        losses.append(float(loss.addressable_data(0)))
    return np.array(losses), ours


def main() -> int:
    launch.initialize(devices=8)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    data = np.random.default_rng(0).normal(size=(512, 8)).astype(np.float32)
    plain, none = train(mesh, data)
    with jaxcoll.enable():  # or, for the rest of the program: jaxcoll.enable()
        routed, some = train(mesh, data)
    apart = float(np.max(np.abs(plain - routed)))
    print(f"collectives in the step that are jaxcoll's: {none} before, {some} with enable()")
    print(f"loss {plain[0]:.4f} -> {plain[-1]:.4f} and {routed[-1]:.4f}; largest difference {apart:.1e}")
    return 0 if none == 0 and some >= 2 and apart < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
