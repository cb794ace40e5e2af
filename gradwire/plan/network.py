"""The links between workers, and what the legs of an exchange take on them."""

import math
from dataclasses import dataclass

from gradwire.errors import ConfigError
from gradwire.plan.rate import UNITS, parse_rate, show_rate

GOODPUT = 0.956
"""What TCP delivers of a link's rate; the rest is headers. Measured in the lab."""
LATENCY = 50e-6
LOCAL_RATE, LOCAL_LATENCY = 200e9, 10e-6
"""Inside a node, bits a second and seconds: PCIe, as it is without NVLink."""
FASTEST = 3200 * UNITS["g"]


@dataclass(frozen=True)
class Leg:
    """A collective or a round of one: `bytes` leave each rank, which waits `rounds` times.

    `share`: how many times these bytes go through the link of a node, or of a rank where each is
    a node of its own; 0 where they stay inside the node.
    """

    bytes: float
    rounds: int
    share: float = 1.0


@dataclass(frozen=True)
class Network:
    """`workers` ranks in `nodes` nodes. Rates are payload bytes a second, one way of a link.

    A node has one link, `rate`, whatever the number of its ranks; inside it every rank has
    `local_rate`.
    """

    workers: int
    nodes: int
    rate: float
    latency: float = LATENCY
    local_rate: float = LOCAL_RATE / 8
    local_latency: float = LOCAL_LATENCY

    def __post_init__(self) -> None:
        _check_count("workers", self.workers)
        _check_count("nodes", self.nodes)
        if self.workers % self.nodes:
            fits = [n for n in range(1, self.workers + 1) if self.workers % n == 0]
            near = sorted(fits, key=lambda n: abs(n - self.nodes))[:2]
            raise ConfigError(
                f"nodes must divide workers: {self.workers} workers cannot be spread over "
                f"{self.nodes} nodes; use {' or '.join(map(str, sorted(near)))}"
            )
        for name in ("rate", "local_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")

    @property
    def local(self) -> int:
        """Ranks of one node."""
        return self.workers // self.nodes

    def seconds(self, leg: Leg) -> float:
        """rounds x latency + bytes / rate, on the slower kind of link that the leg uses."""
        inside = leg.rounds * self.local_latency + leg.bytes / self.local_rate
        if not leg.share or self.nodes == 1:
            return inside
        return max(inside, leg.rounds * self.latency + leg.bytes * leg.share / self.rate)

    def ring(self, size: float, rounds: int) -> Leg:
        """Around all ranks, node by node: each node's link carries what one rank sends."""
        return Leg(size, rounds)

    def everyone(self, size: float, rounds: int) -> Leg:
        """From each rank to each other: a node's link carries what its ranks send outside."""
        others = max(1, self.workers - 1)
        return Leg(size, rounds, self.local * (self.workers - self.local) / others)

    def pairs(self, size: float, distance: int) -> Leg:
        """With the rank `distance` away: inside the node, or all ranks of it at once outside."""
        return Leg(size, 1, self.local if distance >= self.local else 0.0)

    def inside(self, size: float, rounds: int) -> Leg:
        """Between the ranks of a node only."""
        return Leg(size, rounds, 0.0)

    def across(self, size: float, rounds: int) -> Leg:
        """Between ranks that have the same place in their nodes: all of a node at once."""
        return Leg(size, rounds, self.local)


def link_rate(link: str | float) -> float:
    """Payload bytes a second of `10gbit`, or of a number of bits a second."""
    if isinstance(link, str):
        return GOODPUT * parse_rate(link, FASTEST) / 8
    if isinstance(link, bool) or not 0 < link < math.inf:
        raise ConfigError(f"link must be bits a second above 0, or text such as 1gbit; got {link}")
    return GOODPUT * link / 8


def show_link(rate: float) -> str:
    """The link that gives so many payload bytes a second."""
    return show_rate(8 * rate / GOODPUT)


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
