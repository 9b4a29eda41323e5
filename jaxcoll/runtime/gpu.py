"""The GPU side: finds CUDA and NCCL, joins communicators, connects what their first tables need."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxcoll.errors import UsageError
from jaxcoll.runtime.native import NativeError, load

if TYPE_CHECKING:
    from jaxcoll.config import Config
    from jaxcoll.runtime.world import World

_UNIQUE_ID_BYTES = 128
_MAX_STREAMS = 32
_TEXT = 4096

_lock = threading.Lock()
_handle: Any = None
_generations: dict[int, int] = {}  # by communicator id: how often it was made again
_joined: set[int] = set()


def present() -> bool:
    """Whether JAX's default backend is an NVIDIA GPU."""
    return jax.default_backend() in ("gpu", "cuda")


def folders() -> list[str]:
    """Where the nvidia wheels (cu12: a folder a library, cu13: one for all) keep their libraries."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or [])
    return [str(lib) for root in roots for lib in sorted(Path(root).glob("*/lib"), reverse=True)]


def opened(library: str = "") -> Any:
    """CUDA and NCCL of this process, opened on first use. Raises UsageError: what was looked for, and the cure.

    library: at the first call, a file with all functions of all libraries in place of the search (a stand-in).
    """
    global _handle
    native = load()
    with _lock:
        if _handle is None:
            found = [native.ffi.new("char[]", f.encode()) for f in folders()]
            handle = native.lib.jc_gpu_open(library.encode(), native.ffi.new("char*[]", found), len(found))
            if handle == native.ffi.NULL:
                raise UsageError(native.text(native.lib.jc_last_error()))
            _handle = handle
        return _handle


def running() -> Any | None:
    """What `opened` gives, if it has been called; None where no GPU is used."""
    return _handle


def layout(settings: Config) -> str:
    """How edges lie on NCCL, in words."""
    if settings.gpu_layout == "groups":
        return "groups: one NCCL communicator, one launch a step; its edges are timed together (JAXCOLL_GPU_LAYOUT)"
    return "pairs: a NCCL communicator for each pair of ranks, every edge timed by itself (JAXCOLL_GPU_LAYOUT)"


def inside(settings: Config, hosts: Sequence[int] | None = None) -> str:
    """What the hierarchical schedule does inside a host, in words. hosts: of the ranks, where they are known."""
    if settings.gpu_inside == "edges":
        return "edge by edge (JAXCOLL_GPU_INSIDE=edges)"
    if hosts is not None and len(set(hosts)) == 1:
        return "edge by edge (all ranks are on one host)"
    if hosts is not None and len(set(hosts)) == len(hosts):
        return "nothing (no two ranks share a host)"
    return "NCCL's own ReduceScatter and AllGather (JAXCOLL_GPU_INSIDE=edges: edge by edge)"


def versions() -> list[str]:
    """A line for each library: its version and path. Raises UsageError where one is missing."""
    return load().text(load().lib.jc_gpu_versions(opened())).splitlines()


def connect(world: World, group: tuple[int, ...], set_key: int) -> None:
    """Joins a communicator's local GPUs, once, and connects the pairs of a set's table in force.

    Every process of the communicator comes here, in the same order: the programs that it lowers are the same.
    """
    native = world.native
    try:
        _join(world, group)
        number = native.lib.jc_group_id(native.int64s(group), len(group))
        native.check(native.lib.jc_world_gpu_connect(world.handle, number, set_key))
    except NativeError as error:
        raise UsageError(f"the GPUs of devices {group} can't be joined: {error}") from error


def _join(world: World, group: tuple[int, ...]) -> None:
    native, settings = world.native, world.settings
    number = int(native.lib.jc_group_id(native.int64s(group), len(group)))
    if number in _joined and failure(world, number) is None:
        return
    # All processes hear of a failure, so they count alike.
    _generations[number] = _generations.get(number, -1) + 1
    mine = [d for d in jax.local_devices() if d.id in group]
    ordinals = [int(d.local_hardware_id or 0) for d in sorted(mine, key=lambda d: group.index(d.id))]
    on_host = hosts(world, group)
    numbers = native.ffi.NULL if on_host is None else native.ffi.new("int32_t[]", list(on_host))
    options = native.ffi.new(
        "jc_gpu_options*",
        {
            "timeout_ns": int(settings.timeout * 1e9), "pairs": int(settings.gpu_layout == "pairs"),
            "record": int(settings.record), "max_streams": _MAX_STREAMS, "max_ctas": 0, "hosts": numbers,
        },
    )  # fmt: skip
    unique = _unique_id(world, group, f"nccl/{number:x}/{_generations[number]}")
    native.check(
        native.lib.jc_world_gpu_join(
            world.handle, opened(), options, native.int64s(group), len(group), native.ffi.new("int[]", ordinals),
            len(ordinals), unique,
        )
    )  # fmt: skip
    _joined.add(number)


def hosts(world: World, group: tuple[int, ...]) -> tuple[int, ...] | None:
    """The number of the host of every rank where steps inside hosts run as NCCL's own collectives, else None."""
    numbers = world.hosts_of(group)
    inside = world.settings.gpu_inside == "nccl" and 1 < len(set(numbers)) < len(numbers)
    return numbers if inside else None


def _unique_id(world: World, group: tuple[int, ...], key: str) -> Any:
    """NCCL's id of a communicator: made by the process of its rank 0, read by the others under `key` of the store."""
    native, store = world.native, world.job.store
    out = native.ffi.new(f"uint8_t[{_UNIQUE_ID_BYTES}]")
    if store is None or group[0] in world.job.devices[world.job.me]:
        native.check(native.lib.jc_gpu_unique_id(opened(), out))
        if store is not None and not store.set_once(key, bytes(native.ffi.buffer(out)).hex()):
            out[0:_UNIQUE_ID_BYTES] = bytes.fromhex(store.get(key, world.settings.timeout))
    else:
        out[0:_UNIQUE_ID_BYTES] = bytes.fromhex(store.get(key, world.settings.timeout))
    return out


def failure(world: World, group: int) -> str | None:
    """Why the GPU side of the communicator with this id has failed; None if it has not."""
    out = world.native.ffi.new("char[]", _TEXT)
    return world.native.text(out) if world.native.lib.jc_world_gpu_failed(world.handle, group, out, _TEXT) else None


def failures(world: World, groups: Iterable[tuple[int, ...]]) -> list[dict[str, Any]]:
    """The communicators among `groups` whose GPU side has failed: their devices, and why."""
    native, out = world.native, list[dict[str, Any]]()
    for group in groups:
        why = failure(world, int(native.lib.jc_group_id(native.int64s(group), len(group))))
        if why is not None:
            out.append({"devices": list(group), "failed": why})
    return out


def renew(world: World, sets: Iterable[tuple[tuple[int, ...], int]]) -> None:
    """Makes failed communicators anew and connects their sets' tables. Every process of them must come here.

    sets: (devices, set key) of all schedule sets, in the order in which they were made.
    """
    known = list(sets)
    failed = {tuple(row["devices"]) for row in failures(world, dict.fromkeys(group for group, _ in known))}
    for group, key in known:
        if group in failed:
            connect(world, group, key)
