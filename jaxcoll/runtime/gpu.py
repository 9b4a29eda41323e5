"""The GPU side: finds CUDA and NCCL, joins communicators, connects what their first tables need."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxcoll.errors import UsageError
from jaxcoll.runtime.native import NativeError, load

if TYPE_CHECKING:
    from jaxcoll.runtime.world import World

_UNIQUE_ID_BYTES = 128
_MAX_STREAMS = 32

_lock = threading.Lock()
_handle: Any = None


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


def versions() -> list[str]:
    """A line for each library: its version and path. Raises UsageError where one is missing."""
    return load().text(load().lib.jc_gpu_versions(opened())).splitlines()


def connect(world: World, group: tuple[int, ...], set_key: int) -> None:
    """Joins a communicator's local GPUs, once, and connects the pairs of a set's table in force.

    Every process of the communicator comes here, in the same order: the programs that it lowers are the same.
    """
    native, settings = world.native, world.settings
    mine = [d for d in jax.local_devices() if d.id in group]
    ordinals = [int(d.local_hardware_id or 0) for d in sorted(mine, key=lambda d: group.index(d.id))]
    devices = native.int64s(group)
    try:
        options = native.ffi.new(
            "jc_gpu_options*",
            {
                "timeout_ns": int(settings.timeout * 1e9), "pairs": 1, "record": int(settings.record),
                "max_streams": _MAX_STREAMS, "max_ctas": 0,
            },
        )  # fmt: skip
        native.check(
            native.lib.jc_world_gpu_join(
                world.handle, opened(), options, devices, len(group), native.ffi.new("int[]", ordinals), len(ordinals),
                _unique_id(world, group),
            )
        )  # fmt: skip
        native.check(
            native.lib.jc_world_gpu_connect(world.handle, native.lib.jc_group_id(devices, len(group)), set_key)
        )
    except NativeError as error:
        raise UsageError(f"the GPUs of devices {group} can't be joined: {error}") from error


def _unique_id(world: World, group: tuple[int, ...]) -> Any:
    """NCCL's id of a communicator: made by the process of its rank 0, read by the others from the job's store."""
    native, store = world.native, world.job.store
    out = native.ffi.new(f"uint8_t[{_UNIQUE_ID_BYTES}]")
    key = f"nccl/{native.lib.jc_group_id(native.int64s(group), len(group)):x}"
    if store is None or group[0] in world.job.devices[world.job.me]:
        native.check(native.lib.jc_gpu_unique_id(opened(), out))
        if store is not None and not store.set_once(key, bytes(native.ffi.buffer(out)).hex()):
            out[0:_UNIQUE_ID_BYTES] = bytes.fromhex(store.get(key, world.settings.timeout))
    else:
        out[0:_UNIQUE_ID_BYTES] = bytes.fromhex(store.get(key, world.settings.timeout))
    return out
