"""Time a collective by hand. `jaxcoll bench` does more; this shows the few things that a fair number needs.

python examples/microbenchmark.py                                    one process, 8 devices
jaxcoll launch -n 8 --output first examples/microbenchmark.py        8 processes
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from types import ModuleType

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import launch

BLOCK = 5


def make(ops: ModuleType, mesh: jax.sharding.Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jax.shard_map(lambda x: ops.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))


def block(program: Callable[[jax.Array], jax.Array], x: jax.Array) -> list[float]:
    """Seconds of BLOCK calls, after one that isn't counted: the ranks come late from the other program."""
    seconds: list[float] = []
    for _ in range(1 + BLOCK):
        start = time.perf_counter()
        program(x).block_until_ready()  # a call returns before its result is there
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4096, 1 << 20, 4 << 20], help="of one rank's operand")
    parser.add_argument("--blocks", type=int, default=6)
    args = parser.parse_args(argv)
    launch.initialize(devices=8)
    n = jax.device_count()
    mesh = jax.make_mesh((n,), ("i",))
    programs = {"jax.lax": make(jax.lax, mesh), "jaxcoll": make(jaxcoll, mesh)}
    for size in args.bytes:
        shape = (n * (size // 4),)
        x = jax.make_array_from_callback(
            shape, NamedSharding(mesh, P("i")), lambda index: np.full(index[0].stop - index[0].start, 1.0, np.float32)
        )
        results = {name: program(x).addressable_data(0) for name, program in programs.items()}  # compiles, too
        wrong = sum(int(np.count_nonzero(np.asarray(value) != n)) for value in results.values())
        times: dict[str, list[float]] = {name: [] for name in programs}
        for _ in range(args.blocks):  # in turn: a slow spell of the machine then hits both
            for name, program in programs.items():
                times[name] += block(program, x)
        if jax.process_index() == 0:
            lax, ours = (float(np.median(times[name])) * 1e6 for name in programs)
            print(
                f"psum of {size:>9} B on {n} ranks: jax.lax {lax:9.1f} us, jaxcoll {ours:9.1f} us, {lax / ours:5.2f}x"
            )
        if wrong:
            print(f"{wrong} wrong values", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
