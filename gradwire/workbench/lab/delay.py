"""A switch that keeps every frame for a while: latency, on kernels without netem too.

It stands where the bridge does otherwise, between the ports of one namespace. Rates are still the
kernel's: a frame that leaves goes through the port's own token bucket.
"""

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

EVERY_FRAME = 0x0003  # ETH_P_ALL
SOL_PACKET, VNET_HEADER = 263, 15
RECEIVE_BUFFER = 33  # SO_RCVBUFFORCE
HEADER = 10
"""Bytes that the kernel puts before a frame: checksums and segments that are still to be made. They
go out with it, so that frames stay large and cheap."""
LARGEST = 1 << 17
ROOM = 1 << 25
PATIENCE = 0.2

Frame = tuple[float, socket.socket, bytes]


class Delay(threading.Thread):
    """Passes frames on between `ports` of this thread's namespace, `seconds` after they came."""

    def __init__(self, ports: Sequence[str], seconds: float) -> None:
        super().__init__(daemon=True, name="gradwire-delay")
        self._seconds = seconds
        self._ports: list[socket.socket] = []
        self._homes: dict[bytes, socket.socket] = {}
        self._queue: deque[Frame] = deque()
        self._over = False
        try:
            for port in ports:
                self._ports.append(_open(port))
        except OSError:
            self.close()
            raise

    def run(self) -> None:
        while not self._over:
            wait = self._queue[0][0] - time.monotonic() if self._queue else PATIENCE
            ready, _, _ = select.select(self._ports, [], [], min(max(wait, 0.0), PATIENCE))
            for port in ready:
                self._take(port)
            self._pass_on()

    def close(self) -> None:
        """Ends it; what it still holds is lost."""
        self._over = True
        if self.is_alive():
            self.join()
        for port in self._ports:
            port.close()

    def _take(self, port: socket.socket) -> None:
        """Everything that waits at `port` gets a time to leave, and a port."""
        with suppress(OSError):  # nothing more, or the cable was pulled
            while True:
                frame = port.recv(LARGEST)
                due = time.monotonic() + self._seconds
                to, source = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
                self._homes[source] = port
                home = self._homes.get(to)
                others = [home] if home else [p for p in self._ports if p is not port]
                self._queue.extend((due, other, frame) for other in others)

    def _pass_on(self) -> None:
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, port, frame = self._queue.popleft()
            with suppress(OSError):  # a full queue drops a frame, as a switch does
                port.send(frame)


def _open(port: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_FRAME))
    opened.setsockopt(SOL_PACKET, VNET_HEADER, 1)
    opened.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER, ROOM)
    opened.bind((port, EVERY_FRAME))
    opened.setblocking(False)
    return opened
