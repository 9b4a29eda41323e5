"""The pure half of the native library (ffi/src/flow), bound with cffi: functions of their arguments alone.

It knows neither JAX nor the executor and opens nothing but the library's file. Whoever uses it does the same in Python,
slower, where the library is missing.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("jaxcoll")

ABI = 3
# Set to "none" to go without, or to the path of another build.
OVERRIDE = "JAXCOLL_TEST_FLOW_LIBRARY"


@dataclass(frozen=True)
class Library:
    """A loaded library: the cffi instance and the handle."""

    ffi: Any
    lib: Any


def candidates() -> list[Path]:
    """Where the library may lie, in order of preference."""
    named = os.environ.get(OVERRIDE) or os.environ.get("JAXCOLL_LIBRARY")
    package = Path(__file__).resolve().parent
    return [Path(named)] if named else sorted(package.glob("**/libjaxcoll.so"))


@functools.cache
def load(cdef: str) -> Library | None:
    """The library with the functions that `cdef` declares, or None where none with this interface can be loaded.

    A warning tells why, unless it is meant so.
    """
    if os.environ.get(OVERRIDE) == "none":
        return None
    import cffi

    ffi = cffi.FFI()
    whys: list[str] = []
    ffi.cdef(cdef + "\nint32_t jc_flow_abi(void);")
    for path in candidates():
        try:
            lib: Any = ffi.dlopen(str(path))
            found = lib.jc_flow_abi()
            if found == ABI:
                return Library(ffi, lib)
            whys.append(f"{path} has interface {found}, not {ABI}")
        except (OSError, AttributeError) as error:  # not a library, or one without this part
            whys.append(f"{path}: {error}")
    why = "; ".join(whys) or "there is none; build it (`make native` in a clone), or install jaxcoll again"
    log.warning("the native library can't be used for synthesis and the flow model, Python does it slower: %s", why)
    return None


def as_int32(library: Library, values: Any) -> Any:
    """`values` for a C argument: an array that is contiguous and of this type is passed itself, others as a copy."""
    return library.ffi.from_buffer("int32_t[]", np.ascontiguousarray(values, dtype=np.int32))


def as_int64(library: Library, values: Any) -> Any:
    """The same with int64."""
    return library.ffi.from_buffer("int64_t[]", np.ascontiguousarray(values, dtype=np.int64))


def as_double(library: Library, values: Any) -> Any:
    """The same with float64."""
    return library.ffi.from_buffer("double[]", np.ascontiguousarray(values, dtype=np.float64))


def as_bytes(library: Library, values: NDArray[np.uint8]) -> Any:
    """The same with uint8."""
    return library.ffi.from_buffer("uint8_t[]", np.ascontiguousarray(values))
