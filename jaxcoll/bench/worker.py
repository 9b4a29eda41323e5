"""A process of the benchmark that runs JAX programs: `jax.lax` and jaxcoll side by side, one or several devices."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcoll import launch
from jaxcoll.bench import control
from jaxcoll.bench.definitions import Case, count_wrong, make_input

AXIS = "ranks"


def operations(impl: str) -> ModuleType:
    """The module that has the operations: `jax.lax`, or jaxcoll itself."""
    if impl == "lax":
        return jax.lax
    import jaxcoll

    return jaxcoll


def one_call(ops: Any, case: Case, schedule: str | None) -> Callable[[jax.Array], jax.Array]:
    """The collective of a case as a function of a rank's 1-D input, for use inside shard_map."""
    n = case.ranks
    extra: dict[str, Any] = {} if schedule is None else {"schedule": schedule}
    calls: dict[str, Callable[[Any], Any]] = {
        "all_gather": lambda x: ops.all_gather(x, AXIS, tiled=True, **extra),
        "psum_scatter": lambda x: ops.psum_scatter(x, AXIS, scatter_dimension=0, tiled=True, **extra),
        "all_to_all": lambda x: ops.all_to_all(x, AXIS, 0, 0, tiled=True, **extra),
        "ppermute": lambda x: ops.ppermute(x, AXIS, [(i, (i + 1) % n) for i in range(n)], **extra),
        "pbroadcast": lambda x: ops.pbroadcast(x, AXIS, 0, **extra),
    }
    if case.collective in calls:
        return calls[case.collective]
    reduction = getattr(ops, case.collective)
    return lambda x: reduction(x, AXIS, **extra)


def chained(case: Case, call: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """`case.chain` collectives, each waiting for the one before.

    Between two of them the result is averaged with the input again: this keeps a reduction's value the same down the
    chain, and keeps XLA from seeing that its input is already equal on all ranks.
    """
    scale = 0.5 / case.ranks if case.collective == "psum" else 0.5

    def body(x: jax.Array) -> jax.Array:
        y = call(x)
        for _ in range(case.chain - 1):
            again = (
                y if case.collective == "ppermute" else y * jnp.asarray(scale, y.dtype) + x * jnp.asarray(0.5, x.dtype)
            )
            y = call(again)
        return y

    return body


def copying(case: Case) -> Callable[[jax.Array], jax.Array]:
    """A function of the collective's argument and result shapes that talks to nobody: XLA reads every byte of the
    argument once and writes every byte of the result once, which no collective can do without. Its values are its own.
    """
    arguments, results = case.operation.blocks(case.ranks)
    if arguments > results:
        return lambda x: x.reshape(arguments, -1).sum(axis=0, dtype=x.dtype)
    return lambda x: jnp.tile(-x if x.dtype != bool else ~x, results // arguments)


def _body(impl: str, case: Case, schedule: str | None) -> Callable[[jax.Array], jax.Array]:
    if impl == "copy":
        return copying(case)
    return chained(case, one_call(operations(impl), case, schedule if impl != "lax" else None))


def make_mesh(ranks: int) -> Mesh:
    """One axis over all devices, in the order of the processes."""
    devices = jax.devices()
    if len(devices) != ranks:
        raise RuntimeError(f"the ranks see {len(devices)} devices, not {ranks}")
    return Mesh(np.array(devices), (AXIS,))


def make_global_input(case: Case, mesh: Mesh) -> jax.Array:
    """The case's input, laid over the mesh."""
    rank_of = {device: rank for rank, device in enumerate(mesh.devices.flat)}
    sharding = NamedSharding(mesh, P(AXIS))
    pieces = [jax.device_put(make_input(case, rank_of[device]), device) for device in mesh.local_devices]
    shape = (pieces[0].shape[0] * case.ranks,)
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


class Worker:
    """The commands that the driver may give; programs are kept by implementation."""

    def __init__(self) -> None:
        self._programs: dict[str, tuple[Any, jax.Array]] = {}

    def prepare(self, impl: str, case: dict[str, Any], schedule: str | None, warmup: int) -> control.Message:
        """Compile, run once with the result checked, and warm up. Answers {"nwrong", "extra_bytes",
        "seconds"}, the last being those of the warm-up calls."""
        what = Case(**case)
        if impl == "lax" and what.collective == "pbroadcast" and jax.default_backend() == "cpu":
            return {"unavailable": "jax.lax.pbroadcast does not exist on cpu"}
        if impl == "copy" and what.chain > 1:
            return {"unavailable": "copies stand beside one collective, not beside a chain"}
        if what.dtype in ("float64", "int64", "uint64", "complex128"):
            jax.config.update("jax_enable_x64", True)
        mesh = make_mesh(what.ranks)
        body = _body(impl, what, schedule)
        x = make_global_input(what, mesh)
        program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))).lower(x).compile()
        result, extra = _with_peak(lambda: jax.block_until_ready(program(x)))
        rank_of = {device: rank for rank, device in enumerate(mesh.devices.flat)}
        shards = result.addressable_shards if impl != "copy" else []
        wrong = sum(count_wrong(what, rank_of[s.device], np.asarray(s.data)) for s in shards)
        del result, shards
        self._programs[impl] = (program, x)
        return {"nwrong": wrong, "extra_bytes": extra, **self.time(impl, 0, warmup)}

    def time(self, impl: str, settle: int, iters: int) -> control.Message:
        """Time `iters` calls after `settle` that don't count, to the result. Answers {"seconds": [...]}."""
        program, x = self._programs[impl]
        gc.disable()
        try:
            return {"seconds": control.time_calls(lambda: program(x).block_until_ready(), settle, iters)}
        finally:
            gc.enable()

    def drop(self) -> control.Message:
        """Forget programs and inputs."""
        self._programs.clear()
        return {}


def _memory(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def _with_peak(call: Callable[[], jax.Array]) -> tuple[jax.Array, int | None]:
    """The call's result, and the bytes of memory that it took at its peak beyond that result (None where the kernel
    doesn't let the peak be reset)."""
    gc.collect()
    before = _memory("VmRSS")
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return call(), None
    result = call()
    held = sum(shard.data.nbytes for shard in result.addressable_shards)
    return result, max(0, _memory("VmHWM") - before - held)


def main() -> int:
    """Run one process of the benchmark. Returns the exit status."""
    launch.initialize()
    worker = Worker()
    control.serve(jax.process_index(), {"prepare": worker.prepare, "time": worker.time, "drop": worker.drop})
    return 0


if __name__ == "__main__":
    sys.exit(main())
