"""Data-parallel training with Flax (nnx) on scikit-learn's digits, gradients summed by jax.lax or by jaxcoll.

    python examples/train_digits.py                               one process, 8 devices
    jaxcoll launch -n 8 --output first examples/train_digits.py   8 processes, a device each
    python examples/train_digits.py --demo                        the same, started from here (`make demo`)

With `--impl both` (the default) two copies of one model learn from the same batches, step by step in turn, so that the
loss curves can be laid side by side and the times compare.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import jaxcoll
from jaxcoll import launch

RANKS = 8
AXIS = "data"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", choices=("both", "lax", "jaxcoll"), default="both", help="who sums the gradients")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=256, help="examples a step, over all ranks")
    parser.add_argument("--width", type=int, default=512, help="of the two hidden layers")
    parser.add_argument("--repeats", type=int, default=40, help="calls of the gradient sum alone, timed at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demo", action="store_true", help=f"start {RANKS} processes of this program")
    return parser.parse_args(argv)


def demo(arguments: list[str]) -> int:
    """Run this file as 8 processes; rank 0 talks to the terminal."""
    command = [sys.executable, __file__, *(word for word in arguments if word != "--demo")]
    with launch.Ranks(command, RANKS, output="first") as ranks:
        result = ranks.wait(timeout=900)
        for rank in range(1, RANKS):
            if result.codes[rank]:
                print(ranks.tail(rank), file=sys.stderr)
    return result.exit_code


class Classifier(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, kernel_init=nnx.initializers.he_uniform(), rngs=rngs)
        self.layers = nnx.List([linear(64, width), linear(width, width)])
        self.head = linear(width, 10)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.head(x)


def load(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(training images, labels, test images, labels); images f32 (n, 64) in 0..1."""
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    images, labels = (digits.data / 16.0).astype(np.float32)[order], digits.target.astype(np.int32)[order]
    return images[360:], labels[360:], images[:360], labels[:360]


@dataclasses.dataclass
class Trainer:
    """One copy of the model and the programs that train it with one implementation of `pmean`."""

    name: str
    step: Callable[..., Any]
    average: Callable[..., Any]
    params: Any
    opt_state: Any
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


def make_logits(width: int) -> Callable[[Any, jax.Array], jax.Array]:
    """The model as a function of its parameters: (params, images (n, 64)) -> (n, 10)."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: Classifier(width, nnx.Rngs(0))))
    return lambda params, images: nnx.merge(graph, params)(images)


def make_params(width: int, seed: int, mesh: jax.sharding.Mesh) -> Any:
    """The parameters to start from, equal on all ranks."""

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def init() -> Any:
        # The default generator takes seconds to compile, in each of eight processes.
        key = jax.random.key(seed, impl="rbg")
        return nnx.state(Classifier(width, nnx.Rngs(key)), nnx.Param)

    return init()


def make_trainer(
    name: str, ops: ModuleType, mesh: jax.sharding.Mesh, logits: Callable[..., jax.Array], params: Any
) -> Trainer:
    optimizer = optax.adam(1e-3)

    def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P(AXIS), P(AXIS)), out_specs=(P(), P(), P()))
    def step(params: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> Any:
        # Each rank takes the gradient of its own part (hence the cast: autodiff would sum over the ranks else) ...
        local = jax.tree.map(lambda p: jax.lax.pcast(p, AXIS, to="varying"), params)
        loss, grads = jax.value_and_grad(loss_fn)(local, images, labels)
        # ... and this is the one line that differs between the two implementations.
        loss, grads = ops.pmean((loss, grads), AXIS)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P())
    def average(grads: Any) -> Any:
        return ops.pmean(jax.tree.map(lambda p: jax.lax.pcast(p, AXIS, to="varying"), grads), AXIS)

    opt_state = jax.jit(optimizer.init, out_shardings=NamedSharding(mesh, P()))(params)
    return Trainer(name, step, average, params, opt_state)


def train(
    trainers: list[Trainer], args: argparse.Namespace, mesh: jax.sharding.Mesh, data: tuple[np.ndarray, ...], say: Any
) -> None:
    sharding = NamedSharding(mesh, P(AXIS))
    rng, size = np.random.default_rng(args.seed + 1), len(data[0])
    steps = size // args.batch
    mine = np.array_split(np.arange(args.batch), jax.process_count())[jax.process_index()]
    for epoch in range(args.epochs):
        order = rng.permutation(size)
        for i in range(steps):
            rows = order[i * args.batch :][: args.batch][mine]
            batch = [jax.make_array_from_process_local_data(sharding, part[rows]) for part in data]
            for trainer in trainers:
                start = time.perf_counter()
                trainer.params, trainer.opt_state, loss = trainer.step(trainer.params, trainer.opt_state, *batch)
                trainer.losses.append(float(loss.addressable_data(0)))
                trainer.seconds.append(time.perf_counter() - start)
        recent = ", ".join(f"{t.name} {np.mean(t.losses[-steps:]):.4f}" for t in trainers)
        say(f"epoch {epoch + 1}/{args.epochs}: loss {recent}", done=epoch + 1 == args.epochs)


def time_sums(trainers: list[Trainer], repeats: int) -> dict[str, float]:
    """Median seconds of the gradient sum alone, the implementations in turn, blocks of five calls."""
    seconds: dict[str, list[float]] = {trainer.name: [] for trainer in trainers}
    while min(map(len, seconds.values())) < repeats:
        for trainer in trainers:
            for call in range(6):
                start = time.perf_counter()
                jax.block_until_ready(trainer.average(trainer.params))
                if call:  # the first of a block also waits for ranks that come late from the other implementation
                    seconds[trainer.name].append(time.perf_counter() - start)
    return {name: float(np.median(values)) for name, values in seconds.items()}


def report(trainers: list[Trainer], sums: dict[str, float], accuracy: dict[str, float]) -> str:
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trainers[0].params))
    rows = {
        "communication a step (gradient sum), ms": [sums[t.name] * 1e3 for t in trainers],
        "whole training step, ms": [float(np.median(t.seconds[1:])) * 1e3 for t in trainers],
        "loss of the last step": [t.losses[-1] for t in trainers],
        "accuracy on the test set": [accuracy[t.name] for t in trainers],
    }
    lines = [
        f"{jax.device_count()} ranks in {jax.process_count()} processes, {size / 2**20:.2f} MiB of gradients a step",
        "",
    ]
    lines.append(
        f"{'':42}" + "".join(f"{t.name:>12}" for t in trainers) + ("       ratio" if len(trainers) > 1 else "")
    )
    for label, values in rows.items():
        ratio = f"{values[0] / values[1]:11.1f}x" if len(values) > 1 and label.endswith("ms") else ""
        lines.append(f"{label:42}" + "".join(f"{value:12.4f}" for value in values) + ratio)
    if len(trainers) > 1:
        apart = np.max(np.abs(np.subtract(trainers[0].losses, trainers[1].losses)))
        lines += ["", f"largest difference between the two loss curves: {apart:.2e}"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    args = parse(argv)
    if args.demo:
        return demo(argv)
    launch.initialize(devices=RANKS)
    talks = jax.process_index() == 0

    def say(text: str, done: bool = True) -> None:
        if talks and (done or sys.stdout.isatty()):
            print(f"\r\x1b[K{text}" if sys.stdout.isatty() else text, end="\n" if done else "", flush=True)

    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    names = ("lax", "jaxcoll") if args.impl == "both" else (args.impl,)
    images, labels, test_images, test_labels = load(args.seed)
    logits, params = make_logits(args.width), make_params(args.width, args.seed, mesh)
    trainers = [make_trainer(name, jax.lax if name == "lax" else jaxcoll, mesh, logits, params) for name in names]
    say(f"training on {len(images)} digits: {args.epochs} epochs, batches of {args.batch}, {jax.device_count()} ranks")
    train(trainers, args, mesh, (images, labels), say)
    accuracy: dict[str, float] = {}
    for trainer in trainers:
        params = jax.tree.map(lambda leaf: leaf.addressable_data(0), trainer.params)
        accuracy[trainer.name] = float(
            jnp.mean(jnp.argmax(jax.jit(logits)(params, test_images), axis=-1) == test_labels)
        )
    say(report(trainers, time_sums(trainers, args.repeats), accuracy))
    return 0 if min(accuracy.values()) > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
