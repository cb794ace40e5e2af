"""Seconds of a step, and their parts, for one way of exchanging."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from gradwire.accumulate.schedule import entries
from gradwire.compress import METHODS
from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.plan import powersgd
from gradwire.plan.machine import Machine
from gradwire.plan.network import Network
from gradwire.plan.powersgd import rank_of
from gradwire.plan.work import Task, Work, work
from gradwire.plan.workload import BACKWARD, Part, Workload

PARTS = ("compute", "compress", "encode", "exchange", "decode", "hidden")
AGREE = 24
"""Bytes of the round in which Gloo's ranks compare what they are about to send."""


@dataclass(frozen=True)
class Way:
    """One way of exchanging gradients; without an exchange it is PyTorch's own, powersgd-4 say."""

    method: str
    exchange: str
    values: str = "fp32"
    indices: str = "int32"
    density: float = 1.0

    @property
    def name(self) -> str:
        if not self.exchange:
            return self.method
        return self.exchange if self.method == "dense" else f"{self.method}/{self.exchange}"

    @property
    def encoding(self) -> Encoding:
        common = METHODS[self.method].bind({}).is_common
        return Encoding(self.values, "common" if common else self.indices)

    @property
    def travels(self) -> str:
        """How entries travel, in a word."""
        if self.method == "dense" or not self.exchange:
            return EXCHANGES[self.exchange].whole if self.exchange else "fp32"
        return f"{self.values}+{self.encoding.indices}"


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and of what: step = compute + compress + encode + exchange + decode -
    hidden. `bytes` leave one worker in a step, in `bundles` exchanges of up to `bundle_mb`."""

    way: Way
    seconds: float
    compute: float
    compress: float
    encode: float
    exchange: float
    decode: float
    hidden: float
    bytes: float
    bundles: int
    bundle_mb: float

    @property
    def exposed(self) -> float:
        """What the step takes more than computing alone."""
        return self.seconds - self.compute

    def asdict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        way = asdict(self.way) | {"encoding": self.way.travels}
        parts = {part: getattr(self, part) for part in PARTS}
        rest = {"bytes": self.bytes, "bundles": self.bundles, "bundle_mb": self.bundle_mb}
        efficiency = self.compute / self.seconds if self.seconds else 1.0
        return way | {"seconds": self.seconds, "efficiency": efficiency, "parts": parts} | rest


def predict(
    way: Way,
    load: Workload,
    device: Machine,
    network: Network,
    bundle_mb: float = 25.0,
    own: Work | None = None,
) -> Prediction:
    """The step with bundles of `bundle_mb`.

    Bundles go one after another, each when its gradients are there: compress, exchange, decode. The
    network works beside the backward pass; what the worker does itself takes the device from it,
    unless it has a core of its own. `own`: that work as it was measured, in place of the tables'.
    """
    parts = load.bundles(bundle_mb)
    costs = [_cost_of(way, part, device, network) for part in parts]
    works, nets, sent = zip(*costs, strict=True)
    if own is not None:
        works = tuple(own.part(part.size / sum(p.size for p in parts)) for part in parts)
    end = _schedule(load.seconds, [part.share for part in parts], works, nets, device.beside)
    sums = [sum(getattr(w, part) for w in works) for part in ("compress", "encode", "decode")]
    hidden = load.seconds + sum(sums) + sum(nets) - end
    return Prediction(
        way, end, load.seconds, sums[0], sums[1], sum(nets), sums[2], hidden, sum(sent), len(parts),
        bundle_mb,
    )  # fmt: skip


def _cost_of(way: Way, part: Part, device: Machine, network: Network) -> tuple[Work, float, float]:
    rank = rank_of(way.method)
    if not rank:
        return _cost(way, part.entries, part.size, device, network)
    found = powersgd.legs(part.shapes, rank, network)
    net = sum(map(network.seconds, found))
    return powersgd.work(part.shapes, rank, device), net, float(sum(leg.bytes for leg in found))


@lru_cache(maxsize=1 << 16)
def _cost(
    way: Way, real: int, size: int, device: Machine, network: Network
) -> tuple[Work, float, float]:
    """Of one bundle: local work, seconds on the network, and bytes that leave a rank."""
    task = _task(way, real, size, network)
    exchange = EXCHANGES[task.exchange]
    found = exchange.legs_on(network, task.size, task.k, task.encoding)
    if device.costs.agrees and found:
        found = [network.ring(AGREE * (network.workers - 1), network.workers - 1), *found]
    net = sum(map(network.seconds, found))
    return work(task, device, network), net, float(sum(leg.bytes for leg in found))


def _task(way: Way, real: int, size: int, network: Network) -> Task:
    if way.method == "dense":
        return Task("dense", way.exchange, way.encoding, size, size)
    k = entries(way.density, real)
    cost, dense = EXCHANGES[way.exchange].bytes, EXCHANGES["dense"].bytes
    method = METHODS[way.method]
    room = method.bind({}).capacity(k, size, network.workers)
    options = {"local": network.local} if EXCHANGES[way.exchange].has_nodes else {}
    sent = cost(network.workers, size, room, way.encoding, **options)
    if sent > dense(network.workers, size, k, way.encoding):
        # gradwire sends the bundle whole there, and says so.
        return Task("dense", "dense", way.encoding, size, size)
    return Task(way.method, way.exchange, way.encoding, size, room)


def _schedule(
    seconds: float,
    shares: Sequence[float],
    works: Sequence[Work],
    nets: Sequence[float],
    beside: bool,
) -> float:
    """When the step ends."""
    device, free = (1 - BACKWARD) * seconds, 0.0
    for share, own, net in zip(shares, works, nets, strict=True):
        device += BACKWARD * seconds * share
        free = max(device, free) + own.total + net
        device += 0.0 if beside else own.total
    return max(device, free)
