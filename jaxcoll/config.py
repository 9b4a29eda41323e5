"""The one table of settings: name, type, default, environment variable, help.

A setting is a field of `Config`; its environment variable is `JAXCOLL_` + the field's name in capitals. The environment
is read once, on first use of `current()`, so that a setting can't change under a running communicator. To add a
setting, add one field: the reader, `jaxcoll config`, the error texts and the tests all go through the fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from jaxcoll.errors import UsageError

PREFIX = "JAXCOLL_"

# What the launcher tells its ranks, and switches of the test suite ("a skip is an error"): no settings of the library.
OTHER_PREFIXES = ("JAXCOLL_LAUNCH_", "JAXCOLL_REQUIRE_", "JAXCOLL_TEST_")

KINDS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "permute")
EVERY_KIND = "*"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmg])(?:i?b)?|b)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(us|ms|s|min|h)?", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_SHIFT = {"": 0, "k": 10, "m": 20, "g": 30}


@dataclasses.dataclass(frozen=True)
class Parser:
    """How the text of a variable becomes a value. `read` raises ValueError on what `accepts` doesn't promise."""

    read: Callable[[str], Any]
    accepts: str
    show: Callable[[Any], str] = str


def parse_size(text: str) -> int:
    """Bytes in `text`: a number with an optional K, M or G (powers of 1024). Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with K, M or G, such as 4K or 64M")
    number, unit = match.groups()
    value = float(number) * (1 << _SHIFT[(unit or "").lower()])
    if value >= 1 << 63:
        raise ValueError(f"{text[:40]!r} is more bytes than a machine can count")
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(value)


def format_size(size: int) -> str:
    """The shortest exact text for `size` bytes that `parse_size` reads back: 4096 -> '4K'."""
    for unit in ("G", "M", "K"):
        step = 1 << _SHIFT[unit.lower()]
        if size and size % step == 0:
            return f"{size // step}{unit}"
    return str(size)


def _choice(*names: str) -> Parser:
    def read(text: str) -> str:
        if text.lower() not in names:
            raise ValueError("unknown name")
        return text.lower()

    return Parser(read, "one of " + ", ".join(names))


def _integer(low: int, high: int, note: str = "") -> Parser:
    def read(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return Parser(read, f"a whole number from {low} to {high}" + (f" ({note})" if note else ""))


def _seconds(low: float, high: float) -> Parser:
    def read(text: str) -> float:
        match = _DURATION.fullmatch(text)
        if match is None:
            raise ValueError("not a duration")
        value = float(match[1]) * _SECONDS[(match[2] or "s").lower()]
        if not low <= value <= high:
            raise ValueError("out of range")
        return value

    return Parser(
        read, f"seconds, or a number with us, ms, s, min or h, from {low:g} s to {high:.0f} s", "{:g} s".format
    )


def _switch() -> Parser:
    words = {"on": True, "1": True, "true": True, "yes": True, "off": False, "0": False, "false": False, "no": False}

    def read(text: str) -> bool:
        if text.lower() not in words:
            raise ValueError("not a switch")
        return words[text.lower()]

    return Parser(read, "on or off (also 1/0, true/false, yes/no)", lambda value: "on" if value else "off")


def _text(accepts: str, pattern: str = r".*") -> Parser:
    def read(text: str) -> str:
        if re.fullmatch(pattern, text) is None:
            raise ValueError("malformed")
        return text

    return Parser(read, accepts)


def _read_schedule(text: str) -> Mapping[str, str]:
    chosen: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        kind, equals, name = part.partition("=")
        if not equals:
            kind, name = EVERY_KIND, part
        kind, name = kind.strip(), name.strip()
        if kind not in (*KINDS, EVERY_KIND) or not name or kind in chosen:
            raise ValueError("unknown kind, empty name, or a kind given twice")
        chosen[kind] = name
    return chosen


def _show_schedule(value: Mapping[str, str]) -> str:
    # Sorted: processes compare it as text, and the order means nothing.
    return ",".join(name if kind == EVERY_KIND else f"{kind}={name}" for kind, name in sorted(value.items()))


_SCHEDULE = Parser(
    _read_schedule,
    f"a schedule's name or file for every kind, or a comma list of kind=name (kinds: {', '.join(KINDS)})",
    _show_schedule,
)
_INTERFACES = _text(
    "a comma list of interface names; a name is a prefix, =name is exact, a leading ^ excludes those listed",
    r"\^?(=?[A-Za-z0-9_.:@-]+)?(,=?[A-Za-z0-9_.:@-]+)*",
)


def _setting(default: Any, parser: Parser, help: str) -> Any:
    # A factory for every field: a mapping can't be a dataclass's plain default.
    return dataclasses.field(default_factory=lambda: default, metadata={"parser": parser, "help": help})


@dataclasses.dataclass(frozen=True)
class Config:
    """All settings of one process. Durations are seconds."""

    transport: str = _setting(
        "auto",
        _choice("auto", "inproc", "shm", "tcp"),
        "How ranks reach each other. auto chooses pair by pair: inproc inside a process, shm inside a host, else tcp. "
        "Alike in all processes.",
    )
    socket_ifname: str = _setting(
        "", _INTERFACES, "Network interfaces that carry the data of tcp. Empty: chosen by the route to the peers."
    )
    control_ifname: str = _setting(
        "", _INTERFACES, "Network interfaces for control messages. Empty: those of JAXCOLL_SOCKET_IFNAME."
    )
    timeout: float = _setting(
        300.0,
        _seconds(0.01, 1e6),
        "A wait for a peer longer than this raises an error that names the peer, operation, step and edge.",
    )
    warn_after: float = _setting(
        20.0, _seconds(0.01, 1e6), "A wait for a peer longer than this logs a warning that names the late rank."
    )
    schedule: Mapping[str, str] = _setting(
        {},
        _SCHEDULE,
        "The schedule to use in place of the cost model's choice. Empty: the cost model chooses. "
        "Alike in all processes.",
    )
    host_id: str = _setting(
        "",
        _text("up to 128 printable characters without spaces", r"[!-~]{0,128}"),
        "Ranks with the same host id may share memory; two ids on one machine force tcp. Empty: the machine's own.",
    )
    tcp_connections: int = _setting(
        4,
        _integer(1, 64),
        "TCP connections per pair of ranks; large messages are spread over them. Alike in all processes.",
    )
    threads: int = _setting(
        0,
        _integer(0, 1024, "0: chosen from the cores and the local ranks"),
        "Native threads of this process that move and reduce data.",
    )
    spin_us: int = _setting(
        2000,
        _integer(0, 1_000_000),
        "Microseconds without news after which the calling thread stops polling and a thread that sleeps takes over.",
    )
    keep_memory: str = _setting(
        "auto",
        _choice("auto", "on", "off"),
        "Let malloc keep the memory of freed arrays for the next ones, in large pages, in place of giving it back to "
        "the system and clearing fresh pages in every step. For the whole process. auto: where the process drives one "
        "device (results of several come from several of malloc's arenas, which would each keep some), and malloc "
        "isn't set up by its own variables (MALLOC_..., GLIBC_TUNABLES).",
    )
    gpu_layout: str = _setting(
        "pairs",
        _choice("pairs", "groups"),
        "GPUs. pairs: a NCCL communicator for each pair of ranks that exchange data, so that every edge runs and is "
        "timed by itself, and a new table is connected before it comes into force (the tuner needs both). groups: one "
        "communicator, and one launch for all edges of a step. Alike in all processes.",
    )
    gpu_inside: str = _setting(
        "nccl",
        _choice("nccl", "edges"),
        "GPUs, communicators over several hosts: steps that are a ReduceScatter or AllGather of whole hosts (those of "
        "the hierarchical schedule) run as NCCL's own, or edge by edge. Alike in all processes.",
    )
    record: bool = _setting(True, _switch(), "Record every edge of every execution (the tuner needs it).")
    tuner: str = _setting(
        "off",
        _choice("off", "on", "swaps", "react-paper"),
        "Tune the running program. on: ranks and schedules may change, from the schedule named by hand too; swaps: "
        "ranks only; react-paper: ranks only, by the paper's rules. Alike in all processes.",
    )
    run_log: str = _setting(
        "",
        _text("a path"),
        "File in which the tuner's leader (process 0) keeps records, decisions and swaps, for `jaxcoll report` and "
        "`jaxcoll replay`. An earlier run's file is kept: it is renamed, with .1, .2 and so on at its end.",
    )
    log: str = _setting("warning", _choice("error", "warning", "info", "debug"), "What is logged on stderr.")
    library: str = _setting(
        "",
        _text("a path to libjaxcoll.so"),
        "The native library to load in place of the installed one (sanitizer builds).",
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table, for printing and for tests."""

    name: str
    env: str
    default: Any
    accepts: str
    help: str
    show: Callable[[Any], str]


UNTUNED = {PREFIX + "TUNER": "off", PREFIX + "RUN_LOG": ""}
"""For the processes of commands that only measure or check: what the environment says is meant for programs."""


def settings() -> tuple[Setting, ...]:
    """The rows of the table, in order."""
    defaults = Config()
    rows: list[Setting] = []
    for field in dataclasses.fields(Config):
        parser: Parser = field.metadata["parser"]
        default = getattr(defaults, field.name)
        env = PREFIX + field.name.upper()
        rows.append(Setting(field.name, env, default, parser.accepts, field.metadata["help"], parser.show))
    return tuple(rows)


def parse(env: str, text: str) -> Any:
    """The value of `text` for the variable `env`. Raises `UsageError`: variable, value, and what is accepted."""
    for field in dataclasses.fields(Config):
        if PREFIX + field.name.upper() == env:
            parser: Parser = field.metadata["parser"]
            try:
                return parser.read(text.strip())
            except (ValueError, OverflowError):
                raise UsageError(f"{env}={text!r} is not accepted: it must be {parser.accepts}.") from None
    raise UsageError(f"{env} is no setting of jaxcoll.{_suggestion(env)} `jaxcoll config` lists them all.")


def _suggestion(env: str) -> str:
    close = difflib.get_close_matches(env, [row.env for row in settings()], n=1)
    return f" Did you mean {close[0]}?" if close else ""


def load(environ: Mapping[str, str]) -> Config:
    """Read all settings from `environ`; an empty variable counts as unset.

    Raises `UsageError` for a malformed value and warns about a `JAXCOLL_` variable that is no setting: a misspelt name
    would otherwise be ignored in silence.
    """
    known = {row.env: row.name for row in settings()}
    values = {name: parse(env, environ[env]) for env, name in known.items() if environ.get(env, "").strip()}
    for env in sorted(environ):
        if env.startswith(PREFIX) and env not in known and not env.startswith(OTHER_PREFIXES):
            warnings.warn(f"{env} is no setting of jaxcoll and is ignored.{_suggestion(env)}", stacklevel=2)
    return Config(**values)


_lock = threading.Lock()
_current: Config | None = None


def current() -> Config:
    """The settings of this process, read from the environment on the first call and kept."""
    global _current
    with _lock:
        if _current is None:
            _current = load(os.environ)
        return _current


def _checked(name: str, value: Any) -> Any:
    """The value of a setting: text is read as a variable's, what is none must be a value that could be read."""
    row = next(row for row in settings() if row.name == name)
    if isinstance(value, str):
        return parse(row.env, value)
    try:
        text = row.show(value)
    except (TypeError, ValueError, AttributeError):
        raise UsageError(f"{name}={value!r} is not accepted: it must be {row.accepts}.") from None
    parse(row.env, text)
    return value


@contextlib.contextmanager
def override(**changes: Any) -> Generator[Config, None, None]:
    """Replace settings for the length of a `with` block (tests, and programs that set them in code).

    A value is the field's own, or text as for the variable. Raises `UsageError` for another name or value.
    What was made before the block, such as a communicator, keeps the settings that it was made with.
    """
    global _current
    known = {field.name for field in dataclasses.fields(Config)}
    for name in changes:
        if name not in known:
            raise UsageError(f"{name!r} is no setting of jaxcoll. Settings: {', '.join(sorted(known))}.")
    changes = {name: _checked(name, value) for name, value in changes.items()}
    before = current()
    with _lock:
        _current = dataclasses.replace(before, **changes)
    try:
        yield current()
    finally:
        with _lock:
            _current = before


def describe(environ: Mapping[str, str] | None = None) -> str:
    """The table as text: each setting's variable, value in force and its origin, what is accepted, what it does."""
    environ = os.environ if environ is None else environ
    config = load(environ)
    lines: list[str] = []
    for row in settings():
        value, default = row.show(getattr(config, row.name)), row.show(row.default)
        origin = f"environment; default {default!r}" if environ.get(row.env, "").strip() else "default"
        lines += [f"{row.env} = {value!r}  ({origin})", f"    {row.help}", f"    Accepts {row.accepts}."]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The command `jaxcoll config`. Returns the exit status."""
    if argv:
        print("usage: jaxcoll config\n\nPrints every setting: variable, value, origin, what is accepted, what it does.")
        return 0 if argv[0] in ("-h", "--help") else 2
    print(describe())
    return 0
