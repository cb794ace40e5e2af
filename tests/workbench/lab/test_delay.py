"""The switch that adds latency, on sockets that need no root."""

import select
import socket
import time

import pytest

from gradwire.workbench.lab import delay
from gradwire.workbench.lab.delay import HEADER, DelaySwitch

EVERYONE = b"\xff" * 6
A, B = b"\x02aaaaa", b"\x02bbbbb"


@pytest.fixture
def cables(monkeypatch):
    """Three cables: the far ends, while the switch has the near ones."""
    pairs = {
        name: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for name in ("p0", "p1", "p2")
    }
    for near, far in pairs.values():
        near.setblocking(False)
        far.settimeout(2.0)
    monkeypatch.setattr(delay, "_open", lambda name: pairs[name][0])
    switch = DelaySwitch(list(pairs), 0.05)
    switch.start()
    yield [far for _, far in pairs.values()]
    switch.close()
    assert not switch.is_alive()
    for _, far in pairs.values():
        far.close()


def frame(to, source, text=b"hello"):
    return bytes(HEADER) + to + source + b"\x08\x00" + text


def test_frames_are_late_and_find_their_way(cables):
    one, two, three = cables
    begin = time.monotonic()
    one.send(frame(EVERYONE, A))
    assert two.recv(100) == three.recv(100) == frame(EVERYONE, A)
    assert 0.05 <= time.monotonic() - begin < 1.0
    two.send(frame(A, B))
    two.send(frame(A, B, b"second"))
    assert [one.recv(100), one.recv(100)] == [frame(A, B), frame(A, B, b"second")]
    # It has learned where A is: nobody else hears of it.
    assert select.select([two, three], [], [], 0.1)[0] == []


def test_a_port_that_is_full_loses_frames_and_nothing_else(cables):
    one, two, three = cables
    two.close()
    one.send(frame(EVERYONE, A))
    assert three.recv(100) == frame(EVERYONE, A)
