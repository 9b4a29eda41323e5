"""What the ranks of the loop's tests run: `program.py MODE SWAPS`. Prints one line of JSON a rank.

Every step is checked against plain numpy; rank 0 says when enough swaps are done, through the collective itself, so
that all ranks stop at the same step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxcoll
from jaxcoll import launch
from jaxcoll.runtime import control, drain, leader, loop

SIZE, EXACT = 3000, 2000  # float32 values a rank, and how many of them are whole numbers
SCAN = 3
CUT_AFTER = 4  # swaps before the control network is cut
CUT_S = float(os.environ.get("JAXCOLL_TEST_CUT", "5"))
PATIENCE_S = float(os.environ.get("JAXCOLL_TEST_PATIENCE", "100"))


class Checked:
    """A job over all devices. Most inputs are small whole numbers, so that every order of adding gives the same sum.

    The others aren't, so that parameters which differ between ranks in their last bits would show.
    """

    def __init__(self, mode: str):
        self.n = len(jax.devices())
        self.mode = mode
        self.steps = 0
        rng = np.random.default_rng(5)
        self.values = rng.integers(-8, 9, (self.n, SIZE)).astype(np.float32)
        self.values[:, EXACT:] = rng.normal(size=(self.n, SIZE - EXACT))
        self.total = self.values.sum(axis=0)
        self.mesh = Mesh(np.array(jax.devices()), ("i",))
        self.sharding = NamedSharding(self.mesh, P("i"))
        self.x = self._place(self.values)
        self.params = self._place(np.zeros((self.n, SIZE), np.float32))
        self.step = self._pmapped() if mode == "pmap" else self._jitted()

    def _place(self, rows: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(rows.shape, self.sharding, lambda at: rows[at])

    def _jitted(self) -> Callable[..., Any]:
        def body(params: Any, x: Any, flag: Any) -> Any:
            grads = jaxcoll.psum(x, "i")

            def again(carry: Any, _: Any) -> Any:
                # A collective of another size class, executed several times in one launch.
                return carry + jaxcoll.psum(x[:, :200], "i"), None

            small, _ = jax.lax.scan(again, jnp.zeros((1, 200)), None, length=SCAN)
            return params + grads / 8, grads, small, jaxcoll.psum(flag, "i")

        specs = (P("i"), P("i"), P("i"))
        return jax.jit(jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=(P("i"), P(), P(), P())))

    def _pmapped(self) -> Callable[..., Any]:
        def body(params: Any, x: Any, flag: Any) -> Any:
            grads = jaxcoll.psum(x, "i")
            small = SCAN * jaxcoll.psum(x[:200], "i")
            return params + grads / 8, grads, small, jaxcoll.psum(flag, "i")

        return jax.pmap(body, axis_name="i")

    def run(self, stop: bool) -> tuple[bool, bytes]:
        """One step. Returns (whether rank 0 wants to stop, the parameters' bytes); AssertionError for wrong results.

        Every third one is another executable of the same function, as a last, smaller batch would be.
        """
        self.steps += 1
        flags = np.zeros((self.n, 1 + (self.steps % 3 == 2)), np.float32)
        flags[0] = stop
        out = self.step(self.params, self.x, self._place(flags))
        self.params, (grads, small, flag) = out[0], (np.asarray(o.addressable_shards[0].data) for o in out[1:])
        grads = grads.reshape(-1)
        np.testing.assert_array_equal(grads[:EXACT], self.total[:EXACT])
        np.testing.assert_allclose(grads[EXACT:], self.total[EXACT:], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(small.reshape(-1), SCAN * self.total[:200])
        shards = [np.asarray(s.data).tobytes() for s in self.params.addressable_shards]
        assert all(s == shards[0] for s in shards)
        return bool(flag.reshape(-1)[0] > 0), shards[0]


def main() -> None:
    mode, swaps = sys.argv[1], int(sys.argv[2])
    launch.initialize()
    if mode in ("store", "deaf"):
        control.has_zmq = lambda: False
    leader._SILENT_S = 2.0
    drain._PATIENCE_S = drain._SAMPLED_S = 0.01  # many swaps in a short time
    job = Checked(mode)
    jaxcoll.tune("shuffle", every=1, seed=3)
    faults(mode)
    compiled = 0

    def listen(event: str, _: float, **__: Any) -> None:
        nonlocal compiled
        compiled += event == "/jax/core/compile/backend_compile_duration"

    digest, steps, longest, stop = hashlib.sha256(), 0, 0.0, False
    began = time.monotonic()
    while not stop:
        at = time.monotonic()
        done = enough(mode, swaps) or time.monotonic() - began > PATIENCE_S
        stop, params = job.run(done)
        digest.update(params)
        if steps == 1:  # both executables are there
            jax.monitoring.register_event_duration_secs_listener(listen)
        elif steps > 1:
            longest = max(longest, time.monotonic() - at)
        steps += 1
    running = loop.current()
    assert running is not None
    local = running.worker.swaps
    while mode == "brainless" and running.worker.drain.running and time.monotonic() - began < PATIENCE_S:
        time.sleep(0.02)
    tuner = jaxcoll.status()["tuner"]
    print(
        json.dumps(
            {
                "steps": steps,
                "compiled": compiled,
                "digest": digest.hexdigest(),
                "longest": longest,
                "commits": local.commits,
                "cancels": local.cancels,
                "versions": sorted(local.version(s) for s in local.known()),
                "state": tuner["state"],
                "control": tuner["control"],
                "drains": running.worker.drain.running,
            }
        ),
        flush=True,
    )


def enough(mode: str, swaps: int) -> bool:
    """Whether rank 0 has seen what the test is about."""
    running = loop.current()
    if jax.process_index() != 0 or running is None or running.leader is None:
        return False
    if mode == "brainless":
        if running.worker.swaps.commits >= swaps and running.leader.running and running.leader.brain is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.leader.brain.pid, signal.SIGKILL)
        return not running.leader.running
    if mode == "killed":
        # Some steps more, through the executions that wait.
        return not running.leader.running and running.worker.swaps.cancels > 0
    return running.worker.swaps.commits >= swaps


def faults(mode: str) -> None:
    """Breaks what the mode is about, in the leader's process."""
    running = loop.current()
    if running is None or running.leader is None:
        return
    if mode == "killed":
        # All have promised, and no verdict is written: the worst moment to die.
        commits = 0
        settle = leader.settle

        def dies(*args: Any) -> str:
            nonlocal commits
            commits += 1
            if commits > 3:
                raise SystemExit("killed by the test")
            return settle(*args)

        leader.settle = dies
    if mode == "deaf":
        # The last process never hears a verdict: it must find it in the store.
        channel: Any = running.leader._channel
        send, last = channel.send, jax.process_count() - 1

        def drops(process: int, message: dict[str, Any], payload: bytes = b"") -> None:
            if not (process == last and message["do"] == "decide"):
                send(process, message, payload)

        channel.send = drops
    if mode == "cut":
        # For some seconds nothing crosses the control network, in either direction.
        remote: Any = running.leader._channel
        send_on, receive = remote.send, remote.receive

        def is_cut() -> bool:
            nonlocal since
            if since is None and running.worker.swaps.commits >= CUT_AFTER:
                since = time.monotonic()
            return since is not None and time.monotonic() - since < CUT_S

        def sends(process: int, message: dict[str, Any], payload: bytes = b"") -> None:
            if process == 0 or not is_cut():
                send_on(process, message, payload)

        def receives(timeout: float, wake: Sequence[int] = ()) -> list[Any]:
            got = receive(timeout, wake)
            return [one for one in got if one[0] == 0] if is_cut() else got

        since: float | None = None
        remote.send, remote.receive = sends, receives


if __name__ == "__main__":
    main()
