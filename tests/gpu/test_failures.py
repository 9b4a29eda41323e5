"""Every CUDA, NVRTC and NCCL call fails once, at each position; ranks don't come; devices break. Nothing may hang."""

from __future__ import annotations

import functools
import re
import time

import numpy as np
import pytest

from jaxcoll.runtime.native import NativeError
from jaxcoll.schedule import Kind, build

from .harness import Gpu, Team, clock, standin
from .test_path import MONITOR

pytestmark = pytest.mark.timeout(280)

RANKS = 3
SCHEDULE = build("ring", Kind.ALL_REDUCE, RANKS, pipeline=2)
LAYOUTS = ("pairs", "groups", "hosts")  # hosts: pairs, with NCCL's own collectives inside a host of two ranks
HOSTS = [0, 0, 1]
BY_HOST = build("hierarchical", Kind.ALL_REDUCE, RANKS, groups=[[0, 1], [2]], pipeline=2)
VALUES = [np.ones(301, np.float32)] * RANKS
CODES = {"nccl": 2, "nvrtc": 6}  # else 719, a launch failure
AT_ONCE = 1.0  # seconds
POSITIONS = 6  # of each function; --full takes all
# Only tidying up, with nobody to tell; or, for the last, an answer that merely leaves a record out.
SILENT = {
    "cudaStreamDestroy", "cudaEventDestroy", "ncclCommDestroy", "ncclCommAbort", "cudaEventElapsedTime",
}  # fmt: skip

# What fails to end something leaves it behind; and where the main stream can't be made to wait, nobody knows when the
# execution's memory may be freed.
LEAVES = {
    "cudaStreamDestroy": "streams", "cudaEventDestroy": "events", "ncclCommDestroy": "communicators",
    "ncclCommAbort": "communicators", "cudaFreeAsync": "blocks", "cudaEventRecord": "blocks",
    "cudaStreamWaitEvent": "blocks",
}  # fmt: skip


def execute(gpu: Gpu, layout: str) -> None:
    """A team, a program, two executions: the path that is made to fail."""
    team = gpu.team(RANKS, pairs=layout != "groups", hosts=HOSTS if layout == "hosts" else None)
    schedule = BY_HOST if layout == "hosts" else SCHEDULE
    program, _ = team.program(schedule)
    for _ in range(2):
        for result in team.run(schedule, VALUES, program=program):
            assert (result == RANKS).all()


@functools.cache
def healthy(layout: str) -> dict[str, int]:
    with Gpu() as gpu:
        execute(gpu, layout)
        return standin().calls()


def positions(count: int, full: bool) -> list[int]:
    if full or count <= POSITIONS:
        return list(range(1, count + 1))
    return sorted({1 + (count - 1) * i // (POSITIONS - 1) for i in range(POSITIONS)})


def code_of(function: str) -> int:
    return next((code for prefix, code in CODES.items() if function.startswith(prefix)), 719)


def fail_once(function: str, nth: int, layout: str) -> str:
    """What came of the n-th call failing: the message, or nothing where all went well."""
    with Gpu(seed=nth, leaves=LEAVES.get(function, "")) as gpu:
        standin().lib.standin_fail(function.encode(), nth, code_of(function))
        begin = clock().now()
        message = ""
        try:
            execute(gpu, layout)
        except NativeError as error:
            message = str(error)
        took = clock().now() - begin
        standin().lib.standin_fail(
            function.encode(), -1, 0
        )  # the monitor's calls come at any time: the n-th may be yet to come
        assert took < AT_ONCE + 1.0, f"{function} call {nth}: {took:.1f} s"
        if message and gpu.teams:
            everybody_knows(gpu.teams[-1], message)
        again(gpu, layout)
        return message


def everybody_knows(team: Team, message: str) -> None:
    """Every rank's next call fails, at once, with the cause."""
    begin = clock().now()
    cause = re.sub(r"rank \d+ of \w+ can't go on, its communicator has failed: |\. Nothing more runs.*", "", message)
    for rank in range(RANKS):
        with pytest.raises(NativeError) as error:
            team.enqueue(rank, 0, Kind.ALL_REDUCE, VALUES[0], "sum", 99)
        if "no such program" not in str(error.value):
            assert cause in str(error.value)
            assert f"rank {rank}" in str(error.value)
    assert clock().now() - begin < AT_ONCE


def again(gpu: Gpu, layout: str) -> None:
    """A new communicator on the same devices works."""
    execute(gpu, layout)


@pytest.mark.timeout(1800)  # --full, on a machine that may stop us; what hangs is found sooner, by the harness
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_call_fails_once(layout: str, request: pytest.FixtureRequest):
    full = bool(request.config.getoption("--full"))
    untold: list[str] = []
    for function, count in sorted(healthy(layout).items()):
        for nth in positions(count, full):
            if function in ("ncclGetVersion", "cudaRuntimeGetVersion", "cudaDriverGetVersion", "nvrtcVersion"):
                continue  # before there is any rank: test_opening_fails
            message = fail_once(function, nth, layout)
            if not message and function not in SILENT | MONITOR:
                untold.append(f"{function} call {nth}")
            if message:
                assert function in message or "NVRTC" in message or "a transfer" in message, (function, nth, message)
    assert not untold, "failures that nobody was told: " + ", ".join(untold)


@pytest.mark.parametrize(
    "function", ["ncclGetVersion", "cudaRuntimeGetVersion", "cudaDriverGetVersion", "nvrtcVersion"]
)
def test_opening_fails(function: str):
    gpu = Gpu()
    standin().lib.standin_reset(1)
    standin().lib.standin_fail(function.encode(), 1, code_of(function))
    handle = gpu.native.lib.jc_gpu_open(str(standin().path).encode(), gpu.native.ffi.new("char*[]", 0), 0)
    assert handle == gpu.native.ffi.NULL
    assert function in gpu.native.text(gpu.native.lib.jc_last_error())


def test_a_rank_that_never_comes():
    with Gpu() as gpu:
        team = gpu.team(RANKS, timeout=0.3)
        program, _ = team.program(SCHEDULE)
        begin = clock().now()
        for rank in (0, 1):
            team.enqueue(rank, program, Kind.ALL_REDUCE, VALUES[rank], "sum", 1)
        time.sleep(0.05)
        stuck = standin().stuck()  # the deadlock as it lies there: who waits for what
        assert "device 0: transfers of rank" in stuck
        assert "device 2" not in stuck
        with pytest.raises(
            NativeError, match=r"rank \d in team\d+ has not ended within 0\.3 s .*step \d, edge \d->\d of graph \d"
        ):
            team.wait()
        assert clock().now() - begin < 0.3 + AT_ONCE
        with pytest.raises(NativeError, match=r"rank 2 of .* can't go on"):
            team.enqueue(2, program, Kind.ALL_REDUCE, VALUES[2], "sum", 1)
        again(gpu, "pairs")


def test_a_rank_that_never_joins():
    # Only two of three ranks are there: the set-up ends with the time-out, not later.
    with Gpu() as gpu:
        ffi, lib = gpu.native.ffi, gpu.native.lib
        unique = ffi.new("uint8_t[128]")
        assert lib.jc_gpu_unique_id(gpu.handle, unique) == 0
        options = ffi.new(
            "jc_gpu_options*", {"timeout_ns": 200_000_000, "pairs": 1, "record": 1, "max_streams": 8, "max_ctas": 0}
        )
        two = ffi.new("int[]", [0, 1])
        begin = clock().now()
        assert lib.jc_gpu_join(gpu.handle, options, 1, b"short", 3, two, two, 2, unique) == ffi.NULL
        assert clock().now() - begin < 0.2 + AT_ONCE
        message = gpu.native.text(lib.jc_last_error())
        assert "ncclCommInitRankConfig" in message
        assert "JAXCOLL_TIMEOUT" in message


@pytest.mark.parametrize("layout", ["pairs", "groups"])
def test_a_device_that_breaks(layout: str):
    with Gpu() as gpu:
        team = gpu.team(RANKS, pairs=layout == "pairs")
        program, _ = team.program(SCHEDULE)
        team.run(SCHEDULE, VALUES, program=program)
        team.enqueue(0, program, Kind.ALL_REDUCE, VALUES[0], "sum", 50)
        standin().lib.standin_break(1)
        begin = clock().now()
        with pytest.raises(NativeError, match="rank 1 of"):
            team.wait()
        assert clock().now() - begin < AT_ONCE
        again(gpu, layout)


def test_another_process_fails():
    with Gpu() as gpu:
        team = gpu.team(RANKS)
        program, _ = team.program(SCHEDULE)
        team.enqueue(0, program, Kind.ALL_REDUCE, VALUES[0], "sum", 1)
        gpu.native.lib.jc_gpu_fail(team.handle, b"rank 7 has left")
        with pytest.raises(NativeError, match="rank 7 has left"):
            team.wait()


def test_ranks_that_disagree():
    # Different programs on two ranks: sizes don't match, or transfers never meet.
    with Gpu() as gpu:
        team = gpu.team(2, timeout=0.3)
        one, _ = team.program(build("ring", Kind.ALL_REDUCE, 2))
        two, _ = team.program(build("binomial", Kind.BROADCAST, 2, root=0))
        team.enqueue(0, one, Kind.ALL_REDUCE, np.ones(64, np.float32), "sum", 1)
        team.enqueue(1, two, Kind.BROADCAST, np.ones(64, np.float32), "sum", 1)
        with pytest.raises(NativeError, match=r"rank \d of team\d+, edge \d->\d|has not ended"):
            team.wait()
        assert "bytes met a receive of" in standin().breaches()
        standin().lib.standin_reset(1)  # the breach that it is (sizes differ) is what was provoked


def test_old_and_new_versions_of_nccl(monkeypatch: pytest.MonkeyPatch):
    for version in (21800, *(20003 + 100 * minor for minor in range(18, 33))):
        monkeypatch.setenv("JAXCOLL_STANDIN_NCCL", str(version))
        with Gpu() as gpu:
            execute(gpu, "pairs")
            text = gpu.native.text(gpu.native.lib.jc_gpu_versions(gpu.handle))
            assert f"NCCL 2.{version % 10000 // 100}.{version % 100}" in text
    monkeypatch.setenv("JAXCOLL_STANDIN_NCCL", "21703")
    with pytest.raises(NativeError, match=r"2\.18 or newer"), Gpu():
        pass


def test_libraries_that_are_not_there(tmp_path: object):
    gpu = Gpu()
    ffi, lib = gpu.native.ffi, gpu.native.lib
    assert lib.jc_gpu_open(b"/nowhere/libnothing.so", ffi.new("char*[]", 0), 0) == ffi.NULL
    assert "/nowhere/libnothing.so" in gpu.native.text(lib.jc_last_error())
