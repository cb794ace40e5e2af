"""Ranks on this machine's own loopback: no namespaces, no shaping, no root."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.errors import ConfigError


class Loopback:
    """As a Lab to whoever starts ranks; the network is this machine's."""

    interface = "lo"

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ConfigError(f"ranks must be at least 1, got {ranks}")
        self.ranks = ranks
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port: int = server.getsockname()[1]

    def address(self, rank: int) -> str:
        return "127.0.0.1"

    @contextmanager
    def inside(self, rank: int) -> Iterator[None]:
        """Nothing to enter."""
        yield
