"""The programs `ip` and `tc`, many commands a call, and the way of a process into a namespace."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxcoll.errors import JaxcollError

NETNS = Path("/run/netns")
_LIMIT_S = 120.0  # for one call, which is a batch for a whole testbed at most

# Runs before a program: die with the parent, keep a connection to the driver (a socket stays in the namespace where it
# was made), enter the namespace, take the station's address as host name (what XLA's own collectives listen on is the
# address that the host name has), then become the program. In the child's own interpreter, since code between fork and
# exec is unsafe in a parent with threads. 1 is PR_SET_PDEATHSIG.
_ENTER = """
import ctypes, json, os, signal, socket, sys
parent, path, name, control = sys.argv[1:5]
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(parent): sys.exit(1)
if control in os.environ:
    port, _, token = os.environ[control].partition(":")
    link = socket.create_connection(("127.0.0.1", int(port)))
    hello = {"rank": int(os.environ["JAXCOLL_LAUNCH_RANK"]), "token": token}
    link.sendall(json.dumps(hello).encode() + b"\\n")
    os.set_inheritable(link.fileno(), True)
    os.environ[control + "_FD"] = str(link.detach())
def call(what, *args):
    if getattr(libc, what)(*args): sys.exit(f"{what} {path}: {os.strerror(ctypes.get_errno())}")
call("setns", os.open(path, os.O_RDONLY | os.O_CLOEXEC), 0x40000000)
call("unshare", 0x04000000)
socket.sethostname(name)
try: os.execvp(sys.argv[5], sys.argv[5:])
except OSError as error: sys.exit(f"can't run {sys.argv[5]}: {error.strerror}")
"""


def enter_command(parent: int, namespace: str, hostname: str, control: str, command: Sequence[str]) -> list[str]:
    """The command line that runs `command` inside a namespace, as long as process `parent` lives.

    control: the environment variable that holds "port:secret" of a `jaxcoll.bench.control.Listener` on the parent's
    loopback; if it is set, the program finds a connection that has been announced there under the descriptor number in
    `<control>_FD`.
    """
    shim = [sys.executable, "-I", "-S", "-c", _ENTER, str(parent), str(NETNS / namespace), hostname, control]
    return [*shim, *command]


def run(*command: str, lines: Sequence[str] = (), force: bool = False) -> str:
    """Run `ip` or `tc`; returns its output. With `lines`, a batch of commands on its standard input.

    force: go on after a line that fails, and don't mind. Raises JaxcollError with the program's words and the line, or
    when the program hangs.
    """
    call = list(command)
    if lines:
        call[1:1] = ["-force", "-batch", "-"] if force else ["-batch", "-"]
    text = "".join(f"{line}\n" for line in lines)
    try:
        done = subprocess.run(
            call, input=text if lines else None, capture_output=True, text=True, check=False, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise JaxcollError(
            f"{' '.join(call)}: no end after {_LIMIT_S:g} s; another program may hold the kernel's network settings: "
            "see whether `ip link` answers, and which ip and tc run"
        ) from error
    if done.returncode and not force:
        message = done.stderr.strip() or f"exit status {done.returncode}"
        raise JaxcollError(f"{' '.join(call)}: {message}{_failed_line(message, lines)}")
    return done.stdout


def _failed_line(message: str, lines: Sequence[str]) -> str:
    # The programs end a batch with "Command failed -:12".
    _, found, number = message.rpartition("Command failed -:")
    if found and number.strip().isdigit() and 0 < int(number) <= len(lines):
        return f" ({lines[int(number) - 1]!r})"
    return ""


def namespaces() -> list[str]:
    """The names of all named network namespaces."""
    return sorted(path.name for path in NETNS.iterdir()) if NETNS.is_dir() else []


def write_sysctl(namespace: str, values: dict[str, str]) -> None:
    """Set network settings inside a namespace: names below net, such as `ipv4/ip_forward`."""
    script = "; ".join(f"echo {value} > /proc/sys/net/{name}" for name, value in values.items())
    run("ip", "netns", "exec", namespace, "sh", "-ec", script)
