"""What the system allows: as root, namespaces directly; else inside a user namespace; else words on what is missing."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxcoll.errors import JaxcollError

# Set in the process that runs inside the user namespace which `enter` made.
INSIDE = "JAXCOLL_LAUNCH_TESTBED"

# Namespaces are named by files in /run/netns, where an ordinary user can't write: a private /run takes its place.
_SETUP = 'mount -t tmpfs tmpfs /run && mkdir /run/netns && ip link set lo up && exec "$@"'
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--propagation", "private")


class Unavailable(JaxcollError):
    """This machine, or this user on it, can't run a testbed; the message says what is missing."""


def _works(*command: str) -> str | None:
    """None if the command succeeds, else what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30.0)
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"


def _tools() -> list[str]:
    if sys.platform != "linux":
        return [f"a testbed needs Linux's network namespaces; this is {sys.platform}"]
    packages = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "mount": "mount"}
    return [f"the program {name} (package {package})" for name, package in packages.items() if not shutil.which(name)]


@functools.cache
def _mode() -> tuple[str, tuple[str, ...]]:
    # Asked of the system rather than of the user id: root in a container may lack the rights, and a user may have them.
    lacking = _tools()
    if lacking:
        return "none", tuple(lacking)
    direct = _works("unshare", "--net", "--mount", "true")
    if direct is None and os.access("/run", os.W_OK):
        return "direct", ()
    inside = missing_for_users()
    if inside is None:
        return "user", ()
    lacking = [f"root's right to make namespaces ({direct or '/run is not writable'})", f"user namespaces ({inside})"]
    for knob, good in (
        ("user/max_user_namespaces", lambda value: int(value) > 0),
        ("kernel/unprivileged_userns_clone", lambda value: value == "1"),
        ("kernel/apparmor_restrict_unprivileged_userns", lambda value: value == "0"),
    ):
        path = Path("/proc/sys") / knob
        if path.exists() and not good(path.read_text().strip()):
            lacking.append(f"they are switched off by sysctl {knob.replace('/', '.')}={path.read_text().strip()}")
    return "none", tuple(lacking)


def missing_for_users() -> str | None:
    """What the system said when asked for a user namespace with a network of its own; None if it gave one."""
    return _works(*_UNSHARE, "sh", "-c", _SETUP, "sh", "true")


def forget() -> None:
    """Ask the system anew next time: the answer is kept otherwise."""
    _mode.cache_clear()


def missing() -> list[str]:
    """What this machine lacks for a testbed, in words; empty if one can run (perhaps after `enter`)."""
    return list(_mode()[1])


def require() -> None:
    """Raises Unavailable unless this process may make network namespaces here and now."""
    mode, lacking = _mode()
    if mode == "none":
        raise Unavailable(
            f"A testbed can't run here. Missing: {'; '.join(lacking)}. Run it as root, in a container with "
            "--cap-add SYS_ADMIN --cap-add NET_ADMIN, or allow user namespaces."
        )
    if mode == "user":
        raise Unavailable(
            "An ordinary user's testbed lives in a user namespace, which a running process can't enter: start it with "
            "`jaxcoll testbed ...`, or the program with `unshare -Urnm`, a tmpfs on /run and `ip link set lo up`."
        )


def enter(command: Sequence[str]) -> None:
    """Returns where namespaces can be made; else replaces this process with `command` inside a user namespace.

    Raises Unavailable where neither is allowed.
    """
    if _mode()[0] == "user" and INSIDE not in os.environ:
        sys.stdout.flush()
        os.environ[INSIDE] = "user"
        os.execvp(_UNSHARE[0], [*_UNSHARE, "sh", "-c", _SETUP, "sh", *command])
    require()


def in_user_namespace() -> bool:
    """Whether this testbed is an ordinary user's: it vanishes with its processes, by the kernel's hand."""
    return INSIDE in os.environ
