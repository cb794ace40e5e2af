"""The networks that ranks can be started on: the protocol, and this machine's loopback.

A Lab is the other network: it has slow links, and needs root.
"""

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from gradwire.errors import ConfigError


class RankNetwork(Protocol):
    """The network of ranks that are started on this machine: a Lab or a Loopback."""

    ranks: int
    interface: str
    port: int

    def address(self, rank: int) -> str:
        """Return the IP address of a rank."""
        ...

    def inside(self, rank: int) -> AbstractContextManager[None]:
        """Put this thread on the rank's network, for this context."""
        ...


class Loopback:
    """Ranks on this machine's loopback: no namespaces, no shaping, no root."""

    interface = "lo"

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ConfigError(f"ranks must be at least 1, got {ranks}")
        self.ranks = ranks
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port: int = server.getsockname()[1]

    def address(self, rank: int) -> str:
        """Return the address that all ranks share."""
        return "127.0.0.1"

    @contextmanager
    def inside(self, rank: int) -> Iterator[None]:
        """Do nothing: every thread is on this network."""
        yield
