from __future__ import annotations

from typing import Any

import pytest

from jaxcoll import cli, config, doctor, launch
from jaxcoll.runtime import native


def test_a_malformed_setting_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXCOLL_TIMEOUT", "soon")
    (finding,) = doctor.check_settings()
    assert finding.level == "bad"
    assert "JAXCOLL_TIMEOUT='soon'" in finding.text


def test_one_fault_of_the_settings_is_told_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXCOLL_TIMEOUT", "soon")
    (finding,) = doctor.check_library()
    assert (finding.level, finding.cure) == ("info", "")


def test_a_wrong_library_is_blamed_on_its_variable(monkeypatch: pytest.MonkeyPatch):
    config.current()  # kept: what the environment says from here on is not
    monkeypatch.setenv("JAXCOLL_LIBRARY", "/nowhere/none.so")
    native.load.cache_clear()
    try:
        with config.override(library="/nowhere/none.so"):
            (finding,) = doctor.check_library()
    finally:
        native.load.cache_clear()
    assert finding.cure == "correct or unset JAXCOLL_LIBRARY"
    assert "JAXCOLL_LIBRARY names no library that fits (correct or unset it)" in finding.text


def test_a_misspelt_setting_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXCOLL_TIMEOT", "3")
    assert [finding.level for finding in doctor.check_settings()] == ["slow", "ok"]


def test_an_old_jax_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_version", lambda name: (0, 9, 2))
    assert [finding.level for finding in doctor.check_python()] == ["ok", "bad"]
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert [finding.level for finding in doctor.check_python()] == ["ok", "bad"]


def test_few_files_are_told_with_the_cure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda what: (256, 4096))
    first = next(iter(doctor.check_limits()))
    assert (first.level, first.cure) == ("slow", "ulimit -n 4096")


def test_a_forbidden_read_of_a_peer_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "can_read_peers", lambda: False)
    assert [finding.level for finding in doctor.check_shared_memory()][-1] == "slow"


def test_reading_a_peer_is_really_tried(monkeypatch: pytest.MonkeyPatch):
    allowed = doctor.can_read_peers()
    # The same read of an address that isn't mapped fails, so a success above was one.
    monkeypatch.setattr(doctor.ctypes, "addressof", lambda buffer: 8)
    assert not doctor.can_read_peers()
    assert allowed in (True, False)


def test_a_failing_psum_is_reported_by_its_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_PROBE", "print('noise'); raise ValueError('no link'); ")
    findings = list(doctor.check_collectives())
    assert len(findings) == 3
    assert all(finding.level == "bad" and "ValueError: no link" in finding.text for finding in findings)
    same = "jaxcoll bench --ranks 2 --sizes 4K --peers ''"
    assert [finding.cure.partition(": ")[2] for finding in findings] == [
        f"{same} --layout inproc",
        same,
        f"JAXCOLL_TRANSPORT=tcp {same}",
    ]


def test_what_it_runs_is_not_tuned(monkeypatch: pytest.MonkeyPatch):
    seen: list[dict[str, str]] = []

    def run(*_: Any, env: dict[str, str], **__: Any) -> launch.Result:
        seen.append(env)
        return launch.Result([0, 0], None)

    monkeypatch.setattr(doctor, "run", run)
    assert [finding.level for finding in doctor.check_collectives()] == ["ok"] * 3
    assert all((env["JAXCOLL_TUNER"], env["JAXCOLL_RUN_LOG"]) == ("off", "") for env in seen)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert cli.main(["doctor", "--quick"]) == 0
    assert "jax " in capsys.readouterr().out
    monkeypatch.setattr(doctor, "CHECKS", (lambda: iter([doctor.Finding("bad", "broken", "mend it")]),))
    assert cli.main(["doctor"]) == 1
    assert " bad  broken\n      -> mend it\n" in capsys.readouterr().out
