"""The command `jaxcoll`: one subcommand a tool, each imported only when it is used."""

from __future__ import annotations

import dataclasses
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from types import FrameType

from jaxcoll.errors import JaxcollError, UsageError
from jaxcoll.version import __version__


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand: "module:function" (argv -> exit status) that runs it, one line of help, and an example."""

    name: str
    target: str
    help: str
    example: str

    @property
    def module(self) -> str:
        """The module's name."""
        return self.target.partition(":")[0]

    def run(self, argv: Sequence[str]) -> int:
        """Import the module and run the command."""
        return getattr(importlib.import_module(self.module), self.target.partition(":")[2])(argv)


COMMANDS = (
    Command(
        "bench", "jaxcoll.bench.cli:main", "Time collectives, against jax.lax and MPI.", "bench --ranks 8 --peers lax"
    ),
    Command("doctor", "jaxcoll.doctor:main", "Check this installation and machine; says what to mend.", "doctor"),
    Command("config", "jaxcoll.config:main", "Print every setting, its value and where it comes from.", "config"),
    Command("launch", "jaxcoll.launch:main", "Run a program as N processes on this machine.", "launch -n 8 train.py"),
    Command("draw", "jaxcoll.commands:draw_main", "Draw a schedule as SVG.", "draw dual_tree --ranks 16 -o tree.svg"),
    Command(
        "explain", "jaxcoll.commands:explain_main", "Say which schedule would be chosen, and why.", "explain psum 4M"
    ),
    Command("verify", "jaxcoll.synth.cli:verify_main", "Verify a schedule file.", "verify schedule.xml"),
    Command("synth", "jaxcoll.synth.cli:synth_main", "Make a schedule for a given topology.", "synth --help"),
    Command("replay", "jaxcoll.replay:main", "Take the tuner's decisions of a run again.", "replay run.jsonl"),
    Command("top", "jaxcoll.top:main", "Watch a tuned program while it runs.", "top"),
    Command("report", "jaxcoll.report:main", "Make a page out of a run log.", "report run.jsonl -o report.html"),
    Command("testbed", "jaxcoll.testbed.cli:main", "Hosts and slow links in network namespaces.", "testbed --help"),
)


def usage() -> str:
    """The text of `jaxcoll --help`."""
    width = max(len(command.name) for command in COMMANDS)
    lines = ["usage: jaxcoll COMMAND [options]      (also: python -m jaxcoll COMMAND)", ""]
    lines += ["Collectives for JAX over schedules that move out of the way of a congested link.", "", "Commands:"]
    lines += [f"  {command.name:<{width}}  {command.help}" for command in COMMANDS]
    lines += ["", "Examples:", *(f"  jaxcoll {command.example}" for command in COMMANDS)]
    lines += ["", "jaxcoll COMMAND --help tells a command's options; jaxcoll config lists the environment variables."]
    return "\n".join(lines)


def _leave(signum: int, _: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _set_signals() -> None:
    """What a command needs to end its processes, remove its files, and learn how its children ended."""
    if threading.current_thread() is not threading.main_thread():
        return
    for signum in (signal.SIGTERM, signal.SIGHUP):
        # The default would end Python without its `with` blocks. A signal that is ignored, as under nohup, stays so.
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _leave)
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited: the kernel would throw exit codes away
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status: 2 for wrong usage, the command's own otherwise."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] in ("-V", "--version", "version"):
        print(f"jaxcoll {__version__}")
        return 0
    if args[0] == "synth":  # one core is given, and BLAS would take all: it reads this when numpy is first imported
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    by_name = {command.name: command for command in COMMANDS}
    if args[0] not in by_name:
        print(f"jaxcoll: no command {args[0]!r}. Commands: {', '.join(by_name)}.", file=sys.stderr)
        return 2
    warnings.simplefilter("default", UserWarning)
    _set_signals()
    try:
        return by_name[args[0]].run(args[1:])
    except UsageError as error:
        print(f"jaxcoll {args[0]}: {error}", file=sys.stderr)
        return 2
    except JaxcollError as error:
        print(f"jaxcoll {args[0]}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # The reader (head, less) has closed; nothing is left to be said.
            sys.stderr.close()
            return 141
        print(f"jaxcoll {args[0]}: {error.filename or 'a file'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"jaxcoll {args[0]}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
