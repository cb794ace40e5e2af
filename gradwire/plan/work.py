"""What a worker does itself for one bundle, in seconds: everything but the network."""

from dataclasses import dataclass

from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.exchange.exchange import LocalTask, Received
from gradwire.plan.machine import Machine
from gradwire.plan.network import Network


@dataclass(frozen=True)
class Work:
    """Seconds of accumulate + compress, encode and decode."""

    compress: float
    encode: float
    decode: float

    def part(self, share: float) -> "Work":
        """So much of it."""
        return Work(share * self.compress, share * self.encode, share * self.decode)

    @property
    def total(self) -> float:
        return self.compress + self.encode + self.decode


@dataclass(frozen=True)
class Task:
    """One bundle: `k` of `size` entries by `method`, `exchange` and `encoding`."""

    method: str
    exchange: str
    encoding: Encoding
    size: int
    k: int

    @property
    def density(self) -> float:
        return self.k / self.size


def work(task: Task, device: Machine, network: Network) -> Work:
    """The bundle's local work.

    The mean is written once and copied into DDP's bucket: 12 bytes an entry, a pass of the floor.
    That of an all-gather may go there at once. Whole vectors, as dense exchanges and sketches
    handle them, take a pass for every 12 bytes.
    """
    exchange, costs = EXCHANGES[task.exchange], device.costs
    floor, packed = device.floor(task.size), _packed(task.encoding)
    copies = floor * costs.fill if exchange.fills else floor
    if exchange.whole:
        # What is rounded is passed over twice.
        passes = 1 if exchange.whole == "fp32" else 2
        return Work(floor + device.bundle, passes * floor, copies + passes * floor)
    ranks = network.workers
    got = Received(ranks, network.nodes, task.k, costs.decode[packed], costs.add, costs.merge)
    reading = exchange.received or _one_by_one
    usual = Work(
        device.select(task.method, task.density, task.size) + device.bundle,
        device.scaled(costs.encode[packed] * task.k),
        copies + device.scaled(reading(got)),
    )
    if exchange.work is None:
        return usual
    local = LocalTask(
        task.size, task.k, ranks, network.local, device.bundle, floor, copies,
        lambda density, entries: device.select("topk", density, entries),
        device.scaled(costs.sketch), costs.merging,
    )  # fmt: skip
    return exchange.work(usual, local)


def _one_by_one(got: Received) -> float:
    """Every rank's entries, read and added."""
    return got.ranks * got.k * (got.read + got.add)


def _packed(encoding: Encoding) -> bool:
    return encoding.indices not in ("int32", "common")
