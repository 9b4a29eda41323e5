"""TCP connections between processes: addresses, a listener, and proof of the secret before a byte of data.

A connection opens with a challenge from both sides, answered with HMAC-SHA256 over the secret, both nonces and who
speaks. The secret is made by process 0 and travels through the key-value store of `jax.distributed`, which only members
of the job can reach. A connection that doesn't answer right, or not in time, is closed and forgotten.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

from jaxcoll.errors import CollectiveError, UsageError

MAGIC = b"JAXCOLL1"
_HELLO = struct.Struct("<8sII16s")  # magic, process, connection, nonce
_MAC = 32
_HANDSHAKE_S = 10.0
_GREETERS = 64  # handshakes at a time
_ACCEPT_AGAIN_S = 0.05
_SIOCGIFADDR = 0x8915


def interface_address(name: str) -> str | None:
    """The IPv4 address of an interface, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            packed = fcntl.ioctl(s.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(packed[20:24])


def choose_interface(pattern: str, names: Sequence[str], setting: str = "JAXCOLL_SOCKET_IFNAME") -> str:
    """The first interface that the pattern of `setting` (NCCL's rules: prefix, =exact, ^excluded) admits."""
    exclude = pattern.startswith("^")
    parts = [p for p in pattern.removeprefix("^").split(",") if p]

    def matches(name: str) -> bool:
        return any(name == p[1:] if p.startswith("=") else name.startswith(p) for p in parts)

    for name in names:
        if matches(name) != exclude and (not exclude or name != "lo") and interface_address(name):
            return name
    raise UsageError(f"{setting}={pattern!r} admits no interface with an IPv4 address; there are: {', '.join(names)}")


def is_loopback(address: str) -> bool:
    """Whether an IPv4 address leads back to the host that uses it."""
    return ipaddress.ip_address(address).is_loopback


def local_address(pattern: str, toward: str | None, setting: str = "JAXCOLL_SOCKET_IFNAME") -> str:
    """The address for peers: of the interface asked for, else the one on the route to `toward` (host:port)."""
    if pattern:
        address = interface_address(choose_interface(pattern, [name for _, name in socket.if_nameindex()], setting))
        assert address is not None
        return address
    host, _, port = (toward or "127.0.0.1:1").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect((host.strip("[]"), int(port) or 1))  # sends nothing: asks the kernel for its route
            return s.getsockname()[0]
        except OSError as error:
            raise UsageError(
                f"no route to the coordinator {toward} ({error}); name the interface to use in {setting}"
            ) from error


def _read(s: socket.socket, n: int, deadline: float) -> bytes:
    data = b""
    while len(data) < n:
        s.settimeout(max(0.001, deadline - time.monotonic()))  # in all: who sends byte by byte gains no time by it
        part = s.recv(n - len(data))
        if not part:
            raise ConnectionError("closed during the handshake")
        data += part
    return data


def _mac(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, role + b"".join(parts), "sha256")


class Listener:
    """Accepts the connections that peers make to this process, once they have proved the secret."""

    def __init__(self, address: str, secret: bytes, me: int):
        self._secret, self._me = secret, me
        self._socket = socket.create_server((address, 0), backlog=512)
        self.port: int = self._socket.getsockname()[1]
        self.accepted: dict[tuple[int, int], socket.socket] = {}
        self.refused = 0
        self._closed = False
        self._cv = threading.Condition()
        self._greeters = threading.Semaphore(_GREETERS)
        self._thread = threading.Thread(target=self._accept, name="jaxcoll-listen", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                s, _ = self._socket.accept()
            except OSError:
                time.sleep(_ACCEPT_AGAIN_S)  # closed; or out of file descriptors for the moment, or the other has gone
                continue
            # One slow stranger must not hold up the others, nor many of them take all threads.
            if not self._greeters.acquire(timeout=_HANDSHAKE_S):
                s.close()
                continue
            try:
                threading.Thread(target=self._greet, args=(s,), daemon=True).start()
            except RuntimeError:  # no more threads for the moment; who connects tries again
                self._greeters.release()
                s.close()

    def _greet(self, s: socket.socket) -> None:
        try:
            self._meet(s)
        finally:
            self._greeters.release()

    def _meet(self, s: socket.socket) -> None:
        try:
            deadline = time.monotonic() + _HANDSHAKE_S
            hello = _read(s, _HELLO.size, deadline)
            magic, process, connection, _ = _HELLO.unpack(hello)
            if magic != MAGIC:
                raise ConnectionError("not a jaxcoll peer")
            mine = secrets.token_bytes(16)
            who = struct.pack("<I", self._me)
            s.sendall(mine + _mac(self._secret, b"accept", hello, mine, who))
            if not hmac.compare_digest(_read(s, _MAC, deadline), _mac(self._secret, b"connect", hello, mine, who)):
                raise ConnectionError("wrong secret")
        except (OSError, ConnectionError):
            with self._cv:
                self.refused += 1
            s.close()
            return
        with self._cv:
            if (process, connection) in self.accepted:
                s.close()
                return
            self.accepted[process, connection] = s
            self._cv.notify_all()

    def wait(self, expected: set[tuple[int, int]], deadline: float) -> None:
        """Until all expected (process, connection) are there; CollectiveError at the deadline (time.monotonic)."""
        with self._cv:
            while not expected <= self.accepted.keys():
                left = deadline - time.monotonic()
                if left <= 0 or not self._cv.wait(left):
                    missing = sorted({p for p, _ in expected - self.accepted.keys()})
                    address = self._socket.getsockname()[0]
                    raise CollectiveError(
                        f"processes {missing} have not connected to {address}:{self.port} in time "
                        f"({self.refused} connections were refused). Check that the hosts reach each other on this "
                        "address; JAXCOLL_SOCKET_IFNAME chooses another interface."
                    )

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(
    address: str, port: int, secret: bytes, me: int, peer: int, connection: int, source: str, deadline: float
) -> socket.socket:
    """Connects to a peer's listener from the local address `source` and proves the secret."""
    while True:
        s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            s.settimeout(max(0.1, min(_HANDSHAKE_S, deadline - time.monotonic())))
            s.bind((source, 0))
            s.connect((address, port))
            hello = _HELLO.pack(MAGIC, me, connection, secrets.token_bytes(16))
            s.sendall(hello)
            limit = time.monotonic() + _HANDSHAKE_S
            nonce, proof = _read(s, 16, limit), _read(s, _MAC, limit)
            who = struct.pack("<I", peer)
            if not hmac.compare_digest(proof, _mac(secret, b"accept", hello, nonce, who)):
                raise CollectiveError(f"{address}:{port} is not process {peer} of this job: it doesn't know the secret")
            s.sendall(_mac(secret, b"connect", hello, nonce, who))
            s.settimeout(None)
            return s
        except (OSError, ConnectionError) as error:
            s.close()
            if time.monotonic() >= deadline:
                raise CollectiveError(
                    f"process {peer} can't be reached at {address}:{port} from {source}: {error}. "
                    "JAXCOLL_SOCKET_IFNAME chooses another interface."
                ) from error
            time.sleep(0.05)
