"""Local work of a worker for one bundle, in seconds: everything but the network."""

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
        """Return this share of the work."""
        return Work(share * self.compress, share * self.encode, share * self.decode)

    @property
    def total(self) -> float:
        """The seconds of all three."""
        return self.compress + self.encode + self.decode


@dataclass(frozen=True)
class BundleTask:
    """Bundle to exchange: `k` of `size` entries by `method`, `exchange` and `encoding`."""

    method: str
    exchange: str
    encoding: Encoding
    size: int
    k: int

    @property
    def density(self) -> float:
        """The share of the entries that is sent."""
        return self.k / self.size


def bundle_work(task: BundleTask, device: Machine, network: Network) -> Work:
    """Return the local work of a bundle.

    The mean is written once and copied into DDP's bucket: 12 bytes per entry, a pass of the floor.
    An all-gather may write the mean there at once. Dense exchanges and sketches handle whole
    vectors. A whole vector takes a pass for every 12 bytes.
    """
    exchange, costs = EXCHANGES[task.exchange], device.costs
    floor, packed = device.floor(task.size), _is_packed(task.encoding)
    copies = floor * costs.fill if exchange.fills else floor
    if exchange.whole:
        # Rounding needs a second pass.
        passes = 1 if exchange.whole == "fp32" else 2
        return Work(floor + device.bundle, passes * floor, copies + passes * floor)
    ranks = network.workers
    write, read = costs.extra.get(task.encoding.values, (0.0, 0.0))
    write, read = write + costs.encode[packed], read + costs.decode[packed]
    arriving = Received(ranks, network.nodes, task.k, read, costs.add, costs.merge)
    reading = exchange.received or _read_one_by_one
    usual = Work(
        device.select(task.method, task.density, task.size) + device.bundle,
        device.scaled_seconds(write * task.k),
        copies + device.scaled_seconds(reading(arriving)),
    )
    if exchange.work is None:
        return usual
    local = LocalTask(
        task.size, task.k, ranks, network.local, device.bundle, floor, copies,
        lambda density, entries: device.select("topk", density, entries),
        device.scaled_seconds(costs.sketch), costs.merging,
    )  # fmt: skip
    return exchange.work(usual, local)


def _read_one_by_one(received: Received) -> float:
    """Return the nanoseconds if every rank's entries are read and added."""
    return received.ranks * received.k * (received.read + received.add)


def _is_packed(encoding: Encoding) -> bool:
    return encoding.indices not in ("int32", "common")
