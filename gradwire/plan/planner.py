"""The planner: from a model, workers and links to predictions and a recommendation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from gradwire.config import check_density
from gradwire.errors import ConfigError
from gradwire.plan.machine import Machine, find_machine
from gradwire.plan.network import LATENCY, LOCAL_RATE, Network, link_rate, show_link
from gradwire.plan.predict import Prediction, Way, predict
from gradwire.plan.rate import parse_time
from gradwire.plan.recommend import Recommendation, SecondsAt, recommend
from gradwire.plan.ways import DENSITIES, ENCODINGS, all_ways
from gradwire.plan.workload import Workload, by_count, by_file, by_shapes

_BUNDLES = (25.0, 50.0, 100.0, 200.0, 400.0, 1600.0, 8000.0)
"""The bundle sizes that are tried, in MB of fp32."""
_MOST_BUNDLES = 64
"""The number of bundles in a step beyond which a size is not tried, unless all sizes have more."""
_SAME = 1.01
"""Times within this factor of the fastest count as equal."""


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
                "gpu": self.device.name,
                "step_seconds": self.load.seconds,
            },
            "recommendation": self.recommendation.asdict(),
            "predictions": [p.asdict() for p in self.predictions],
            "notes": self.notes,
        }


def plan(
    model: str | Path | nn.Module = "",
    *,
    workers: int,
    link: str | float = "10gbit",
    nodes: int | None = None,
    latency: str | float = LATENCY,
    local_link: str | float = LOCAL_RATE,
    gpu: str | Machine = "",
    params: int | None = None,
    step_seconds: float | None = None,
    batch: int | None = None,
    methods: Sequence[str] = (),
    density: float | Sequence[float] = (),
    min_density: float = 0.001,
    bundle_mb: float | None = None,
) -> ExchangePlan:
    """Predict the seconds of a step for every way of exchanging, and recommend one.

        plan = gradwire.plan("resnet50", workers=16, link="1gbit", gpu="v100")
        print(plan.recommendation.reason)

    The ways are method x exchange x encoding x density.

    model: a name in `gradwire.workbench.models`, a torch.nn.Module, or a .pt of shapes.
    params: a number of parameters, in place of the model.
    step_seconds: one worker's step without any exchange. All models but a name need it. For a name
    it is better than the guess from FLOP.
    nodes: the nodes, of one link each; as many as workers by default.
    gpu: a name, or "" to measure this machine's device.
    density: the only densities that are tried.
    min_density: the lowest density that may be recommended.
    """
    device = _find_device(gpu)
    load = _find_workload(model, device, params, step_seconds, batch)
    network = Network(
        workers,
        workers if nodes is None else nodes,
        link_rate(link),
        parse_time(latency),
        link_rate(local_link),
    )
    return plan_for(load, device, network, methods, density, min_density, bundle_mb)


def plan_for(
    load: Workload,
    device: Machine,
    network: Network,
    methods: Sequence[str] = (),
    density: float | Sequence[float] = (),
    min_density: float = 0.001,
    bundle_mb: float | None = None,
    encodings: Sequence[tuple[str, str]] = ENCODINGS,
) -> ExchangePlan:
    """Return the plan for a known workload, device and network."""
    chosen = [density] if isinstance(density, int | float) else list(density)
    densities = [check_density(d) for d in chosen] or list(DENSITIES)
    least = check_density(min_density, "min_density")
    if max(densities) < least:
        raise ConfigError(f"density {max(densities):g} is below min_density {least:g}: lower that")
    if bundle_mb is not None and not bundle_mb > 0:
        raise ConfigError(f"bundle_mb must be a number above 0, got {bundle_mb!r}")
    sizes = _bundle_sizes(load) if bundle_mb is None else [float(bundle_mb)]
    ways = all_ways(network, densities, methods, encodings)
    if not any(len(shape) > 1 for shape in load.shapes):
        # A number of parameters tells no shapes, and PowerSGD's bytes depend on the shapes.
        ways = [w for w in ways if w.exchange]
    predictions = sorted(
        (_predict_best(w, load, device, network, sizes) for w in ways), key=lambda p: p.seconds
    )
    recommendation = recommend(predictions, _seconds_at(load, device, network, sizes), least)
    return ExchangePlan(
        load, device, network, predictions, recommendation, _notes(load, device), sizes
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


def _find_device(gpu: str | Machine) -> Machine:
    if isinstance(gpu, Machine):
        return gpu
    if gpu:
        return find_machine(gpu)
    from gradwire.plan.measure import measure_machine

    return measure_machine()


def _find_workload(
    model: str | Path | nn.Module,
    device: Machine,
    params: int | None,
    seconds: float | None,
    batch: int | None,
) -> Workload:
    if bool(str(model)) == (params is not None):
        raise ConfigError(
            "give a model (a name, an nn.Module or a .pt of shapes) or params, one of the two"
        )
    if params is not None:
        return by_count(params, seconds)
    if isinstance(model, nn.Module):
        trained = [tuple(p.shape) for p in model.parameters() if p.requires_grad]
        return by_shapes(trained, type(model).__name__, seconds)
    if isinstance(model, Path) or str(model).endswith(".pt"):
        return by_file(Path(model), seconds)
    # The only place where the library asks the workbench, and only for a network's name.
    from gradwire.workbench.models.workload import workload_by_name

    return workload_by_name(str(model), device, batch, seconds)


def _notes(load: Workload, device: Machine) -> list[str]:
    notes = []
    if not load.measured:
        notes.append(
            f"computing is guessed from FLOP, {load.seconds:.3g} s a step on {device.name}; it can "
            f"be off by a factor of two or more: give the step seconds you measured"
        )
    notes.append(
        "times only: density below 1 % may cost accuracy, and randk, threshold, chunked and "
        "sketches deliver less of the gradient in a step"
    )
    return notes
