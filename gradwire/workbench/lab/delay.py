"""A switch that holds every frame for a while, to add latency; the kernel needs no netem.

The switch takes the place of the bridge between the ports of one namespace. The kernel still limits
the rate, because each frame leaves through the token bucket of its port.
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
"""Bytes that the kernel puts before a frame, about checksums and segments that are not made yet.

The header is sent on with the frame, so frames stay large and cheap.
"""
LARGEST = 1 << 17
"""More bytes than any frame has."""
ROOM = 1 << 25
"""Bytes of a port's receive buffer."""
PATIENCE = 0.2
"""Seconds until `close` is noticed while no frame comes."""

Frame = tuple[float, socket.socket, bytes]
"""(time to leave, port to leave by, bytes)"""


class DelaySwitch(threading.Thread):
    """A thread that passes frames on between `ports`, `seconds` after their arrival.

    The ports are those of the namespace of the thread that makes this object.
    """

    def __init__(self, ports: Sequence[str], seconds: float) -> None:
        super().__init__(daemon=True, name="gradwire-delay")
        self._seconds = seconds
        self._ports: list[socket.socket] = []
        self._port_of: dict[bytes, socket.socket] = {}
        """The port behind which each address has been seen."""
        self._queue: deque[Frame] = deque()
        self._closed = False
        try:
            for port in ports:
                self._ports.append(_open(port))
        except OSError:
            self.close()
            raise

    def run(self) -> None:
        """Receive frames, and send each when it is due, until `close`."""
        while not self._closed:
            wait = self._queue[0][0] - time.monotonic() if self._queue else PATIENCE
            ready, _, _ = select.select(self._ports, [], [], min(max(wait, 0.0), PATIENCE))
            for port in ready:
                self._receive_frames(port)
            self._send_due()

    def close(self) -> None:
        """End the thread; frames that still wait are lost."""
        self._closed = True
        if self.is_alive():
            self.join()
        for port in self._ports:
            port.close()

    def _receive_frames(self, port: socket.socket) -> None:
        """Queue every frame that waits at `port`, with its time to leave and its ports."""
        with suppress(OSError):  # no more frames, or the link is down
            while True:
                frame = port.recv(LARGEST)
                due = time.monotonic() + self._seconds
                to, source = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
                self._port_of[source] = port
                known = self._port_of.get(to)
                # As a switch does: a frame to an unknown address leaves by every other port.
                targets = [known] if known else [p for p in self._ports if p is not port]
                self._queue.extend((due, target, frame) for target in targets)

    def _send_due(self) -> None:
        """Send every frame that is due."""
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, port, frame = self._queue.popleft()
            with suppress(OSError):  # a full queue drops a frame, as a switch does
                port.send(frame)


def _open(port: str) -> socket.socket:
    """Return a raw socket of all frames at `port`, that does not block."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_FRAME))
    opened.setsockopt(SOL_PACKET, VNET_HEADER, 1)
    opened.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER, ROOM)
    opened.bind((port, EVERY_FRAME))
    opened.setblocking(False)
    return opened
