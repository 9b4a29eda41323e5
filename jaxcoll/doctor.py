"""`jaxcoll doctor`: checks the installation and the machine, and says what to mend.

Each check is a function that returns findings; "bad" means that jaxcoll can't work, "slow" that it works worse than it
could, "ok" and "info" need nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxcoll import config
from jaxcoll.errors import JaxcollError
from jaxcoll.launch import device_env, run

Level = Literal["ok", "info", "slow", "bad"]

OLDEST_JAX = (0, 10, 2)
_FILES_WANTED = 1024
_PR_SET_PTRACER, _PTRACER_ANY = 0x59616D61, -1

# Runs in ranks: every operation is covered by the tests; here one that works in every layout is enough.
_PROBE = """
from jaxcoll import launch
launch.initialize()
import jax, jaxcoll, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
n = jax.device_count()
mesh = Mesh(np.array(jax.devices()), ("i",))
x = jax.make_array_from_callback((n,), jax.NamedSharding(mesh, P("i")), lambda i: np.arange(n, dtype="f4")[i])
total = jax.jit(jax.shard_map(lambda x: jaxcoll.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))(x)
assert float(total.addressable_data(0)[0]) == n * (n - 1) / 2, total
"""

# Reads 8 bytes of the parent's memory, as a rank does with a peer's.
_READER = """
import ctypes, os, sys
class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
here = ctypes.create_string_buffer(8)
mine, theirs = Part(ctypes.addressof(here), 8), Part(int(sys.argv[1]), 8)
read = ctypes.CDLL(None, use_errno=True).process_vm_readv
read.restype = ctypes.c_ssize_t
got = read(os.getppid(), ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)
sys.exit(0 if got == 8 and here.raw == b"jaxcoll!" else 1)
"""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report; cure: what to do about it (empty where nothing is needed)."""

    level: Level
    text: str
    cure: str = ""


def _version(name: str) -> tuple[int, ...] | None:
    try:
        text = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = [part for part in text.split("+")[0].split(".")[:3] if part.isdigit()]
    return tuple(int(part) for part in numbers)


def check_python() -> Iterator[Finding]:
    """Python, jax and jaxlib."""
    yield Finding("ok", f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} cores")
    jax, jaxlib = _version("jax"), _version("jaxlib")
    if jax is None or jaxlib is None:
        yield Finding("bad", "jax or jaxlib is not installed", "pip install 'jax>=0.10.2'")
        return
    text = f"jax {'.'.join(map(str, jax))}, jaxlib {'.'.join(map(str, jaxlib))}"
    if jax < OLDEST_JAX:
        yield Finding("bad", f"{text}: too old", "pip install --upgrade 'jax>=0.10.2'")
    else:
        yield Finding("ok", text)


def check_library() -> Iterator[Finding]:
    """The native library: there, of this version, loadable."""
    settings = _settings()
    if settings is None:
        yield Finding("info", "the native library is not looked for before the settings are right")
        return
    try:
        from jaxcoll.runtime import native

        yield Finding("ok", f"native library {native.load().path}")
    except (JaxcollError, ImportError) as error:
        built = "build it (`make native` in a clone), or install jaxcoll again"
        yield Finding("bad", str(error), "correct or unset JAXCOLL_LIBRARY" if settings.library else built)


def _settings() -> config.Config | None:
    """The settings; None where one is malformed, which `check_settings` says."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return config.load(os.environ)
    except JaxcollError:
        return None


def check_settings() -> Iterator[Finding]:
    """The environment variables."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config.load(os.environ)
        except JaxcollError as error:
            yield Finding("bad", str(error), "correct or unset the variable")
            return
    yield from (Finding("slow", str(warning.message), "correct or unset the variable") for warning in caught)
    chosen = [row.env for row in config.settings() if os.environ.get(row.env)]
    yield Finding("ok", f"settings from the environment: {', '.join(chosen) or 'none'}")


def check_shared_memory() -> Iterator[Finding]:
    """Shared segments, which are memfds and so need no /dev/shm, and reading a peer's memory in place."""
    try:
        os.close(os.memfd_create("jaxcoll-doctor", os.MFD_CLOEXEC))
        yield Finding("ok", "shared memory can be made")
    except OSError as error:
        yield Finding("bad", f"no shared memory: memfd_create: {error.strerror}", "JAXCOLL_TRANSPORT=tcp")
    if can_read_peers():
        yield Finding("ok", "a process may read a sibling's memory (large messages are not copied twice)")
    else:
        yield Finding(
            "slow",
            "a process may not read a sibling's memory: large messages between processes cost one more copy",
            "sysctl kernel.yama.ptrace_scope=1 or less; in a container: --cap-add=SYS_PTRACE",
        )


def can_read_peers() -> bool:
    """Whether a child can read this process's memory, once it is allowed to trace it."""
    secret = ctypes.create_string_buffer(b"jaxcoll!", 8)
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PTRACER_ANY & (2**64 - 1)), 0, 0, 0)
    command = [sys.executable, "-I", "-S", "-c", _READER, str(ctypes.addressof(secret))]
    return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0


def check_limits() -> Iterator[Finding]:
    """File descriptors and loopback."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _FILES_WANTED:
        yield Finding("slow", f"only {soft} open files allowed: too few for many ranks over tcp", f"ulimit -n {hard}")
    else:
        yield Finding("ok", f"{soft} open files allowed")
    try:
        socket.create_server(("127.0.0.1", 0)).close()
        yield Finding("ok", "loopback works")
    except OSError as error:
        yield Finding("bad", f"can't listen on 127.0.0.1: {error}", "ip link set lo up")
    proxies = [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]
    if proxies and "no_proxy" not in {name.lower() for name in os.environ}:
        yield Finding(
            "slow", f"{', '.join(proxies)} may catch jax.distributed's connections", "set no_proxy for the hosts"
        )


def check_extras() -> Iterator[Finding]:
    """What is optional, and what it would bring."""
    for module, brings, extra in (
        ("highspy", "synthesis of schedules", "synth"),
        ("mpi4py", "the MPI peer of jaxcoll bench", "mpi"),
        ("flax", "the training example", "examples"),
        ("zmq", "an encrypted control channel for the tuner", "tuner"),
        ("rich", "jaxcoll top", "tuner"),
    ):
        found = importlib.util.find_spec(module) is not None
        cure = "" if found else f"if wanted: pip install 'jaxcoll[{extra}]'"
        yield Finding("info", f"{module}: {'installed' if found else 'not installed'} ({brings})", cure)
    if importlib.util.find_spec("mpi4py") and shutil.which("mpirun") is None:
        yield Finding("info", "mpirun: not found (the MPI peer of jaxcoll bench)", "if wanted: apt install openmpi-bin")


def check_collectives() -> Iterator[Finding]:
    """A psum in one process with two devices, and in two processes, over each transport of this host."""
    two = "jaxcoll bench --ranks 2 --sizes 4K --peers ''"
    one = f"{two} --layout inproc"
    layouts = (
        ("one process, two devices", 1, 2, "", one),
        ("two processes", 2, 1, "", two),
        ("two processes, tcp", 2, 1, "tcp", f"JAXCOLL_TRANSPORT=tcp {two}"),
    )
    for label, nprocs, devices, transport, command in layouts:
        asked = {"JAXCOLL_TRANSPORT": transport} if transport else {}
        env = device_env(devices, {**config.UNTUNED, **asked})
        try:
            result = run([sys.executable, "-c", _PROBE], nprocs, devices=devices, env=env, timeout=120.0)
        except TimeoutError as error:
            yield Finding("bad", f"psum, {label}: {error}", "the last lines of each rank, above, say where it stands")
            continue
        if result.exit_code == 0:
            yield Finding("ok", f"psum, {label}: right")
            continue
        rank = next(rank for rank, code in enumerate(result.codes) if code)
        said = _error_line(result.outputs[rank]) or f"exit code {result.codes[rank]}"
        yield Finding("bad", f"psum, {label}: {said}", f"for all that it says: {command}")


def _error_line(output: str) -> str:
    lines = output.strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (errors or lines or [""])[-1]


def check_gpu() -> Iterator[Finding]:
    """CUDA and NCCL: versions and paths, and how they are used. Without an NVIDIA device nothing is needed."""
    plugin = any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))
    if not has_nvidia_device():
        yield Finding("info", "no NVIDIA GPU here: CUDA and NCCL are not looked for")
        if plugin:
            cure = "install NVIDIA's driver (does nvidia-smi work?); in a container: docker run --gpus all"
            yield Finding("slow", "jax's CUDA plugin is installed, but there is no device for it", cure)
        return
    if not plugin:
        cure = "pip install 'jaxcoll[cuda12]', or 'jaxcoll[cuda13]'"
        yield Finding("slow", "there is an NVIDIA GPU, but no CUDA plugin of jax: programs run on the CPU", cure)
    settings = _settings()
    if settings is None:
        yield Finding("info", "CUDA and NCCL are not looked for before the settings are right")
        return
    yield from check_gpu_libraries()
    yield Finding("info", f"GPU layout {_gpu().layout(settings)}")
    yield Finding("info", f"hierarchical schedules inside a host of GPUs: {_gpu().inside(settings)}")


def check_gpu_libraries() -> Iterator[Finding]:
    """A line for each library that is there, with its version and path; for each that isn't, what to do."""
    try:
        yield from (Finding("ok", line) for line in _gpu().versions())
    except (JaxcollError, ImportError) as error:
        for line in str(error).splitlines():
            text, _, cure = line.partition(". Cure: ")
            yield Finding("info" if text.startswith("found: ") else "bad", text, cure)


def has_nvidia_device() -> bool:
    """Whether the driver shows a device, to this container too."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg"))


def _gpu() -> Any:
    from jaxcoll.runtime import gpu  # starts jax

    return gpu


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_settings,
    check_library,
    check_shared_memory,
    check_limits,
    check_gpu,
    check_extras,
    check_collectives,
)


def main(argv: Sequence[str]) -> int:
    """The command `jaxcoll doctor`. Returns 1 if jaxcoll can't work here, else 0."""
    parser = argparse.ArgumentParser(prog="jaxcoll doctor", description="Check the installation and the machine.")
    parser.add_argument("--quick", action="store_true", help="don't run collectives (they take some seconds)")
    args = parser.parse_args(argv)
    bad = slow = 0
    for check in CHECKS:
        if args.quick and check is check_collectives:
            continue
        for finding in check():
            bad, slow = bad + (finding.level == "bad"), slow + (finding.level == "slow")
            print(
                f"{finding.level:>4}  {finding.text}" + (f"\n      -> {finding.cure}" if finding.cure else ""),
                flush=True,
            )
    print(f"\n{bad} faults, {slow} things that could be better." if bad or slow else "\nAll is well.")
    return 1 if bad else 0
