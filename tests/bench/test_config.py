from __future__ import annotations

import dataclasses
import importlib
import warnings

import pytest

from jaxcoll import cli, config
from jaxcoll.bench import groups
from jaxcoll.errors import UsageError
from jaxcoll.schedule import Kind


def test_defaults_without_any_variable():
    assert config.load({}) == config.Config()


@pytest.mark.parametrize(
    ("env", "text", "value"),
    [
        ("JAXCOLL_TRANSPORT", "TCP", "tcp"),
        ("JAXCOLL_SOCKET_IFNAME", "=eth0,ib", "=eth0,ib"),
        ("JAXCOLL_CONTROL_IFNAME", "^docker,lo", "^docker,lo"),
        ("JAXCOLL_TIMEOUT", "5min", 300.0),
        ("JAXCOLL_TIMEOUT", "0.5", 0.5),
        ("JAXCOLL_WARN_AFTER", "250ms", 0.25),
        ("JAXCOLL_SCHEDULE", "ring", {"*": "ring"}),
        ("JAXCOLL_SCHEDULE", "ring, all_to_all=pairwise", {"*": "ring", "all_to_all": "pairwise"}),
        ("JAXCOLL_HOST_ID", "rack1/a", "rack1/a"),
        ("JAXCOLL_TCP_CONNECTIONS", "8", 8),
        ("JAXCOLL_THREADS", "3", 3),
        ("JAXCOLL_SPIN_US", "50", 50),
        ("JAXCOLL_RECORD", "off", False),
        ("JAXCOLL_LOG", "debug", "debug"),
        ("JAXCOLL_TIMEOUT", "   ", 300.0),
    ],
)
def test_values(env: str, text: str, value: object):
    name = env.removeprefix("JAXCOLL_").lower()
    assert getattr(config.load({env: text}), name) == value


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ("JAXCOLL_TRANSPORT", "ib"),
        ("JAXCOLL_TIMEOUT", "soon"),
        ("JAXCOLL_TIMEOUT", "-1"),
        ("JAXCOLL_TIMEOUT", "inf"),
        ("JAXCOLL_TIMEOUT", "nan"),
        ("JAXCOLL_SCHEDULE", "allreduce=ring"),
        ("JAXCOLL_SCHEDULE", "ring,tree"),
        ("JAXCOLL_SCHEDULE", "all_reduce="),
        ("JAXCOLL_TCP_CONNECTIONS", "0"),
        ("JAXCOLL_TCP_CONNECTIONS", "4.5"),
        ("JAXCOLL_RECORD", "maybe"),
        ("JAXCOLL_HOST_ID", "two words"),
        ("JAXCOLL_SOCKET_IFNAME", "eth0;rm"),
    ],
)
def test_a_bad_value_names_variable_value_and_what_is_accepted(env: str, text: str):
    row = next(row for row in config.settings() if row.env == env)
    with pytest.raises(UsageError) as caught:
        config.load({env: text})
    assert f"{env}={text!r}" in str(caught.value)
    assert row.accepts in str(caught.value)


def test_a_misspelt_variable_is_warned_of_and_others_are_not():
    with pytest.warns(UserWarning, match="JAXCOLL_TIMEOT is no setting.*Did you mean JAXCOLL_TIMEOUT"):
        config.load({"JAXCOLL_TIMEOT": "3"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.load({"JAXCOLL_REQUIRE_MPI": "1", "JAXCOLL_LAUNCH_RANK": "0", "PATH": "/bin"})


def test_every_default_can_be_written_as_text_and_read_back():
    for row in config.settings():
        text = row.show(row.default)
        if text:
            assert config.parse(row.env, text) == row.default, row.env


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch):
    before = config.current()
    monkeypatch.setenv("JAXCOLL_TCP_CONNECTIONS", str(before.tcp_connections + 1))
    assert config.current() is before


def test_override_ends_with_its_block():
    before = config.current()
    with config.override(timeout=1.0, transport="tcp") as inside:
        assert config.current() is inside
        assert (inside.timeout, inside.transport) == (1.0, "tcp")
        assert dataclasses.replace(inside, timeout=before.timeout, transport=before.transport) == before
    assert config.current() is before


def test_override_ends_with_an_exception():
    before = config.current()
    with pytest.raises(RuntimeError), config.override(timeout=1.0):
        raise RuntimeError
    assert config.current() is before


def test_override_refuses_what_is_no_setting():
    with pytest.raises(UsageError, match="'timeot' is no setting"), config.override(timeot=1.0):
        pass


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"timeout": "5 parsecs"}, "JAXCOLL_TIMEOUT='5 parsecs' is not accepted: it must be seconds"),
        ({"timeout": -1.0}, "JAXCOLL_TIMEOUT='-1 s' is not accepted"),
        ({"transport": "pigeon"}, "JAXCOLL_TRANSPORT='pigeon' is not accepted: it must be one of"),
        ({"schedule": 5}, "schedule=5 is not accepted: it must be a schedule's name"),
    ],
)
def test_override_refuses_what_no_variable_could_say(change: dict[str, object], words: str):
    before = config.current()
    with pytest.raises(UsageError, match=words), config.override(**change):
        pass
    assert config.current() is before


def test_override_reads_text_as_a_variable_s():
    with config.override(timeout="50ms", transport="TCP", schedule="all_gather=ring") as inside:
        assert (inside.timeout, inside.transport, inside.schedule) == (0.05, "tcp", {"all_gather": "ring"})


def test_a_size_beyond_all_machines_is_refused():
    with pytest.raises(ValueError, match="more bytes than"):
        config.parse_size("9" * 400)


def test_only_what_is_asked_to_tune_is_tuned_by_the_benchmark():
    def settings(impl: str) -> config.Config:
        exported = {"JAXCOLL_TUNER": "swaps", "JAXCOLL_RUN_LOG": "run.jsonl"}
        return config.load({**exported, **groups.environment(impl, {"JAXCOLL_TRANSPORT": "tcp"})})

    for impl in ("jaxcoll", "JAXCOLL_RECORD=off"):
        assert settings(impl) == config.Config(transport="tcp", record=impl == "jaxcoll")
    assert settings("JAXCOLL_TUNER=on") == config.Config(transport="tcp", tuner="on", run_log="run.jsonl")


def test_kinds_are_those_of_schedules():
    assert tuple(kind.name.lower() for kind in Kind) == config.KINDS


def test_describe_shows_value_and_origin():
    text = config.describe({"JAXCOLL_LOG": "debug"})
    assert "JAXCOLL_LOG = 'debug'  (environment; default 'warning')" in text
    assert "JAXCOLL_TIMEOUT = '300 s'  (default)" in text


def test_command_line(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["config"]) == 0
    assert "JAXCOLL_TRANSPORT" in capsys.readouterr().out
    assert cli.main(["config", "--help"]) == 0
    assert cli.main(["config", "everything"]) == 2


def test_a_malformed_variable_ends_a_command_with_its_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("JAXCOLL_TIMEOUT", "soon")
    assert cli.main(["config"]) == 2
    assert "JAXCOLL_TIMEOUT='soon' is not accepted" in capsys.readouterr().err


def test_help_lists_what_there_is_and_unknown_commands_are_told_so(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"  {command.name} " in text
    assert {"bench", "config", "doctor", "launch"} <= {command.name for command in cli.COMMANDS}
    assert cli.main([]) == 2
    assert cli.main(["benhc"]) == 2
    assert "no command 'benhc'. Commands: bench" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name)
def test_every_listed_command_is_there(command: cli.Command):
    assert callable(getattr(importlib.import_module(command.module), command.target.partition(":")[2]))
