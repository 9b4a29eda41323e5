"""A process of the benchmark's MPI peer: the same loop on NumPy buffers through mpi4py, without JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from jaxcoll.bench import control
from jaxcoll.bench.definitions import Array, Case, count_wrong, dtype_of, make_input


def one_call(comm: Any, case: Case, source: Array, target: Array) -> Callable[[Array], None]:
    """The collective of a case: a function from a 1-D input to `target`."""
    rank, n = comm.rank, comm.size

    def broadcast(x: Array) -> None:
        if rank == 0:
            np.copyto(target, x)
        comm.Bcast(target, 0)

    def average(x: Array) -> None:
        comm.Allreduce(x, target, MPI.SUM)
        np.divide(target, n, out=target)

    calls: dict[str, Callable[[Array], None]] = {
        "psum": lambda x: comm.Allreduce(x, target, MPI.SUM),
        "pmean": average,
        "pmax": lambda x: comm.Allreduce(x, target, MPI.MAX),
        "pmin": lambda x: comm.Allreduce(x, target, MPI.MIN),
        "all_gather": lambda x: comm.Allgather(x, target),
        "psum_scatter": lambda x: comm.Reduce_scatter_block(x, target, MPI.SUM),
        "all_to_all": lambda x: comm.Alltoall(x, target),
        "ppermute": lambda x: comm.Sendrecv(x, (rank + 1) % n, recvbuf=target, source=(rank - 1) % n),
        "pbroadcast": broadcast,
    }
    return calls[case.collective]


def chained(case: Case, call: Callable[[Array], None], source: Array, target: Array) -> Callable[[], None]:
    """`case.chain` collectives, mixed with the input in between as in the JAX programs."""
    scale = target.dtype.type(0.5 / case.ranks if case.collective == "psum" else 0.5)
    half = source * source.dtype.type(0.5) if case.chain > 1 else source
    again = np.empty_like(source)

    def run() -> None:
        call(source)
        for _ in range(case.chain - 1):
            if case.collective == "ppermute":
                np.copyto(again, target)
            else:
                np.multiply(target, scale, out=again)
                np.add(again, half, out=again)
            call(again)

    return run


class Worker:
    """The commands that the driver may give."""

    def __init__(self) -> None:
        self._run: Callable[[], None] | None = None

    def prepare(self, impl: str, case: dict[str, Any], schedule: str | None, warmup: int) -> control.Message:
        """Make the buffers, run once with the result checked, and warm up.

        Answers {"nwrong", "extra_bytes", "seconds"}, as the JAX worker does."""
        what, comm = Case(**case), MPI.COMM_WORLD
        dtype = dtype_of(what.dtype)
        if dtype.kind not in "iufc" or what.dtype == "float16" or (what.collective == "pmean" and dtype.kind in "iu"):
            return {"unavailable": f"MPI has no {what.collective} of {what.dtype}"}
        source = make_input(what, comm.rank)
        target = np.empty(what.count * what.operation.blocks(what.ranks)[1], dtype)
        run = chained(what, one_call(comm, what, source, target), source, target)
        run()
        wrong = count_wrong(what, comm.rank, target)
        self._run = run
        return {"nwrong": wrong, "extra_bytes": None, **self.time(impl, 0, warmup)}

    def time(self, impl: str, settle: int, iters: int) -> control.Message:
        """Time `iters` calls after `settle` that don't count. Answers {"seconds": [...]}."""
        assert self._run is not None
        return {"seconds": control.time_calls(self._run, settle, iters)}

    def drop(self) -> control.Message:
        """Forget the buffers."""
        self._run = None
        return {}


def main() -> int:
    """Run one MPI process of the benchmark. Returns the exit status."""
    worker = Worker()
    control.serve(MPI.COMM_WORLD.rank, {"prepare": worker.prepare, "time": worker.time, "drop": worker.drop})
    return 0


if __name__ == "__main__":
    sys.exit(main())
