"""Rank processes inside the hosts of a testbed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxcoll import config
from jaxcoll.bench.control import ENV as CONTROL_ENV
from jaxcoll.errors import UsageError
from jaxcoll.launch import COORDINATOR, Output, Ranks
from jaxcoll.testbed import iproute
from jaxcoll.testbed.layout import CONTROL, DATA
from jaxcoll.testbed.net import Testbed

# Nobody else lives in a host, so any port is free; groups that run at a time take different ones.
COORDINATOR_PORT = 7711


class HostRanks(Ranks):
    """`jaxcoll.launch.Ranks`, each rank inside a host.

    hosts: the host of each rank; None: one rank a host, in order. Name a host several times for several ranks on it,
    which then share memory. The ranks find each other over the data network and have JAXCOLL_CONTROL_IFNAME set to
    the one that is never congested. port: the coordinator's, on rank 0's host.
    """

    def __init__(
        self,
        bed: Testbed,
        command: Sequence[str],
        hosts: Sequence[str] | None = None,
        *,
        devices: int = 1,
        env: Mapping[str, str] | None = None,
        output: Output = "capture",
        logs: Path | None = None,
        cwd: Path | None = None,
        port: int = COORDINATOR_PORT,
    ):
        self._bed = bed
        self._scratch = bed.folder
        self.hosts = tuple(bed.layout.hosts if hosts is None else hosts)
        for host in self.hosts:
            if host not in bed.layout.hosts:
                raise UsageError(f"{host!r} is no host of this testbed. Hosts: {', '.join(bed.layout.hosts)}.")
        self._coordinator = f"{bed.layout.station(self.hosts[0])}:{port}" if self.hosts else ""
        defaults = {config.PREFIX + "SOCKET_IFNAME": f"={DATA}", config.PREFIX + "CONTROL_IFNAME": f"={CONTROL}"}
        super().__init__(
            command,
            len(self.hosts),
            devices=devices,
            env={**defaults, **(env or {})},
            output=output,
            logs=logs,
            cwd=cwd,
        )

    def _start(self, rank: int, command: Sequence[str], env: dict[str, str], cwd: Path | None) -> None:
        host = self.hosts[rank]
        address = self._bed.layout.station(host)
        # The launcher's own program runs first and then becomes this one: the parent stays the same.
        inside = iproute.enter_command(os.getpid(), self._bed.namespace(host), address, CONTROL_ENV, command)
        super()._start(rank, inside, {**env, COORDINATOR: self._coordinator}, cwd)


def slots(hosts: Sequence[str], per_host: int) -> list[str]:
    """The host of each rank when every host has `per_host` of them, neighbours together."""
    if per_host < 1:
        raise UsageError(f"A host has at least one rank, not {per_host}.")
    return [host for host in hosts for _ in range(per_host)]
