"""What whoever starts ranks has to know of the network they are on."""

from contextlib import AbstractContextManager
from typing import Protocol


class Network(Protocol):
    """Where ranks run: a Lab, or the loopback."""

    ranks: int
    interface: str
    port: int

    def address(self, rank: int) -> str: ...

    def inside(self, rank: int) -> AbstractContextManager[None]: ...
