"""The pure half of the native library (ffi/src/flow), bound with cffi: functions of their arguments alone.

It knows neither JAX nor the executor and opens nothing but the library's file. Whoever uses it does the same in Python,
slower, where the library is missing.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
def library(cdef: str) -> Library | None:
    """The library with the functions that `cdef` declares, or None where none with this interface can be loaded."""
    if os.environ.get(OVERRIDE) == "none":
        return None
    try:
        import cffi
    except ImportError:
        return None
    ffi = cffi.FFI()
    ffi.cdef(cdef + "\nint32_t jc_flow_abi(void);")
    for path in candidates():
        try:
            lib: Any = ffi.dlopen(str(path))
            if lib.jc_flow_abi() == ABI:
                return Library(ffi, lib)
        except (OSError, AttributeError):
            continue  # another build, or one without this part
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
