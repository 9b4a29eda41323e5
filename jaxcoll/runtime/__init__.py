"""The running side: the native library, the world of processes, communicators and schedule sets."""

from __future__ import annotations

import ctypes
import functools
import threading

import jax

from jaxcoll import config
from jaxcoll.runtime import choice, gpu, native, sets, world
from jaxcoll.schedule import Kind

FFI_TARGET = "jaxcoll_collective"

_lock = threading.Lock()
_sets: sets.Sets | None = None


@functools.cache
def register() -> None:
    """Registers the FFI handlers with JAX. Done on first use: importing jaxcoll starts nothing."""
    handlers = ctypes.CDLL(str(native.load().path))
    jax.ffi.register_ffi_target(FFI_TARGET, jax.ffi.pycapsule(handlers.jaxcoll_collective_cpu), platform="cpu")
    if gpu.present():
        jax.ffi.register_ffi_target(FFI_TARGET, jax.ffi.pycapsule(handlers.jaxcoll_collective_cuda), platform="CUDA")


def init() -> None:
    """Joins the other processes now instead of at the first collective. Every process of the job must come here.

    After a failure between GPUs a call of it, in every process again, makes the failed communicators anew.
    """
    made = get_sets()
    register()
    if gpu.running() is not None:
        gpu.renew(made.world, [(info.devices, info.key) for info in made.all()])


def get_sets() -> sets.Sets:
    """The schedule sets of this process; makes the world on the first call. Raises UsageError in a forked child."""
    global _sets
    world.refuse_forked()
    with _lock:
        if _sets is None:
            made = sets.Sets(world.get())
            if config.current().tuner != "off":
                from jaxcoll.runtime import loop  # the tuner is loaded by those who use it

                loop.start_configured(world.get(), made)
            _sets = made
        return _sets


def known_sets() -> list[sets.SetInfo]:
    """The schedule sets made so far; makes, starts and waits for nothing."""
    return [] if _sets is None else _sets.all()


def prepare(*, kind: Kind, groups: sets.Groups, nbytes: int, reduce: str, root: int | None, perm: sets.Perm | None,
            schedule: str | None, deterministic: bool) -> int:  # fmt: skip
    """Makes everything ready that a lowered call needs. Returns its `set_key` attribute.

    groups: global device ids, one tuple a communicator, in the order of ranks. nbytes: the larger of a rank's whole
    input and output. Raises UsageError or ScheduleError.
    """
    register()
    return get_sets().prepare(sets.wanted(kind, nbytes, reduce, root, perm, schedule, deterministic), groups)


__all__ = ["FFI_TARGET", "choice", "get_sets", "init", "known_sets", "prepare", "register"]
