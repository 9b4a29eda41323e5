"""The native library, opened with cffi. Its C interface is read from the header that is installed beside it."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import cffi

from jaxcoll import config
from jaxcoll.errors import JaxcollError, UsageError
from jaxcoll.version import __version__

API_VERSION = 3
NATIVE_DIR = Path(__file__).parents[1] / "_native"


class NativeError(JaxcollError):
    """The native library refused a call; the message is its own."""


def _header(library: Path) -> Path:
    # A build that JAXCOLL_LIBRARY names is of the clone's sources, which may be newer than what is installed.
    for folder in (library.parent, Path(__file__).parents[2] / "ffi" / "include" / "jaxcoll", NATIVE_DIR):
        if (folder / "jaxcoll.h").is_file():
            return folder / "jaxcoll.h"
    raise UsageError(
        f"jaxcoll.h is missing beside {library}; install jaxcoll again (pip install --force-reinstall jaxcoll)"
    )


def _cdef(header: str) -> str:
    """What cffi understands of a C header: no comments, no preprocessor, no extern "C"."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    kept: list[str] = []
    skipping = False
    for line in text.splitlines():
        if line.startswith("#ifdef __cplusplus"):
            skipping = True
        elif line.startswith("#endif") and skipping:
            skipping = False
        elif not line.startswith("#") and not skipping:
            kept.append(line)
    return "\n".join(kept)


class _Functions:
    """What the library exports, by name. Raises UsageError for what it lacks."""

    def __init__(self, library: Any, path: Path):
        self._library, self._path = library, path

    def __getattr__(self, name: str) -> Any:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise UsageError(
                f"the native library {self._path} has no {name}: it is another one, or older than this package. Build "
                "it again (`make native` in a clone), or install jaxcoll again (pip install --force-reinstall jaxcoll)."
            ) from None
        setattr(self, name, function)
        return function


class Native:
    """The library's functions, with errors as exceptions."""

    def __init__(self, path: Path):
        if not path.is_file():
            raise UsageError(
                f"the native library {path} is missing. From a clone: `make native`; else install jaxcoll again "
                "(pip install --force-reinstall jaxcoll), which needs a C++17 compiler where no wheel fits."
            )
        self.ffi = cffi.FFI()
        self.ffi.cdef(_cdef(_header(path).read_text()))
        try:
            # Kept mapped: its threads still run when the interpreter, ending, lets go of everything it holds.
            self.lib: Any = _Functions(self.ffi.dlopen(str(path), os.RTLD_NOW | os.RTLD_NODELETE), path)
        except OSError as error:
            raise UsageError(f"the native library {path} can't be loaded: {error}") from error
        theirs = f"{self.text(self.lib.jc_version())} (interface {self.lib.jc_api_version()})"
        ours = f"{__version__} (interface {API_VERSION})"
        if theirs != ours:
            raise UsageError(
                f"the native library {path} is of version {theirs}, this package of {ours}: two installations are "
                "mixed, or the library wasn't built again. Remove one, or build it (`make native` in a clone)."
            )
        self.path = path

    def text(self, pointer: Any) -> str:
        """A C string as text."""
        return self.ffi.string(pointer).decode(errors="replace")  # type: ignore[union-attr]

    def check(self, result: int) -> int:
        """`result` if it is not -1; else raises NativeError with the library's message."""
        if result == -1:
            raise NativeError(self.text(self.lib.jc_last_error()))
        return result

    def buffer(self, data: bytes) -> Any:
        """`data` as const uint8_t*, without a copy; valid while the result lives."""
        return self.ffi.from_buffer("uint8_t[]", data)

    def int64s(self, values: Any) -> Any:
        """A new int64_t array."""
        return self.ffi.new("int64_t[]", [int(v) for v in values])


@functools.cache
def load() -> Native:
    """The library of this process: JAXCOLL_LIBRARY, or the installed one."""
    path = config.current().library
    if not path:
        return Native(NATIVE_DIR / "libjaxcoll.so")
    try:
        return Native(Path(path))
    except UsageError as error:
        raise UsageError(f"JAXCOLL_LIBRARY names no library that fits (correct or unset it): {error}") from error
