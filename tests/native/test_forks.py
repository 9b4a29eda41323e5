"""A process that ends is lost at once, though a child that it has forked lives on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from jaxcoll.schedule import Kind, build

from .harness import Cluster, tcp_pair, within

pytestmark = pytest.mark.timeout(60)


class Apart(Cluster):
    """Of two processes only the first is here; `theirs` are the other's ends of the connections."""

    def _join_tcp(self, pairs: Sequence[tuple[int, int]], carries_data: bool) -> None:
        made = [tcp_pair() for _ in range(self.options.connections)]
        self.theirs = [s[1] for s in made]
        fds = self.native.ffi.new("int[]", [s[0].detach() for s in made])
        self.native.check(self.native.lib.jc_world_tcp_peer(self.worlds[0], 1, fds, len(made), carries_data))


def test_a_killed_process_whose_child_lives_on():
    with Apart("tcp", 2, only=0) as cluster:
        fds = [s.fileno() for s in cluster.theirs]
        member = subprocess.Popen(
            [sys.executable, "-m", "tests.native.forks", *map(str, fds)], pass_fds=fds, stdout=subprocess.PIPE
        )
        for s in cluster.theirs:
            s.close()
        assert member.stdout is not None
        child = int(member.stdout.readline())
        try:
            op = cluster.start(
                0,
                Kind.ALL_REDUCE,
                np.ones(9, np.float32),
                cluster.define([build("ring", Kind.ALL_REDUCE, 2)]),
                launch=1,
            )
            assert not op.wait(0.2), "the fork alone ends nothing"
            member.kill()
            with within(1.5):
                assert "rank 1 is lost (its connection has closed)" in op.error(5)
            os.kill(child, 0)  # it is still there
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            member.kill()
            member.wait()
            member.stdout.close()
