"""Several ranks on one GPU: the executor without XLA, its results and times, as one table. Started by run.sh.

`--standin` runs every row over the stand-in: then the times mean nothing, and only the logic is tried. Where NCCL
refuses several ranks on a GPU (before 2.30), what is left is a transfer of one rank to itself.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from native import cases  # noqa: E402
from native.harness import DTYPE, REDUCE, numpy_dtype  # noqa: E402

from gpu.cuda import Cuda, Nccl  # noqa: E402
from jaxcoll.errors import JaxcollError  # noqa: E402
from jaxcoll.runtime import gpu  # noqa: E402
from jaxcoll.runtime.native import Native, NativeError, load  # noqa: E402
from jaxcoll.schedule import Kind, Schedule, Table, build, encode  # noqa: E402
from jaxcoll.telemetry import RECORD_DTYPE, split_waits  # noqa: E402

NS = 1_000_000_000
LIMIT_S = 60.0
Row = tuple[str, str, str]
"""What, measured, remark."""
Part = Callable[[Cuda, int, argparse.Namespace], Iterator[Row]]


class Team:
    """A communicator of `ranks` ranks on device 0."""

    def __init__(self, cuda: Cuda, ranks: int, pairs: bool = True, record: bool = True, hosts: list[int] | None = None):
        self.cuda, self.ranks, self.native = cuda, ranks, load()
        ffi, lib = self.native.ffi, self.native.lib
        unique = ffi.new("uint8_t[128]")
        self.native.check(lib.jc_gpu_unique_id(gpu.opened(), unique))
        numbers = ffi.NULL if hosts is None else ffi.new("int32_t[]", hosts)
        options = {
            "timeout_ns": int(LIMIT_S * NS), "pairs": pairs, "record": record, "max_streams": 16, "max_ctas": 1,
            "hosts": numbers,
        }  # fmt: skip
        everyone, zeros = ffi.new("int[]", list(range(ranks))), ffi.new("int[]", [0] * ranks)
        self.handle = lib.jc_gpu_join(
            gpu.opened(), ffi.new("jc_gpu_options*", options), 1, b"one GPU", ranks, everyone, zeros, ranks, unique
        )
        if self.handle == ffi.NULL:
            raise NativeError(self.native.text(lib.jc_last_error()))
        self.streams = [cuda.stream() for _ in range(ranks)]
        self.launch = 0

    def program(self, schedule: Schedule, table: Table | None = None) -> tuple[int, int]:
        """(handle, communicators made)."""
        blob, rows = encode(schedule), b"" if table is None else table.to_bytes()
        made, native = self.native.ffi.new("int*"), self.native
        handle = native.lib.jc_gpu_program(
            self.handle, native.buffer(blob), len(blob), native.buffer(rows), len(rows), made
        )
        return native.check(handle), made[0]

    def run(self, program: int, sources: list[int], targets: list[int], count: int, dtype: str, reduce: str,
            rounds: int = 1) -> float:  # fmt: skip
        """Seconds of an execution, over `rounds` in a queue. sources, targets: device addresses by rank."""
        native, first = self.native, self.launch
        self.launch += rounds
        failures: list[BaseException] = []

        def rank(r: int) -> None:
            ffi = native.ffi
            ins, outs = (ffi.new("void*[]", [ffi.cast("void*", a[r])]) for a in (sources, targets))
            try:
                for i in range(rounds):
                    native.check(
                        native.lib.jc_gpu_enqueue(
                            self.handle, program, r, first + i, 1, 0, REDUCE[reduce], DTYPE[dtype], 1, ins, outs,
                            native.int64s([count]), ffi.cast("void*", self.streams[r]),
                        )
                    )  # fmt: skip
            except BaseException as error:
                failures.append(error)

        begin = time.perf_counter()
        on_threads([functools.partial(rank, r) for r in range(self.ranks)])
        if failures:
            raise failures[0]
        if native.check(native.lib.jc_gpu_wait(self.handle, int(LIMIT_S * NS))) != 0:
            raise TimeoutError(f"an execution hangs for {LIMIT_S:.0f} s")
        return (time.perf_counter() - begin) / rounds

    def leave(self) -> None:
        self.native.lib.jc_gpu_leave(self.handle)


def on_threads(calls: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


def records() -> Any:
    """All records made since the last call, waits told from transfers."""
    native: Native = load()
    out = np.zeros(1 << 16, RECORD_DTYPE)
    count = native.lib.jc_gpu_records_drain(
        gpu.opened(), native.ffi.cast("void*", out.ctypes.data), len(out), native.ffi.new("uint64_t*")
    )
    return split_waits(out[:count])


def correctness(cuda: Cuda, ranks: int, _: argparse.Namespace) -> Iterator[Row]:
    """Every builder and kind, then every type, against the interpreter."""
    team = Team(cuda, ranks)
    wrong: list[str] = []
    tried = cases.cases(ranks, 1000)
    reduces = [build("ring", Kind.ALL_REDUCE, ranks)]
    tried += [cases.Case(s, 777, dtype, reduce) for s in reduces for dtype, reduce in cases.TYPES]
    for case in tried:
        inputs, want = cases.expected(case)
        blocks = case.schedule.collective.output_blocks
        like = np.zeros(case.count * blocks, numpy_dtype(case.dtype))
        sources, targets = [cuda.upload(v) for v in inputs], [cuda.upload(like) for _ in inputs]
        reduce = case.reduce if case.schedule.kind.reduces else "none"
        team.run(team.program(case.schedule)[0], sources, targets, case.count, case.dtype, reduce)
        wrong += cases.compare(case, [cuda.download(t, like) for t in targets], want)
        cuda.free([*sources, *targets])
    team.leave()
    records()
    print("\n".join(wrong), file=sys.stderr)
    kinds, types = len({c.schedule.kind for c in tried}), len({c.dtype for c in tried})
    yield (
        "results",
        f"{len(tried) - len(wrong)} of {len(tried)} equal",
        f"{kinds} collectives, {types} types, to the bit",
    )
    if wrong:
        raise SystemExit("wrong results: see above")


def buffers(cuda: Cuda, ranks: int, nbytes: int) -> tuple[list[int], list[int], list[np.ndarray[Any, Any]]]:
    values = [np.full(nbytes // 4, r + 1, np.float32) for r in range(ranks)]
    return [cuda.upload(v) for v in values], [cuda.upload(v) for v in values], values


def edge_times(cuda: Cuda, ranks: int, options: argparse.Namespace) -> Iterator[Row]:
    """What the records say of an edge, beside a copy of as many bytes by the device itself."""
    nbytes = options.bytes
    sources, targets, values = buffers(cuda, ranks, nbytes)
    copy_ms = cuda.copy_ms(sources[0], targets[0], nbytes, options.rounds)
    team = Team(cuda, ranks)
    permute = build("permute", Kind.PERMUTE, ranks, perm=[(i, (i + 1) % ranks) for i in range(ranks)])
    program = team.program(permute)[0]
    team.run(program, sources, targets, nbytes // 4, "float32", "none", 3)
    records()
    team.run(program, sources, targets, nbytes // 4, "float32", "none", options.rounds)
    rows = records()
    team.leave()
    assert (rows["bytes"] == nbytes).all()
    assert (cuda.download(targets[1], values[0]) == 1).all()
    edge_ms = float(np.median(rows["transfer_ns"])) / 1e6
    cuda.free([*sources, *targets])
    yield f"copy of {nbytes >> 10} KiB by the device", f"{copy_ms:.3f} ms", "cudaMemcpyAsync between two events"
    yield "an edge of as many bytes", f"{edge_ms:.3f} ms", f"median transfer of {len(rows)} records"


def times(cuda: Cuda, ranks: int, options: argparse.Namespace) -> Iterator[Row]:
    """The executor by schedule, layout and recording; NCCL's own all-reduce; what recording costs."""
    nbytes, best = options.bytes, float("inf")
    sources, targets, values = buffers(cuda, ranks, nbytes)
    for name in ("ring", "dual_tree"):
        for pairs in (True, False):
            teams = {record: Team(cuda, ranks, pairs, record) for record in (True, False)}
            programs = {r: t.program(build(name, Kind.ALL_REDUCE, ranks))[0] for r, t in teams.items()}
            took: dict[bool, list[float]] = {True: [], False: []}
            for block in range(6):  # in turn, so that what drifts hits both; the first warms up
                for record, team in teams.items():
                    arguments = (programs[record], sources, targets, nbytes // 4, "float32", "sum")
                    seconds = team.run(*arguments, options.rounds)
                    took[record] += [seconds] if block else []
            for team in teams.values():
                team.leave()
            records()
            assert (cuda.download(targets[0], values[0]) == ranks * (ranks + 1) / 2).all(), f"{name}: a wrong sum"
            on, off = statistics.median(took[True]) * 1e3, statistics.median(took[False]) * 1e3
            best = min(best, on)
            layout = "pairs" if pairs else "groups"
            yield f"all_reduce {nbytes >> 10} KiB, {name}, {layout}", f"{on:.3f} ms", "recorded"
            yield f"recording, {name}, {layout}", f"{(on / off - 1) * 100:+.1f} %", "target < 1 %"
    nccl = Nccl(options.nccl, cuda)
    own = nccl.all_reduce_ms(sources, targets, nbytes // 4, options.rounds)
    cuda.free([*sources, *targets])
    yield (
        f"NCCL's AllReduce, {nbytes >> 10} KiB, same ranks",
        f"{own:.3f} ms",
        f"jaxcoll's best is {best / own:.2f} of it",
    )


def inside(cuda: Cuda, ranks: int, options: argparse.Namespace) -> Iterator[Row]:
    """The hierarchical schedule on two hosts that are none: NCCL's own collectives inside them, against edges."""
    ranks = max(4, ranks // 2 * 2)
    half = ranks // 2
    sources, targets, values = buffers(cuda, ranks, options.bytes)
    schedule = build("hierarchical", Kind.ALL_REDUCE, ranks, groups=[[*range(half)], [*range(half, ranks)]])
    arguments = (sources, targets, options.bytes // 4, "float32", "sum")
    took: dict[str, list[float]] = {"NCCL's own collectives": [], "edges": []}
    teams = [Team(cuda, ranks, hosts=[int(r >= half) for r in range(ranks)]), Team(cuda, ranks)]
    programs = [team.program(schedule)[0] for team in teams]
    for block in range(4):
        for name, team, program in zip(took, teams, programs, strict=True):
            seconds = team.run(program, *arguments, options.rounds)
            took[name] += [seconds] if block else []
            assert (cuda.download(targets[0], values[0]) == ranks * (ranks + 1) / 2).all(), f"{name}: a wrong sum"
    for team in teams:
        team.leave()
    records()
    cuda.free([*sources, *targets])
    for name, seconds in took.items():
        yield (
            f"all_reduce {options.bytes >> 10} KiB, hierarchical, 2 x {half} ranks, inside: {name}",
            f"{statistics.median(seconds) * 1e3:.3f} ms",
            "recorded",
        )


def psum(_cuda: Cuda, _ranks: int, options: argparse.Namespace) -> Iterator[Row]:
    """`jax.lax.psum` over JAX's devices: of one device it is a copy, and says little."""
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("i",))
    x = jax.device_put(np.ones((len(devices), options.bytes // 4), np.float32), NamedSharding(mesh, P("i")))
    f = jax.jit(jax.shard_map(lambda v: jax.lax.psum(v, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    f(x).block_until_ready()
    begin = time.perf_counter()
    for _ in range(options.rounds):
        f(x).block_until_ready()
    ms = (time.perf_counter() - begin) / options.rounds * 1e3
    yield (
        f"jax.lax.psum, {options.bytes >> 10} KiB",
        f"{ms:.3f} ms",
        f"over {len(devices)} {devices[0].platform} devices",
    )


def swap(cuda: Cuda, ranks: int, options: argparse.Namespace) -> Iterator[Row]:
    """A table's new pairs are connected under load, the tables change between two executions, and back."""
    ranks = max(4, ranks)  # of two or three ranks all pairs of a ring are there from the start
    nbytes = min(options.bytes, 1 << 20)
    sources, targets, values = buffers(cuda, ranks, nbytes)
    team = Team(cuda, ranks)
    schedule = build("ring", Kind.ALL_REDUCE, ranks)
    identity = Table.identity(schedule)
    arguments = (sources, targets, nbytes // 4, "float32", "sum")
    first = team.program(schedule, identity)[0]
    team.run(first, *arguments, options.rounds)
    compiled = cuda.calls("nvrtcCompileProgram")
    usual = statistics.median(team.run(first, *arguments) for _ in range(options.rounds))
    staged: list[tuple[int, int]] = []
    background = threading.Thread(
        target=lambda: staged.append(team.program(schedule, identity.swap_global(0, ranks - 1)))
    )
    background.start()
    load = [team.run(first, *arguments)]
    while background.is_alive():
        load.append(team.run(first, *arguments))
    background.join()
    ((handle, made),) = staged  # else it has raised, on its thread
    after = team.run(handle, *arguments)
    back, again = team.program(schedule, identity)
    team.run(back, *arguments, options.rounds)
    assert (cuda.download(targets[0], values[0]) == ranks * (ranks + 1) / 2).all()
    team.leave()
    records()
    cuda.free([*sources, *targets])
    yield (
        f"a swap of {ranks} ranks: communicators for new pairs, and on the way back",
        f"{made}, {again}",
        f"made under load, beside {len(load)} executions, the slowest {max(load) / usual:.1f} of the usual",
    )
    yield "the first execution after it, against the usual", f"{after / usual:.2f}", "nothing to connect is left"
    now = cuda.calls("nvrtcCompileProgram")
    kernels = "not counted" if compiled is None or now is None else str(now - compiled)
    yield "kernels compiled by swaps", kernels, "target 0"


def alone(cuda: Cuda, _: int, options: argparse.Namespace) -> Iterator[Row]:
    """One rank that sends to itself, beside a copy."""
    nbytes = options.bytes
    (source,), (target,), _values = buffers(cuda, 1, nbytes)
    copy_ms = cuda.copy_ms(source, target, nbytes, options.rounds)
    own = Nccl(options.nccl, cuda).to_itself_ms(source, target, nbytes, options.rounds)
    assert (cuda.download(target, np.zeros(nbytes // 4, np.float32)) == 1).all()
    cuda.free([source, target])
    yield f"one rank to itself, {nbytes >> 10} KiB", f"{own:.3f} ms", f"a copy by the device: {copy_ms:.3f} ms"


def handler(_cuda: Cuda, _ranks: int, _options: argparse.Namespace) -> Iterator[Row]:
    """Whether JAX takes the handlers, on a GPU that for CUDA. One device is a group of one: nothing is called."""
    import jax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    import jaxcoll

    mesh = Mesh(np.array(jax.devices()[:1]), ("i",))
    f = jax.jit(jax.shard_map(lambda v: jaxcoll.psum(v, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    jaxcoll.init()
    assert (np.asarray(f(np.ones((1, 8), np.float32))) == 1).all()
    yield "jaxcoll.psum on one device, handlers registered", "right", f"{jax.devices()[0].platform}"


PARTS = (correctness, edge_times, times, inside, swap)
ALONE = (alone, psum, handler)  # what one rank can do


def fill(parts: Iterable[Part], cuda: Cuda, options: argparse.Namespace) -> int:
    """Prints the rows of the parts as they come, so that a run that is cut short keeps them; returns what failed."""
    failed = 0
    for part in parts:
        begin = time.monotonic()
        try:
            for row in part(cuda, options.ranks, options):
                print(line(row), flush=True)
        except Exception as error:
            traceback.print_exc()
            print(line((part.__name__, "FAILED", f"{type(error).__name__}: {error}")), flush=True)
            failed += 1
        print(f"# {part.__name__}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    return failed


def line(row: Row) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in row) + " |"


def several(cuda: Cuda, options: argparse.Namespace) -> bool:
    """Whether several ranks can be on this GPU."""
    if options.alone:
        return False
    try:
        Team(cuda, options.ranks).leave()
    except NativeError as error:
        print(line((f"{options.ranks} ranks on one GPU", "refused", str(error))), flush=True)
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--standin", default="", help="path of the stand-in: in place of CUDA and NCCL")
    parser.add_argument("--alone", action="store_true", help="as where NCCL refuses several ranks on one GPU")
    options = parser.parse_args()
    try:
        gpu.opened(options.standin)
        lines = gpu.versions()
        paths = {
            name: next(line.split()[-1] for line in lines if line.startswith(name)) for name in ("CUDA runtime", "NCCL")
        }
        cuda = Cuda(paths["CUDA runtime"])
    except (JaxcollError, RuntimeError) as error:
        raise SystemExit(f"There is no GPU that can be used here.\n{error}") from None
    options.nccl = paths["NCCL"]
    title = "over the stand-in: times mean nothing" if options.standin else f"{options.ranks} ranks on one GPU"
    print("\n".join(lines), f"\n| {title} | | |\n|---|---|---|", sep="\n", flush=True)
    failed = fill([*(PARTS if several(cuda, options) else ()), *ALONE], cuda, options)
    if broken := cuda.breaches():
        raise SystemExit(f"rules of use were broken: {broken}")
    if failed:
        raise SystemExit(f"{failed} parts have failed, see above")


if __name__ == "__main__":
    main()
