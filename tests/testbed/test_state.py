"""The files of running testbeds, without a testbed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from jaxcoll.testbed import iproute, state


def test_one_ends_while_another_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state, "FOLDER", tmp_path)
    monkeypatch.setattr(iproute, "namespaces", list)
    claim = state.Claim("ends", ["h0"])
    ending = threading.Thread(target=claim.release)
    read = state._read

    def read_late(path: Path) -> tuple[int, list[str]]:
        ending.start()  # the other has seen the file, and not yet opened it
        ending.join(0.3)
        return read(path)

    monkeypatch.setattr(state, "_read", read_late)
    assert state.clean() == []
    ending.join()
    assert list(tmp_path.glob("*.json")) == []
