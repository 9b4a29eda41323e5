"""A library that isn't the package's own is refused with the cure, whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxcoll.errors import UsageError
from jaxcoll.runtime import native

OURS = native.load().path  # of a sanitizer's lane, if this is one


def test_what_is_no_library(tmp_path: Path):
    with pytest.raises(UsageError, match=r"none\.so is missing.*make native"):
        native.Native(tmp_path / "none.so")
    text = tmp_path / "text.so"
    text.write_text("no library")
    with pytest.raises(UsageError, match=r"text\.so can't be loaded"):
        native.Native(text)


def test_a_library_that_lacks_a_function():
    foreign = next(Path(p) for p in Path("/proc/self/maps").read_text().split() if "/libm.so" in p or "/libc.so" in p)
    with pytest.raises(UsageError, match=r"has no jc_version: it is another one, or older.*make native"):
        native.Native(foreign)
    ours = native.Native(OURS)
    with pytest.raises(UsageError, match=r"libjaxcoll\.so has no jc_of_tomorrow: .*older than this package"):
        _ = ours.lib.jc_of_tomorrow


def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "__version__", "99.1")
    with pytest.raises(UsageError, match=r"this package of 99\.1 \(interface \d+\): two installations are mixed"):
        native.Native(OURS)
    monkeypatch.undo()
    monkeypatch.setattr(native, "API_VERSION", 99)
    with pytest.raises(UsageError, match=r"\(interface \d+\), this package of .* \(interface 99\)"):
        native.Native(OURS)
