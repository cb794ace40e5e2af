"""Link rates: as written, as shown, and as measured by a plain TCP transfer."""

import re
import socket
import threading
import time

from gradwire.errors import ConfigError

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9}
SLOWEST, FASTEST = 10**6, 34 * 10**9  # TBF counts bytes a second in 32 bits
WARM, TIMED = 0.2, 0.6  # seconds: the first ones empty the bucket's tokens and open the window
BLOCK = 1 << 18
PATIENCE = 10.0


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


def transfer_rate(server: socket.socket, client: socket.socket) -> float:
    """Bits a second that arrive at `server` (listening) from `client` (not connected yet)."""
    client.settimeout(PATIENCE)
    client.connect(server.getsockname())
    server.settimeout(PATIENCE)
    arriving, _ = server.accept()
    sender = threading.Thread(target=_send, args=(client,), daemon=True)
    sender.start()
    with arriving:
        arriving.settimeout(PATIENCE)
        _receive(arriving, WARM)
        size, seconds = _receive(arriving, TIMED)
    sender.join()
    return 8 * size / seconds


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
