"""Tree packing's two engines. Where the installed library has no flow part yet, it is built here from the sources."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxcoll import flowlib
from jaxcoll.synth import native
from tests.needs import need

SOURCES = Path(__file__).resolve().parents[2] / "ffi" / "src" / "flow"


@pytest.fixture(scope="session")
def flow_library(tmp_path_factory: pytest.TempPathFactory) -> str | None:
    """What to set as `flowlib.OVERRIDE` for the native engine; None: the installed library has it."""
    flowlib.load.cache_clear()
    if native.load() is not None:
        return None
    compiler = shutil.which("g++") or shutil.which("clang++")
    need(compiler is not None, "C++ compiler, nor a native library with the flow part", "NATIVE")
    target = tmp_path_factory.mktemp("flow") / "libflow.so"
    sources = sorted(str(path) for path in SOURCES.glob("*.cc"))
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([str(compiler), *flags, *sources, "-o", str(target)], check=True)
    return str(target)


@pytest.fixture
def fast(flow_library: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The native engine."""
    if flow_library is not None:
        monkeypatch.setenv(flowlib.OVERRIDE, flow_library)
    flowlib.load.cache_clear()
    assert native.load() is not None
    yield
    flowlib.load.cache_clear()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python alone."""
    monkeypatch.setenv(flowlib.OVERRIDE, "none")
    flowlib.load.cache_clear()
    assert native.load() is None
    yield
    flowlib.load.cache_clear()
