"""Mailbox: what ranks compare, and a small message behind it, straight to every rank over Gloo.

Receives are posted before anything is sent. Gloo then writes a message as it is sent. Otherwise
sender and receiver first tell each other, which wakes threads three times in place of once.
"""

import os
import sys
import weakref

import numpy as np
import torch
import torch.distributed as dist

from gradwire.ranks.group import ROW
from gradwire.torch_internals import backend_of

_TAG = 0x6D61
_MEMORY, _ROOM = 1 << 20, 1 << 17
"""Bytes for all receives of a rank, and for the message of one rank at most."""

_mailboxes: "weakref.WeakKeyDictionary[dist.ProcessGroup, Mailbox]" = weakref.WeakKeyDictionary()
"""A mailbox stays with its communicator, whose next user goes on with the posted receives."""


class Mailbox:
    """Posted receives from all other ranks, each for a row and a message behind it.

    Every operation sends one row to every rank and takes one from every rank. A message may be
    shorter than its receive, so ranks that differ read why instead of ending.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.room = min(_ROOM, _MEMORY // size)
        """The longest message that fits behind a row."""
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._places = {
            peer: torch.empty(ROW + self.room, dtype=torch.uint8) for peer in self._peers
        }
        self._out = torch.empty(ROW + self.room, dtype=torch.uint8)
        # numpy takes a third of torch's time to copy a few bytes.
        self._bytes_in = {peer: place.numpy() for peer, place in self._places.items()}
        self._bytes_out = self._out.numpy()
        self._row = b""
        self._receives: list[dist.Work | None] = []
        self._sends: list[dist.Work | None] = []
        self._failure: RuntimeError | None = None

    def post(self, group: dist.ProcessGroup) -> None:
        """Post a receive from every rank, once what the last ones brought has been read.

        A failure is raised by the next `send`. A rank that has left after the last step may be the
        reason, and nobody misses it.
        """
        try:
            self._receives = [
                dist.irecv(self._places[peer], group=group, group_src=peer, tag=_TAG)
                for peer in self._peers
            ]
        except RuntimeError as error:
            self._failure = error

    def send(self, row: bytes, message: np.ndarray | None, *, group: dist.ProcessGroup) -> None:
        """Send this rank's row, and a message of at most `room` bytes, to every rank."""
        if self._failure is not None:
            raise self._failure
        self._row, end = row, ROW
        self._bytes_out[:ROW] = np.frombuffer(row, np.uint8)
        if message is not None:
            end += message.nbytes
            self._bytes_out[ROW:end] = message
        frame = self._out[:end]
        self._sends = [
            dist.isend(frame, group=group, group_dst=peer, tag=_TAG) for peer in self._peers
        ]

    def receive(self, *, group: dist.ProcessGroup) -> list[bytes]:
        """Return every rank's row, in rank order. `message` then holds until `post`."""
        for work in (*self._receives, *self._sends):
            if work is not None:
                work.wait()
        rows = [self._bytes_in[peer][:ROW].tobytes() for peer in self._peers]
        rows.insert(self._rank, self._row)
        return rows

    def message(self, rank: int, nbytes: int) -> np.ndarray:
        """Return the message of a rank whose row is equal to this rank's: uint8."""
        return self._bytes_in[rank][ROW : ROW + nbytes]


def mailbox_of(group: dist.ProcessGroup, rank: int, size: int) -> Mailbox | None:
    """Return the mailbox of a communicator of our own; None if its backend cannot have one."""
    if size == 1 or not _takes_shorter_messages(group):
        return None
    mailbox = _mailboxes.get(group)
    if mailbox is None:
        mailbox = _mailboxes[group] = Mailbox(rank, size)
        mailbox.post(group)
    return mailbox


def _takes_shorter_messages(group: dist.ProcessGroup) -> bool:
    """Return True for Gloo over TCP, whose receives take any message that fits.

    With libuv, on macOS and Windows, a receive waits for all the bytes that it has room for.
    """
    kind = getattr(dist, "ProcessGroupGloo", None)
    over_tcp = os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP") == "TCP"
    is_gloo = kind is not None and isinstance(backend_of(group, torch.device("cpu")), kind)
    return is_gloo and over_tcp and sys.platform == "linux"
