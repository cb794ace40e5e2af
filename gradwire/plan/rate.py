"""Link rates: as written, as shown, and as measured by a plain TCP transfer."""

import math
import re
import socket
import threading
import time

from gradwire.errors import ConfigError

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
SLOWEST, FASTEST = 10**6, 34 * 10**9  # TBF counts bytes a second in 32 bits
WARM, TIMED = 0.2, 0.6  # seconds: the first ones empty the bucket's tokens and open the window
BLOCK = 1 << 18
PATIENCE = 10.0
PINGS = 5


def parse_rate(text: str, fastest: int = FASTEST) -> int:
    """Bits a second of `100mbit`, `2.5gbit`, ..."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.strip().lower())
    if match is None:
        raise ConfigError(
            f"link must be a number and kbit, mbit or gbit, such as 100mbit, got {text!r}"
        )
    rate = float(match[1]) * UNITS[match[2]]
    if not SLOWEST <= rate <= fastest:
        raise ConfigError(
            f"link must be from {show_rate(SLOWEST)} to {show_rate(fastest)}, got {text!r:.60}"
        )
    return round(rate)


def show_rate(rate: float) -> str:
    """As people say it: 96.1 Mbit/s."""
    unit = "g" if rate >= UNITS["g"] else "m"
    return f"{rate / UNITS[unit]:.3g} {unit.upper()}bit/s"


def show_time(seconds: float) -> str:
    """As people say it: 5.1 ms."""
    return f"{1e3 * seconds:.3g} ms"


def parse_time(text: str | float, name: str = "latency") -> float:
    """Seconds of `50us`, `5ms`, `0.1s`, or of a number of seconds."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        seconds = float(text)
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|us)", str(text).strip().lower())
        if match is None:
            raise ConfigError(
                f"{name} must be a number and s, ms or us, such as 50us; got {text!r}"
            )
        seconds = float(match[1]) * TIMES[match[2]]
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"{name} must be 0 or more seconds, got {text!r}")
    return seconds


def transfer_rate(server: socket.socket, client: socket.socket, latency: float = 0.0) -> float:
    """Bits a second that arrive at `server` (listening) from `client` (not connected yet)."""
    arriving = _connect(server, client)
    sender = threading.Thread(target=_send, args=(client,), daemon=True)
    sender.start()
    with arriving:
        # A window opens over some ten round trips.
        _receive(arriving, WARM + 20 * latency)
        size, seconds = _receive(arriving, TIMED)
    sender.join()
    return 8 * size / seconds


def round_trip(server: socket.socket, client: socket.socket) -> float:
    """Seconds for a byte from `client` to `server` and back, the best of a few."""
    arriving = _connect(server, client)
    with arriving:
        spent = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            for sender, receiver in ((client, arriving), (arriving, client)):
                sender.sendall(b"x")
                receiver.recv(1)
            spent.append(time.perf_counter() - begin)
    return min(spent)


def _connect(server: socket.socket, client: socket.socket) -> socket.socket:
    client.settimeout(PATIENCE)
    client.connect(server.getsockname())
    server.settimeout(PATIENCE)
    arriving, _ = server.accept()
    arriving.settimeout(PATIENCE)
    for end in (client, arriving):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return arriving


def _send(client: socket.socket) -> None:
    """Sends until the other side has enough."""
    block = bytes(BLOCK)
    try:
        while True:
            client.sendall(block)
    except OSError:
        return


def _receive(arriving: socket.socket, seconds: float) -> tuple[int, float]:
    """Bytes that came in, and the time they took."""
    block = bytearray(BLOCK)
    size, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds:
        size += arriving.recv_into(block)
    return size, spent
