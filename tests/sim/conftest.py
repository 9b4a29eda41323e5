"""The flow model's two engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from jaxcoll import flowlib
from jaxcoll.sim import native

Choose = Callable[[str], None]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Choose]:
    """Takes one of the engines, "native" or "numpy", from then on."""

    def take(name: str) -> None:
        if name == "numpy":
            monkeypatch.setenv(flowlib.OVERRIDE, "none")
        else:
            monkeypatch.delenv(flowlib.OVERRIDE, raising=False)
        flowlib.load.cache_clear()
        assert (flowlib.load(native.CDEF) is not None) == (name == "native")

    yield take
    flowlib.load.cache_clear()
