"""The planner: from a workload, a device and a network to predictions and a recommendation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradwire.config import check_density
from gradwire.errors import ConfigError
from gradwire.plan.accuracy import assumption
from gradwire.plan.machine import Machine
from gradwire.plan.memory import memory_bytes
from gradwire.plan.network import Network, show_link
from gradwire.plan.predict import Prediction, Way, predict
from gradwire.plan.recommend import Recommendation, SecondsAt, recommend
from gradwire.plan.show import show_seconds
from gradwire.plan.ways import DENSITIES, ENCODINGS, all_ways
from gradwire.plan.workload import Workload

_BUNDLES = (25.0, 50.0, 100.0, 200.0, 400.0, 1600.0, 8000.0)
"""The bundle sizes that are tried, in MB of fp32."""
_MOST_BUNDLES = 64
"""The number of bundles in a step beyond which a size is not tried, unless all sizes have more."""
_SAME = 1.01
"""Times within this factor of the fastest count as equal."""


@dataclass(frozen=True)
class Question:
    """Ways of gradwire to compare, and the bounds of the choice; see `plan`."""

    methods: Sequence[str] = ()
    density: float | Sequence[float] = ()
    min_density: float = 0.001
    bundle_mb: float | None = None
    encodings: Sequence[tuple[str, str]] = ENCODINGS

    @property
    def is_open(self) -> bool:
        """True: neither methods nor densities are given, so that recipes may answer too."""
        return not self.methods and self.density in ((), [])

    def checked(self) -> tuple[list[float], float, float | None]:
        """Return the densities, the lowest one that may be recommended, and the bundle size."""
        given = [self.density] if isinstance(self.density, int | float) else list(self.density)
        densities = [check_density(d) for d in given] or list(DENSITIES)
        least = check_density(self.min_density, "min_density")
        if max(densities) < least:
            raise ConfigError(
                f"density {max(densities):g} is below min_density {least:g}: lower that"
            )
        if self.bundle_mb is not None and not self.bundle_mb > 0:
            raise ConfigError(f"bundle_mb must be a number above 0, got {self.bundle_mb!r}")
        return densities, least, self.bundle_mb


@dataclass(frozen=True)
class ExchangePlan:
    """The question, every prediction (the fastest first), and the recommendation."""

    load: Workload
    device: Machine
    network: Network
    predictions: list[Prediction]
    recommendation: Recommendation
    notes: list[str]
    sizes: list[float]
    """The bundle sizes that were tried, in MB."""

    def seconds_at(self, prediction: Prediction, rate: float) -> float:
        """Return the seconds of the same way on links of another rate."""
        return _seconds_at(self.load, self.device, self.network, self.sizes)(prediction, rate)

    def memory(self, prediction: Prediction) -> float:
        """Return the bytes per parameter that the way keeps, above the optimiser's."""
        return memory_bytes(prediction.way, self.network)

    def asdict(self) -> dict[str, Any]:
        """Return one object for JSON."""
        return {
            "asked": {
                "model": self.load.name,
                "parameters": self.load.entries,
                "workers": self.network.workers,
                "nodes": self.network.nodes,
                "link": show_link(self.network.rate),
                "latency": self.network.latency,
                "inner_link": show_link(self.network.local_rate),
                "gpu": self.device.name,
                "step_seconds": self.load.seconds,
                "optimizer": self.load.optimizer,
            },
            "recommendation": self.recommendation.asdict(),
            "predictions": [
                p.asdict() | {"memory_per_parameter": self.memory(p)} for p in self.predictions
            ],
            "notes": self.notes,
        }


def plan_for(
    load: Workload,
    device: Machine,
    network: Network,
    question: Question,
    others: Sequence[Way] = (),
    recipe: str = "",
) -> ExchangePlan:
    """Return the plan for a known workload, device and network.

    others: ways beside gradwire's own for gradients. recipe: the only one of these that may be
    recommended.
    """
    densities, least, bundle_mb = question.checked()
    sizes = _bundle_sizes(load) if bundle_mb is None else [float(bundle_mb)]
    methods = ["dense"] if recipe else question.methods
    ways = [*others, *all_ways(network, densities, methods, question.encodings)]
    predictions = sorted(
        (_predict_best(w, load, device, network, sizes) for w in ways), key=lambda p: p.seconds
    )
    seconds_at = _seconds_at(load, device, network, sizes)
    recommendation = recommend(load, predictions, seconds_at, least, recipe)
    return ExchangePlan(
        load, device, network, predictions, recommendation, _notes(load, device, predictions), sizes
    )


def _predict_best(
    way: Way, load: Workload, device: Machine, network: Network, sizes: Sequence[float]
) -> Prediction:
    """Return the prediction with the fastest bundle size; of equally fast sizes, the smallest."""
    tried = [predict(way, load, device, network, size) for size in sizes]
    fastest = min(p.seconds for p in tried)
    return next(p for p in tried if p.seconds <= _SAME * fastest)


def _seconds_at(
    load: Workload, device: Machine, network: Network, sizes: Sequence[float]
) -> SecondsAt:
    def seconds_at(p: Prediction, rate: float) -> float:
        return _predict_best(p.way, load, device, replace(network, rate=rate), sizes).seconds

    return seconds_at


def _bundle_sizes(load: Workload) -> list[float]:
    """Return the sizes to try; the list ends with the first size that holds everything."""
    counts = [(size, len(load.bundles(size))) for size in _BUNDLES]
    few = [(size, n) for size, n in counts if n <= _MOST_BUNDLES] or counts[-1:]
    whole = next((i for i, (_, n) in enumerate(few) if n == 1), len(few) - 1)
    return [size for size, _ in few[: whole + 1]]


def _notes(load: Workload, device: Machine, predictions: Sequence[Prediction]) -> list[str]:
    notes = []
    if not load.measured:
        work = f" ({load.work})" if load.work else ""
        notes.append(
            f"computing is guessed from FLOP, {show_seconds(load.seconds)} per step{work} on "
            f"{device.name}; it can be off by a factor of two or more: give the step seconds you "
            f"measured"
        )
    if load.is_assumed:
        notes.append(assumption(load))
    if any(p.way.method.startswith("powersgd") for p in predictions):
        notes.append(
            "PowerSGD is shown and never recommended: what it does to the loss was not measured"
        )
    if any(p.way.every > 1 for p in predictions):
        notes.append(
            "local steps and FSDP are counted from bytes, passes over memory and FLOP, and were "
            "not measured on a GPU"
        )
        if not load.knows_shapes:
            notes.append("Muon's own products are left out, for a number tells no shapes")
    notes.append(
        "memory is the bytes per parameter that a worker keeps for the exchange, beside the model "
        "and the optimiser; all-reduces are NCCL's best, which add up inside nodes first"
    )
    return notes
