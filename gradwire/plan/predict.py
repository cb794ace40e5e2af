"""Prediction of the seconds of a step, and of their parts, for one way of exchanging."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from gradwire.accumulate.schedule import entry_count
from gradwire.compress import METHODS
from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.plan.machine import Machine
from gradwire.plan.network import Leg, Network
from gradwire.plan.outside import find_outside
from gradwire.plan.rounds import OUTER_PASSES, muon_seconds
from gradwire.plan.schedule import step_end
from gradwire.plan.work import BundleTask, Work, bundle_work
from gradwire.plan.workload import PlannedBundle, Workload, by_count

PARTS = ("compute", "compress", "encode", "exchange", "decode", "hidden")
_LOCAL_PARTS = ("compress", "encode", "decode")
_AGREE = 24
"""The bytes of the round in which Gloo's ranks compare the next message's name and size."""


@dataclass(frozen=True)
class Way:
    """Way of exchanging gradients. Without an exchange it is PyTorch's: powersgd-4, for example.

    recipe: the recipe that these settings are, if they are one.
    every: the inner steps between exchanges; 1 for gradients at every step.
    islands: True if the ranks of a node hold one copy of the model, sharded by FSDP2.
    """

    method: str
    exchange: str
    values: str = "fp32"
    indices: str = "int32"
    density: float = 1.0
    recipe: str = ""
    every: int = 1
    islands: bool = False

    @property
    def name(self) -> str:
        """The name by which `methods` takes it, and the recipe's name for a recipe."""
        if self.recipe:
            owner = "/owner" if self.exchange == "owner" else ""
            return self.recipe + owner + (", islands" if self.islands else "")
        if not self.exchange:
            return self.method
        return self.exchange if self.method == "dense" else f"{self.method}/{self.exchange}"

    @property
    def label(self) -> str:
        """The name for people."""
        outside = find_outside(self.method)
        if outside is not None:
            return outside.label
        if self.every > 1:
            return f"{self.name}, every {self.every} steps"
        if self.recipe:
            return f"{self.name} (recipe)"
        return f"{self.name} (gradwire)" if self.method == "dense" else self.name

    @property
    def sends_all(self) -> bool:
        """True: nothing is left out, and the loss is that of training without compression."""
        outside = find_outside(self.method)
        return self.method == "dense" if outside is None else not outside.rank

    @property
    def encoding(self) -> Encoding:
        common = METHODS[self.method].bind({}).is_common
        return Encoding(self.values, "common" if common else self.indices)

    @property
    def encoding_name(self) -> str:
        """The encoding of the entries, in a word."""
        outside = find_outside(self.method)
        if outside is not None:
            return outside.travels
        if self.method == "dense":
            return EXCHANGES[self.exchange].whole
        return f"{self.values}+{self.encoding.indices}"


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and their parts; with local steps the mean over whole rounds.

    seconds = compute + compress + encode + exchange + decode - hidden.
    bytes: the bytes that leave one worker in a step.
    bundles: the number of exchanges, of up to `bundle_mb` each.
    """

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
        """The seconds that the step takes beyond computing."""
        return self.seconds - self.compute

    def asdict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        way = asdict(self.way) | {"encoding": self.way.encoding_name}
        parts = {part: getattr(self, part) for part in PARTS}
        sizes: dict[str, Any] = {
            "bytes": self.bytes,
            "bundles": self.bundles,
            "bundle_mb": self.bundle_mb,
        }
        efficiency = self.compute / self.seconds if self.seconds else 1.0
        return way | {"seconds": self.seconds, "efficiency": efficiency, "parts": parts} | sizes


def predict(
    way: Way,
    load: Workload,
    device: Machine,
    network: Network,
    bundle_mb: float = 25.0,
    measured_work: Work | None = None,
) -> Prediction:
    """Return the prediction of a step with bundles of `bundle_mb`.

    Bundles go one after another, each when its gradients are there: compress, exchange, decode. The
    network works beside the backward pass. The worker's local work takes the device from the
    backward pass, unless the work has a core for itself.
    measured_work: the local work as measured, in place of the tables' work.
    """
    if way.islands:
        return _predict_islands(way, load, device, network, bundle_mb)
    bundles = load.bundles(bundle_mb)
    costs = [_bundle_cost(way, bundle, device, network) for bundle in bundles]
    if way.every > 1:
        return _predict_rounds(way, load, device, bundle_mb, costs)
    works, nets, sent = zip(*costs, strict=True)
    if measured_work is not None:
        works = tuple(
            measured_work.part(bundle.size / sum(p.size for p in bundles)) for bundle in bundles
        )
    ahead = [leg for bundle in bundles for leg in _forward_legs(way, bundle, network)]
    end = step_end(
        load.seconds, sum(map(network.seconds, ahead)), [bundle.share for bundle in bundles],
        works, nets, device.has_spare_core,
    )  # fmt: skip
    sums = [sum(getattr(w, part) for w in works) for part in _LOCAL_PARTS]
    exchange = sum(nets) + sum(map(network.seconds, ahead))
    return Prediction(
        way, end, load.seconds, sums[0], sums[1], exchange, sums[2],
        load.seconds + sum(sums) + exchange - end, sum(sent) + sum(leg.bytes for leg in ahead),
        len(bundles), bundle_mb,
    )  # fmt: skip


_BundleCost = tuple[Work, float, float]
"""Local work, seconds on the network, bytes that leave a rank."""


def _predict_rounds(
    way: Way, load: Workload, device: Machine, bundle_mb: float, costs: Sequence[_BundleCost]
) -> Prediction:
    """Return the mean step of a round: `every` steps alone, and one exchange that nothing hides.

    An optimiser other than Muon is replaced by Muon, whose products then come on top.
    """
    compute = load.seconds
    if load.optimizer != "muon":
        compute += muon_seconds(load.shapes, device)
    works, nets, sent = zip(*costs, strict=True)
    outer = OUTER_PASSES * device.floor(load.entries)
    compress, encode, decode = (
        sum(getattr(w, part) for w in works) / way.every for part in _LOCAL_PARTS
    )
    decode += outer / way.every
    net = sum(nets) / way.every
    total = compute + compress + encode + net + decode
    return Prediction(
        way, total, compute, compress, encode, net, decode, 0.0, sum(sent) / way.every,
        len(costs), bundle_mb,
    )  # fmt: skip


def _predict_islands(
    way: Way, load: Workload, device: Machine, network: Network, bundle_mb: float
) -> Prediction:
    """Return the mean step where FSDP2 shards the model inside each node.

    Every rank exchanges its shard with one rank of each other node, and the ranks of a node share
    its link. Muon's matrices are dealt out inside the node in bf16, and back, and every rank has
    its share of the products.
    """
    inside = predict(Way("fsdp-bf16", ""), load, device, network.inner, bundle_mb)
    part = by_count(max(1, load.entries // network.local), 0.0)
    part = replace(part, optimizer="muon")
    outer = predict(replace(way, islands=False), part, device, network.between, bundle_mb)
    others = network.local - 1
    dealt = network.inside(4 * load.entries * others / network.local**2, 2 * others)
    products = muon_seconds(load.shapes, device)
    compute = load.seconds + products / network.local
    if load.optimizer == "muon":
        compute -= products
    exchange = inside.exchange + outer.exchange + network.seconds(dealt)
    compress, decode = inside.compress + outer.compress, inside.decode + outer.decode
    total = compute + compress + outer.encode + exchange + decode - inside.hidden
    return Prediction(
        way, total, compute, compress, outer.encode, exchange, decode, inside.hidden,
        inside.bytes + outer.bytes + dealt.bytes, outer.bundles, bundle_mb,
    )  # fmt: skip


def _forward_legs(way: Way, bundle: PlannedBundle, network: Network) -> list[Leg]:
    """Return what a bundle sends beside the forward pass: only FSDP's parameters."""
    outside = find_outside(way.method)
    return outside.forward(bundle, network) if outside is not None and outside.forward else []


def _bundle_cost(way: Way, bundle: PlannedBundle, device: Machine, network: Network) -> _BundleCost:
    outside = find_outside(way.method)
    if outside is None:
        return _cost_by_size(way, bundle.entries, bundle.size, device, network)
    legs = outside.legs(bundle, network)
    net = sum(map(network.seconds, legs))
    return outside.work(bundle, device), net, float(sum(leg.bytes for leg in legs))


@lru_cache(maxsize=1 << 16)
def _cost_by_size(way: Way, real: int, size: int, device: Machine, network: Network) -> _BundleCost:
    """Return the same for an exchange of gradwire, which needs only the bundle's size."""
    task = _task_for(way, real, size, network)
    exchange = EXCHANGES[task.exchange]
    legs = exchange.legs_on(network, task.size, task.k, task.encoding)
    if device.costs.agrees and legs:
        legs = [network.ring(_AGREE * (network.workers - 1), network.workers - 1), *legs]
    net = sum(map(network.seconds, legs))
    return bundle_work(task, device, network), net, float(sum(leg.bytes for leg in legs))


def _task_for(way: Way, real: int, size: int, network: Network) -> BundleTask:
    """Return the task of one bundle; a bundle that costs more bytes compressed goes dense."""
    if way.method == "dense":
        return BundleTask("dense", way.exchange, way.encoding, size, size)
    k = entry_count(way.density, real)
    cost, dense = EXCHANGES[way.exchange].bytes, EXCHANGES["dense"].bytes
    method = METHODS[way.method]
    capacity = method.bind({}).capacity(k, size, network.workers)
    options = {"local": network.local} if EXCHANGES[way.exchange].has_nodes else {}
    sent = cost(network.workers, size, capacity, way.encoding, **options)
    if sent > dense(network.workers, size, k, way.encoding):
        # gradwire itself sends such a bundle whole, and counts it in the stats, by reason.
        return BundleTask("dense", "dense", way.encoding, size, size)
    return BundleTask(way.method, way.exchange, way.encoding, size, capacity)
