"""The cost model against Table 2 of Shi et al. (2019): 16 V100 in 4 nodes, 10 GbE, k = 0.001 d.

Their code sends the model as one vector after the backward pass, so nothing is hidden:

    seconds = compute + step + bytes / rate + ns(method) x d

with the bytes of our own formulas (ring all-reduce, all-gather of fp32 and int32). Five constants,
rate, step (Horovod, waiting for the slowest) and ns of three selectors, are fitted on two networks
and predict the other two. compute is theirs: dense seconds x scaling efficiency.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.accumulate.schedule import entry_count
from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.plan.network import Network
from gradwire.workbench.models import model_spec

WORKERS, NODES, DENSITY = 16, 4, 0.001
METHODS = ("dense", "topk", "dgc", "gaussiank")
TABLE: dict[str, tuple[tuple[float, ...], float]] = {
    "alexnet": ((0.571, 0.891, 0.369, 0.245), 0.141),
    "vgg16": ((2.068, 3.010, 1.540, 1.311), 0.542),
    "resnet50": ((0.699, 0.810, 0.655, 0.586), 0.658),
    "inception-v4": ((1.022, 1.268, 0.916, 0.787), 0.675),
}
"""Seconds an iteration with each of METHODS, and the scaling efficiency of the first."""
FITTED = ("alexnet", "resnet50")


@dataclass(frozen=True)
class Constants:
    """What was fitted: payload bytes a second, seconds a step, nanoseconds an entry."""

    rate: float
    step: float
    select: dict[str, float]


@dataclass(frozen=True)
class Row:
    """One cell of the table and what is predicted for it."""

    model: str
    method: str
    paper: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        return self.predicted / self.paper - 1


def check(fitted: Sequence[str] = FITTED) -> tuple[Constants, list[Row]]:
    """The constants, and all cells side by side."""
    found = fit(fitted)
    rows = [
        Row(model, method, seconds, predict(model, method, found), model in fitted)
        for model, (times, _) in TABLE.items()
        for method, seconds in zip(METHODS, times, strict=True)
    ]
    return found, rows


def fit(models: Sequence[str]) -> Constants:
    """Least squares of the relative errors of whole iterations."""
    features, targets = [], []
    for model in models:
        for method, seconds in zip(METHODS, TABLE[model][0], strict=True):
            features.append(_features(model, method) / seconds)
            targets.append((seconds - compute(model)) / seconds)
    table = np.array(features)
    scale = table.max(0)
    per_byte, step, *select = np.linalg.lstsq(table / scale, np.array(targets))[0] / scale
    names = METHODS[1:]
    nanoseconds = {m: float(1e9 * s) for m, s in zip(names, select, strict=True)}
    return Constants(float(1 / per_byte), float(step), nanoseconds)


def compute(model: str) -> float:
    """One worker's seconds, from the paper's scaling efficiency."""
    times, efficiency = TABLE[model]
    return times[0] * efficiency


def predict(model: str, method: str, constants: Constants) -> float:
    """Seconds of an iteration."""
    select = [1e-9 * constants.select[m] for m in METHODS[1:]]
    known = np.array([1 / constants.rate, constants.step, *select])
    return compute(model) + float(_features(model, method) @ known)


def _features(model: str, method: str) -> np.ndarray:
    """Bytes on a node's link, 1, and the entries that this method looks at."""
    size = model_spec(model).parameters
    exchange = "dense" if method == "dense" else "allgather"
    network = Network(WORKERS, NODES, rate=1.0)
    found = EXCHANGES[exchange].legs_on(network, size, entry_count(DENSITY, size), Encoding())
    looked = [float(size) if method == m else 0.0 for m in METHODS[1:]]
    return np.array([sum(leg.bytes * leg.share for leg in found), 1.0, *looked])
