"""The files of running testbeds, without a testbed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from jaxcoll.errors import UsageError
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


def test_a_testbed_to_be_ended_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(state, "FOLDER", tmp_path)
    monkeypatch.setattr(iproute, "namespaces", list)
    with pytest.raises(UsageError, match="No testbed 'typo' is there to be ended; there is none"):
        state.clean(["typo"])
    claim = state.Claim("mine", ["h0"])
    with pytest.raises(UsageError, match="No testbed 'typo' .*there are: mine"):
        state.clean(["typo", "mine"])
    claim.release()
