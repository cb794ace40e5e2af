"""Links between workers, and the seconds that the legs of an exchange take on them."""

import math
from dataclasses import dataclass

from gradwire.errors import ConfigError
from gradwire.plan.rate import UNITS, parse_rate, show_rate

GOODPUT = 0.956
"""The share of a link's rate that TCP delivers; the rest is headers. Measured in the lab."""
LATENCY = 50e-6
"""Seconds of latency between nodes, unless the user knows better."""
INNER_RATE, _INNER_LATENCY = 200e9, 10e-6
"""Bits per second and seconds of latency inside a node: PCIe, for nodes without NVLink."""
FASTEST = 20_000 * UNITS["g"]
"""The fastest link, in bits per second."""


@dataclass(frozen=True)
class Leg:
    """Collective, or round of one: `bytes` leave each rank, which waits `rounds` times.

    share: how many times these bytes go through the link of a node. If each rank is a node, the
    link is the rank's. 0: the bytes stay inside the node.
    crossing: how many of the rounds wait for another node; None for all of them.
    """

    bytes: float
    rounds: int
    share: float = 1.0
    crossing: int | None = None


@dataclass(frozen=True)
class Network:
    """Network of `workers` ranks in `nodes` nodes; rates are payload bytes per second, one way.

    A node has one link of `rate`, whatever the number of its ranks. Inside the node every rank has
    `local_rate`.
    """

    workers: int
    nodes: int
    rate: float
    latency: float = LATENCY
    local_rate: float = INNER_RATE / 8
    local_latency: float = _INNER_LATENCY

    def __post_init__(self) -> None:
        _check_count("workers", self.workers)
        _check_count("nodes", self.nodes)
        if self.workers % self.nodes:
            divisors = [n for n in range(1, self.workers + 1) if self.workers % n == 0]
            nearest = sorted(divisors, key=lambda n: abs(n - self.nodes))[:2]
            raise ConfigError(
                f"nodes must divide workers: {self.workers} workers cannot be spread over "
                f"{self.nodes} nodes; use {' or '.join(map(str, sorted(nearest)))}"
            )
        for name in ("rate", "local_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}")

    @property
    def local(self) -> int:
        """The ranks of one node."""
        return self.workers // self.nodes

    def seconds(self, leg: Leg) -> float:
        """Return rounds x latency + bytes / rate, on the slower kind of link that the leg uses."""
        inside = leg.rounds * self.local_latency + leg.bytes / self.local_rate
        if not leg.share or self.nodes == 1:
            return inside
        crossing = leg.rounds if leg.crossing is None else leg.crossing
        waiting = crossing * self.latency + (leg.rounds - crossing) * self.local_latency
        return max(inside, waiting + leg.bytes * leg.share / self.rate)

    def all_reduce(self, sent: float) -> Leg:
        """Return a leg for NCCL's sum over all ranks, of which each sends `sent` bytes.

        Among ranks with a link each it is a ring. Nodes of several ranks add up inside first, so
        that a node's link carries 2 (m - 1) / m of the vector, of m nodes, and not 2 (P - 1) / P.
        NCCL's trees come near that; its ring needs up to twice as much.
        """
        rounds, others = 2 * (self.workers - 1), self.workers - 1
        if self.local == 1 or self.nodes == 1:
            return self.ring(sent, rounds)
        share = (self.nodes - 1) * self.local / others
        return Leg(sent, rounds, share, 2 * (self.nodes - 1))

    def ring(self, size: float, rounds: int) -> Leg:
        """Return a leg around all ranks, node by node.

        Each node's link carries the bytes that one rank sends.
        """
        return Leg(size, rounds)

    def everyone(self, size: float, rounds: int) -> Leg:
        """Return a leg from each rank to each other.

        A node's link carries the bytes that its ranks send outside.
        """
        others = max(1, self.workers - 1)
        return Leg(size, rounds, self.local * (self.workers - self.local) / others)

    def pairs(self, size: float, distance: int) -> Leg:
        """Return a leg to the rank `distance` away.

        The leg stays inside the node, or all ranks of the node send outside at once.
        """
        return Leg(size, 1, self.local if distance >= self.local else 0.0)

    def inside(self, size: float, rounds: int) -> Leg:
        """Return a leg between the ranks of a node only."""
        return Leg(size, rounds, 0.0)

    def across(self, size: float, rounds: int) -> Leg:
        """Return a leg between ranks that have the same place in their nodes.

        All ranks of a node send at once.
        """
        return Leg(size, rounds, self.local)


def link_rate(link: str | float) -> float:
    """Return payload bytes per second of `10gbit`, or of a number of bits per second."""
    if isinstance(link, str):
        return GOODPUT * parse_rate(link, FASTEST) / 8
    if isinstance(link, bool) or not 0 < link < math.inf:
        raise ConfigError(f"link must be bits a second above 0, or text such as 1gbit; got {link}")
    return GOODPUT * link / 8


def show_link(rate: float) -> str:
    """Return the text for a link with this rate in payload bytes per second."""
    return show_rate(8 * rate / GOODPUT)


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
