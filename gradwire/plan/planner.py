"""From a model, workers and links to predictions and a recommendation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from gradwire.config import check_density
from gradwire.errors import ConfigError
from gradwire.plan.machine import Machine, machine
from gradwire.plan.network import LATENCY, LOCAL_RATE, Network, link_rate, show_link
from gradwire.plan.predict import Prediction, Way, predict
from gradwire.plan.rate import parse_time
from gradwire.plan.recommend import At, Recommendation, recommend
from gradwire.plan.ways import DENSITIES, ENCODINGS, all_ways
from gradwire.plan.workload import Workload, by_count, by_file, by_shapes

BUNDLES = (25.0, 50.0, 100.0, 200.0, 400.0, 1600.0, 8000.0)
"""Sizes that are tried, in MB of fp32."""
MANY = 64
"""Bundles in a step beyond which a size is not tried, unless all have more."""
SAME = 1.01


@dataclass(frozen=True)
class Plan:
    """What was asked, every prediction (the fastest first), and what to do."""

    load: Workload
    device: Machine
    network: Network
    predictions: list[Prediction]
    recommendation: Recommendation
    notes: list[str]
    sizes: list[float]
    """Of bundles, in MB, that were tried."""

    def at(self, prediction: Prediction, rate: float) -> float:
        """Seconds of the same way on links of another rate."""
        return _at(self.load, self.device, self.network, self.sizes)(prediction, rate)

    def asdict(self) -> dict[str, Any]:
        """One object for JSON."""
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
) -> Plan:
    """Seconds a step for every method x exchange x encoding x density, and which to take.

        plan = gradwire.plan("resnet50", workers=16, link="1gbit", gpu="v100")
        print(plan.recommendation.reason)

    model: a name in `gradwire.workbench.models`, a torch.nn.Module, or a .pt of shapes; or
    `params`, their number. All but the name need `step_seconds`, one worker's step without any
    exchange; for the name it is better than the guess from FLOP. `nodes`: of one link each; as many
    as workers unless given. `gpu`: a name, or "" to measure the device at hand. `density`: only
    these; `min_density` bounds what may be recommended.
    """
    device = _device(gpu)
    load = _workload(model, device, params, step_seconds, batch)
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
) -> Plan:
    """The same from what is known already."""
    given = [density] if isinstance(density, int | float) else list(density)
    densities = [check_density(d) for d in given] or list(DENSITIES)
    least = check_density(min_density, "min_density")
    if max(densities) < least:
        raise ConfigError(f"density {max(densities):g} is below min_density {least:g}: lower that")
    if bundle_mb is not None and not bundle_mb > 0:
        raise ConfigError(f"bundle_mb must be a number above 0, got {bundle_mb!r}")
    sizes = _sizes(load) if bundle_mb is None else [float(bundle_mb)]
    ways = all_ways(network, densities, methods, encodings)
    if not any(len(shape) > 1 for shape in load.shapes):
        # A number of parameters is no matrix: nothing is known of what PowerSGD would send.
        ways = [w for w in ways if w.exchange]
    found = sorted((_best(w, load, device, network, sizes) for w in ways), key=lambda p: p.seconds)
    chosen = recommend(found, _at(load, device, network, sizes), least)
    return Plan(load, device, network, found, chosen, _notes(load, device), sizes)


def _best(
    way: Way, load: Workload, device: Machine, network: Network, sizes: Sequence[float]
) -> Prediction:
    """With the bundle size that is fastest; of sizes alike, the smallest."""
    tried = [predict(way, load, device, network, size) for size in sizes]
    fastest = min(p.seconds for p in tried)
    return next(p for p in tried if p.seconds <= SAME * fastest)


def _at(load: Workload, device: Machine, network: Network, sizes: Sequence[float]) -> At:
    def at(p: Prediction, rate: float) -> float:
        return _best(p.way, load, device, replace(network, rate=rate), sizes).seconds

    return at


def _sizes(load: Workload) -> list[float]:
    """The sizes to try; one that holds everything ends the list."""
    counts = [(size, len(load.bundles(size))) for size in BUNDLES]
    few = [(size, n) for size, n in counts if n <= MANY] or counts[-1:]
    whole = next((i for i, (_, n) in enumerate(few) if n == 1), len(few) - 1)
    return [size for size, _ in few[: whole + 1]]


def _device(gpu: str | Machine) -> Machine:
    if isinstance(gpu, Machine):
        return gpu
    if gpu:
        return machine(gpu)
    from gradwire.plan.measure import measure_machine

    return measure_machine()


def _workload(
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
    from gradwire.workbench.models.workload import by_name

    return by_name(str(model), device, batch, seconds)


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
