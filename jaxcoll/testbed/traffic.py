"""The program at either end of a background flow. Standard library alone: it starts in milliseconds, as a plain file.

    traffic.py receive ADDRESS PORT LOG       counts what arrives; writes "<seconds> <bytes>" lines, both cumulative
    traffic.py send ADDRESS PORT CONNECTIONS CONGESTION [ON OFF]

ON and OFF are the seconds of a burst and of the pause after it; without them it sends all the time.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import sys
import threading
import time

BLOCK = 1 << 17
LOG_EVERY = 0.1
_CONNECT_SECONDS = 60.0

# A full socket buffer still arrives after its burst has ended, so it is kept small: 80 ms at 50 Mbit/s.
_BUFFER = 1 << 19


def receive(address: str, port: int, log: str) -> None:
    """Accept connections and count their bytes, for ever."""
    server = socket.create_server((address, port), backlog=128)
    server.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(server, selectors.EVENT_READ)
    scratch, total, written = bytearray(BLOCK), 0, 0.0
    with open(log, "a", buffering=1) as file:
        while True:
            for key, _ in selector.select(LOG_EVERY):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                count = 0
                with contextlib.suppress(OSError):
                    count = connection.recv_into(scratch)
                total += count
                if not count:
                    selector.unregister(connection)
                    connection.close()
            now = time.monotonic()
            if now - written >= LOG_EVERY:
                file.write(f"{now:.3f} {total}\n")
                written = now


def _connect(address: str, port: int, congestion: str) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        try:
            connection.connect((address, port))
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        # The kernel's default may be bbr, whose share of a queue is anybody's guess. After connecting: the route to the
        # peer may name another control, and it has the last word until then.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        return connection


def _pump(connection: socket.socket, burst: tuple[float, float] | None) -> None:
    block = bytes(BLOCK)
    start = time.monotonic()
    while True:
        if burst is not None:
            # One clock for all connections of a flow: their bursts fall together.
            phase = (time.monotonic() - start) % sum(burst)
            if phase >= burst[0]:
                time.sleep(sum(burst) - phase)
                continue
        connection.sendall(block)


def send(address: str, port: int, connections: int, congestion: str, burst: tuple[float, float] | None) -> None:
    """Send zeros over `connections` TCP connections, until killed or until the receiver goes."""
    sockets = [_connect(address, port, congestion) for _ in range(connections)]
    threads = [threading.Thread(target=_pump, args=(s, burst)) for s in sockets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(argv: list[str]) -> None:
    """Run one end; see the module's text."""
    if argv[0] == "receive":
        receive(argv[1], int(argv[2]), argv[3])
    else:
        burst = (float(argv[5]), float(argv[6])) if len(argv) > 5 else None
        send(argv[1], int(argv[2]), int(argv[3]), argv[4], burst)


if __name__ == "__main__":
    main(sys.argv[1:])
