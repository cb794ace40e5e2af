"""What a worker does itself for one bundle, in seconds: everything but the network."""

from dataclasses import dataclass

from gradwire.encode import Encoding
from gradwire.exchange.sketch_size import Table
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
    copies = device.floor(task.size)
    if task.exchange == "allgather":
        copies *= device.costs.fill
    if task.method == "dense":
        return _dense(task, device, copies)
    if task.exchange in ("sketched", "gs-sgd"):
        return _by_sketch(task, device, copies)
    compress = device.select(task.method, task.density, task.size)
    encode = device.scaled(device.costs.encode[_packed(task.encoding)] * task.k)
    decode = copies + device.scaled(_received(task, device, network))
    if task.exchange == "gtopk":
        decode += _merges(network.workers) * device.costs.merging
    if task.exchange == "hierarchical":
        # It adds up the node before it selects in its own part.
        compress = 2 * device.floor(task.size)
        compress += device.select("topk", task.density, task.size / network.local)
        encode /= network.local
    return Work(compress + device.bundle, encode, decode)


def _merges(ranks: int) -> int:
    """Rounds of a tree, and one before it for ranks that do not make a power of two."""
    return ranks.bit_length() - 1 + (ranks & (ranks - 1) > 0)


def _received(task: Task, device: Machine, network: Network) -> float:
    """Nanoseconds on the reference device for what comes in: read it, merge it, add it up."""
    costs, ranks, k = device.costs, network.workers, task.k
    read = costs.decode[_packed(task.encoding)]
    if task.exchange == "union":
        return ranks * k * (read + costs.merge + costs.add)
    if task.exchange == "gtopk":
        # Each merge adds, selects, encodes, and subtracts what it cut.
        return _merges(ranks) * 2 * k * (read + 10 * costs.merge) + k * costs.add
    if task.exchange == "oktopk":
        # Choices to their owners, sums back: about 1.5 k each, merged once each, and what is kept
        # of the own choices is found again.
        return 3 * k * (read + 18 * costs.merge) + k * costs.add
    if task.exchange == "hierarchical":
        return network.nodes * k * (read + costs.add)
    return ranks * k * (read + costs.add)


def _dense(task: Task, device: Machine, copies: float) -> Work:
    rounds = 2 if task.exchange == "dense-bf16" else 1
    floor = device.floor(task.size)
    return Work(floor + device.bundle, rounds * floor, copies + rounds * floor)


def _by_sketch(task: Task, device: Machine, copies: float) -> Work:
    """Every entry into every row, and out of every row again."""
    cells = device.scaled(device.costs.sketch * Table.rows * task.size)
    many = Table().many(task.size, task.k)
    chosen = device.select("topk", many / task.size, task.size)
    return Work(device.floor(task.size) + device.bundle + chosen + cells, cells, copies)


def _packed(encoding: Encoding) -> bool:
    return encoding.indices not in ("int32", "common")
