"""Check the cost model against Table 2 of Shi et al. (2019).

The table was measured on 16 V100 in 4 nodes with 10 Gbit Ethernet, with k = 0.001 d. The paper's
code sends the model as one vector after the backward pass, so no communication is hidden:

    seconds = compute + step + bytes / rate + ns(method) x d

compute is the paper's: dense seconds x scaling efficiency. bytes come from gradwire's formulas for
a ring all-reduce, or an all-gather of fp32 and int32. Five constants are fitted on two networks:
rate, step (Horovod and waiting for the slowest worker) and ns of three selection methods. With
these constants the model predicts the other two networks.
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
"""Per network: seconds per iteration with each of METHODS, and the scaling efficiency of dense."""
FITTED_NETWORKS = ("alexnet", "resnet50")


@dataclass(frozen=True)
class Constants:
    """The fitted constants.

    rate: payload bytes per second. step: seconds per step.
    select: nanoseconds per entry, by method.
    """

    rate: float
    step: float
    select: dict[str, float]


@dataclass(frozen=True)
class PaperCell:
    """One cell of the table, its prediction, and whether its network was fitted."""

    model: str
    method: str
    paper: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.paper - 1


def fit_and_compare(fitted: Sequence[str] = FITTED_NETWORKS) -> tuple[Constants, list[PaperCell]]:
    """Return the constants fitted on the networks `fitted`, and all cells with predictions."""
    constants = fit_constants(fitted)
    cells = [
        PaperCell(
            model, method, seconds, predict_seconds(model, method, constants), model in fitted
        )
        for model, (times, _) in TABLE.items()
        for method, seconds in zip(METHODS, times, strict=True)
    ]
    return constants, cells


def fit_constants(models: Sequence[str]) -> Constants:
    """Minimise the sum of the squared relative errors of whole iterations."""
    features, targets = [], []
    for model in models:
        for method, seconds in zip(METHODS, TABLE[model][0], strict=True):
            features.append(_features(model, method) / seconds)
            targets.append((seconds - compute_seconds(model)) / seconds)
    table = np.array(features)
    # Scaled columns, because the features differ by many orders of magnitude.
    scale = table.max(0)
    per_byte, step, *select = np.linalg.lstsq(table / scale, np.array(targets))[0] / scale
    names = METHODS[1:]
    nanoseconds = {m: float(1e9 * s) for m, s in zip(names, select, strict=True)}
    return Constants(float(1 / per_byte), float(step), nanoseconds)


def compute_seconds(model: str) -> float:
    """Return the seconds that one worker computes per iteration, by the scaling efficiency."""
    times, efficiency = TABLE[model]
    return times[0] * efficiency


def predict_seconds(model: str, method: str, constants: Constants) -> float:
    """Return the predicted seconds of an iteration."""
    select = [1e-9 * constants.select[m] for m in METHODS[1:]]
    weights = np.array([1 / constants.rate, constants.step, *select])
    return compute_seconds(model) + float(_features(model, method) @ weights)


def _features(model: str, method: str) -> np.ndarray:
    """Return the bytes on a node's link, 1, and the entries that each selection method scans."""
    size = model_spec(model).parameters
    exchange = EXCHANGES["dense" if method == "dense" else "allgather"]
    network, k = Network(WORKERS, NODES, rate=1.0), entry_count(DENSITY, size)
    # A ring in both cases, as NCCL's was then. The planner's dense adds up inside nodes first.
    sent = exchange.bytes(WORKERS, size, k, Encoding())
    legs = [network.ring(sent, exchange.rounds(WORKERS))]
    scanned = [float(size) if method == m else 0.0 for m in METHODS[1:]]
    return np.array([sum(leg.bytes * leg.share for leg in legs), 1.0, *scanned])
