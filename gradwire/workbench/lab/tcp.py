"""The rate and the round trip of a plain TCP connection."""

import socket
import threading
import time

WARM, TIMED = 0.2, 0.6
"""Seconds. The first ones empty the token bucket and open the window of TCP."""
BLOCK = 1 << 18
PATIENCE = 10.0
PINGS = 5


def transfer_rate(server: socket.socket, client: socket.socket, latency: float = 0.0) -> float:
    """Measure the bits per second from `client` (not connected yet) to `server` (listening)."""
    arriving = _accepted(server, client)
    sender = threading.Thread(target=_send, args=(client,), daemon=True)
    sender.start()
    with arriving:
        # The window needs some ten round trips to open.
        _receive(arriving, WARM + 20 * latency)
        size, seconds = _receive(arriving, TIMED)
    sender.join()
    return 8 * size / seconds


def round_trip(server: socket.socket, client: socket.socket) -> float:
    """Measure the seconds for a byte from `client` to `server` and back, the best of PINGS."""
    arriving = _accepted(server, client)
    with arriving:
        spent = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            for sender, receiver in ((client, arriving), (arriving, client)):
                sender.sendall(b"x")
                receiver.recv(1)
            spent.append(time.perf_counter() - begin)
    return min(spent)


def _accepted(server: socket.socket, client: socket.socket) -> socket.socket:
    """Connect the client, and return the server's end of the connection."""
    client.settimeout(PATIENCE)
    client.connect(server.getsockname())
    server.settimeout(PATIENCE)
    arriving, _ = server.accept()
    arriving.settimeout(PATIENCE)
    for end in (client, arriving):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return arriving


def _send(client: socket.socket) -> None:
    """Send until the receiver closes the connection."""
    block = bytes(BLOCK)
    try:
        while True:
            client.sendall(block)
    except OSError:
        return


def _receive(arriving: socket.socket, seconds: float) -> tuple[int, float]:
    """Receive for `seconds`; return the bytes and the exact time."""
    block = bytearray(BLOCK)
    size, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        size += arriving.recv_into(block)
    return size, spent
