"""The job as JAX knows it: processes, devices, and the key-value store by which processes find each other."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxcoll import compat, config
from jaxcoll.errors import CollectiveError, UsageError

log = logging.getLogger("jaxcoll")


class Store(Protocol):
    """What bootstrap needs of a key-value store; values are text."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str, timeout: float) -> str: ...

    def set_once(self, key: str, value: str) -> bool: ...

    def barrier(self, name: str, timeout: float) -> None: ...

    def set_bytes(self, key: str, value: bytes) -> None: ...

    def get_bytes(self, key: str, timeout: float) -> bytes | None: ...

    def list_bytes(self, prefix: str) -> list[tuple[str, bytes]]: ...

    def delete(self, key: str) -> None: ...


class CoordinationStore:
    """The coordination service of `jax.distributed`. What is waited for longer than `warn_after` seconds is logged."""

    def __init__(self, client: Any, warn_after: float = 20.0):
        self._client, self._warn_after = client, warn_after

    def set(self, key: str, value: str) -> None:
        """Sets a key, also one that is there."""
        self._client.key_value_set(f"jaxcoll/{key}", value, allow_overwrite=True)

    def get(self, key: str, timeout: float) -> str:
        """The value of a key, once it is there. Raises CollectiveError after `timeout` seconds."""
        last = key.rpartition("/")[2]
        who = f"process {last}" if last.isdecimal() else "process 0"
        missing = f"{who} has not reached its first jaxcoll collective, nor jaxcoll.init(), or is gone"
        early = min(self._warn_after, timeout)
        value = self._text(key, early)
        if value is None and early < timeout:
            log.warning("waiting for %r since %.0f s, for %.0f at most: %s", key, early, timeout, missing)
            value = self._text(key, timeout - early)
        if value is None:
            raise CollectiveError(
                f"nothing came under {key!r} in jax.distributed's store within {timeout:.0f} s: {missing}"
            )
        return value

    def _text(self, key: str, timeout: float) -> str | None:
        """None if it isn't there in time; CollectiveError if the store can't be asked."""
        try:
            return self._client.blocking_key_value_get(f"jaxcoll/{key}", max(1, int(timeout * 1000)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            why = str(error).splitlines()[0]
            raise CollectiveError(f"jax.distributed's store can't be asked for {key!r}: {why}") from error

    def set_once(self, key: str, value: str) -> bool:
        """Sets a key unless it is there. Returns whether it did."""
        try:
            self._client.key_value_set(f"jaxcoll/{key}", value)
        except Exception as error:
            if "ALREADY_EXISTS" in str(error):
                return False
            raise
        return True

    def set_bytes(self, key: str, value: bytes) -> None:
        """Sets a key, also one that is there."""
        self._client.key_value_set_bytes(f"jaxcoll/{key}", value, allow_overwrite=True)

    def get_bytes(self, key: str, timeout: float) -> bytes | None:
        """The value of a key, or None if it isn't there within `timeout` seconds."""
        try:
            return self._client.blocking_key_value_get_bytes(f"jaxcoll/{key}", max(1, int(timeout * 1000)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                return None
            raise

    def list_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        """The keys under a prefix that ends in "/", with their values."""
        found = self._client.key_value_dir_get_bytes(f"jaxcoll/{prefix}")
        return [(key.removeprefix("jaxcoll/"), value) for key, value in found]

    def delete(self, key: str) -> None:
        """Removes a key, if it is there."""
        self._client.key_value_delete(f"jaxcoll/{key}")

    def barrier(self, name: str, timeout: float) -> None:
        """Waits for all processes. Raises CollectiveError after `timeout` seconds."""
        try:
            self._client.wait_at_barrier(f"jaxcoll/{name}", max(1, int(timeout * 1000)))
        except Exception as error:
            raise CollectiveError(
                f"not all processes came to {name!r} within {timeout:.0f} s: {str(error).splitlines()[0]}"
            ) from error


class MemoryStore:
    """The store of a job of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        self.set_bytes(key, value.encode())

    def get(self, key: str, timeout: float) -> str:
        value = self.get_bytes(key, timeout)
        if value is None:
            raise CollectiveError(f"nothing came under {key!r} within {timeout:.0f} s")
        return value.decode()

    def set_once(self, key: str, value: str) -> bool:
        with self._changed:
            fresh = key not in self._values
            if fresh:
                self.set_bytes(key, value.encode())
            return fresh

    def barrier(self, name: str, timeout: float) -> None:
        pass

    def set_bytes(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get_bytes(self, key: str, timeout: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout)
            return self._values.get(key)

    def list_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        with self._changed:
            return [(key, value) for key, value in self._values.items() if key.startswith(prefix)]

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)


@dataclasses.dataclass(frozen=True)
class Job:
    """Processes 0..processes-1, this one being `me`; `devices[p]` are the global device ids that process p drives."""

    processes: int
    me: int
    devices: tuple[tuple[int, ...], ...]
    store: Store | None
    coordinator: str | None


def current() -> Job:
    """The job of this process. Starts JAX's backend if nothing has yet."""
    devices = jax.devices()
    processes = jax.process_count()
    mine: list[list[int]] = [[] for _ in range(processes)]
    for d in devices:
        mine[d.process_index].append(d.id)
    client, coordinator = compat.distributed_client()
    if processes > 1 and client is None:
        raise UsageError(
            f"this job has {processes} processes but jax.distributed is not initialised: "
            "call jax.distributed.initialize() before anything else that uses JAX"
        )
    store = CoordinationStore(client, config.current().warn_after) if client is not None else None
    return Job(processes, jax.process_index(), tuple(tuple(d) for d in mine), store, coordinator)


def host_id(configured: str) -> str:
    """Equal in two processes if they may share memory: same kernel, network namespace and user.

    The network namespace counts because an emulated host is a host.
    """
    if configured:
        return configured
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        net = os.readlink("/proc/self/ns/net")
        pid = os.readlink("/proc/self/ns/pid")
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
    return f"{boot}/{net}/{pid}/{os.getuid()}"


def publish(store: Store, name: str, me: int, value: dict[str, Any]) -> None:
    """Puts this process's row of a table into the store."""
    store.set(f"{name}/{me}", json.dumps(value))


def collect(store: Store, name: str, processes: int, timeout: float) -> list[dict[str, Any]]:
    """The rows of all processes."""
    return [json.loads(store.get(f"{name}/{p}", timeout)) for p in range(processes)]
