"""gs-SGD: what a sketch finds in real u, and what it is worth against gTop-k at equal bytes."""

import warnings
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire import kernels
from gradwire.accumulate.schedule import entry_count
from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.exchange.sketch_size import SketchSize
from gradwire.exchange.sketched import find_largest, next_seeds
from gradwire.types import Memory, align
from gradwire.workbench import models
from gradwire.workbench.bench import bench_exchange
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.study.fit import hill
from gradwire.workbench.study.sketch_page import page
from gradwire.workbench.study.study import Cell, Row, Settings, Study, repeatable
from gradwire.workbench.train.options import resolve
from gradwire.workbench.train.rates import cosine

DENSITY = 0.001
RATIOS = (200, 100, 50, 20, 10, 5, 2, 1)
CANDIDATES = (1, 4, 10)
DRAWS = 3
"""Sketches with other hashes whose recall is averaged."""
SOURCES = ("dense", "topk/allgather", "topk/gs-sgd")
"""How the workers train whose u is looked at: what is sent is missing from the tail of u."""
MODELS, SMALL_MODELS = ("fnn3", "lenet5", "resnet20", "vgg16-cifar", "lstm-ptb"), ("lenet5",)
BUDGETS, SMALL_BUDGETS = (40.0, 10.0), (40.0,)
"""d / cells of the sketches whose bytes gTop-k may spend too; 40 is near the smallest table."""
SKETCHES = ("topk/sketched", "topk/gs-sgd")
RUN: dict[str, Any] = {
    "model": "resnet20",
    "epochs": 6,
    "batch": 32,
    "lr": 0.4,
    "weight_decay": 1e-4,
}
SMALL_RUN: dict[str, Any] = {"model": "lenet5", "epochs": 3, "batch": 16, "lr": 0.02}
SIZES, SMALL_SIZES = (25_557_032, 138_357_544), (199_210,)
"""ResNet-50, VGG-16; FNN-3."""


def cells(settings: Settings) -> list[Cell]:
    """u of networks in training, then training at equal bytes, then the time of an exchange."""
    small = settings.small
    steps, workers = (30, 4) if small else (400, 4)
    found: list[Cell] = [
        {"what": "u", "model": model, "recipe": source, "workers": workers, "steps": steps}
        for model in (SMALL_MODELS if small else MODELS)
        for source in SOURCES
    ]
    workers = 8 if small else 16
    run = {"what": "train", "workers": workers, "seed": settings.seed}
    found.append(run | {"recipe": "dense", "ratio": 0.0})
    for ratio in SMALL_BUDGETS if small else BUDGETS:
        found += [run | {"recipe": name, "ratio": ratio} for name in (*SKETCHES, "topk/gtopk")]
    for size in SMALL_SIZES if small else SIZES:
        found += [{"what": "time", "size": size, "workers": n} for n in (4, 8, 16)]
    return found


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """The rows of one cell; which, its "what" says."""
    with repeatable(settings), warnings.catch_warnings():
        # The exchange says that such a table shows little: that is what is measured.
        warnings.simplefilter("ignore", UserWarning)
        if cell["what"] == "u":
            return _recalls(settings, cell)
        if cell["what"] == "train":
            return _train(settings, cell)
        return list(_times(settings, cell))


def _recalls(settings: Settings, cell: Cell) -> list[Row]:
    u = mean_u(settings, cell)
    k = entry_count(DENSITY, u.numel())
    common = cell | {"d": u.numel(), "k": k, "tail": hill(u[u != 0])}
    return [common | {"ratio": ratio, **recall(u, k, ratio)} for ratio in RATIOS]


def mean_u(settings: Settings, cell: Cell) -> Tensor:
    """The mean over the workers of gradient + residual: what the sum of all sketches shows."""
    given = {"model": cell["model"], "method": cell["recipe"], "workers": cell["workers"]}
    given |= {"density": DENSITY, "seed": settings.seed, "device": settings.device}
    simulation = Simulation.from_options(resolve(given | {"data_dir": settings.data_dir}))
    everyone = tuple(range(cell["workers"]))
    for step in range(cell["steps"]):
        simulation.step(watch=everyone if step == cell["steps"] - 1 else ())
    return torch.stack([simulation.u(worker) for worker in everyone]).mean(0)


def recall(u: Tensor, k: int, ratio: float) -> dict[str, list[float]]:
    """For each of CANDIDATES: the share of the k largest that a table of d / ratio cells finds,
    and the energy of the k best of what it finds over the energy of the k largest."""
    u = pad(u, (0, align(u.numel()) - u.numel()))
    size, sketch, memory = u.numel(), SketchSize(ratio=ratio), Memory()
    indices, values = kernels.select(u, k)
    winners = torch.zeros(size, dtype=torch.bool, device=u.device)
    winners[indices.long()] = True
    whole = float(values.double().square().sum())
    found, energy = [0.0] * len(CANDIDATES), [0.0] * len(CANDIDATES)
    for _ in range(DRAWS):
        seeds = next_seeds(memory, sketch.rows, u.device)
        table = kernels.insert(u, sketch.column_count(size), seeds)
        for i, many in enumerate(CANDIDATES):
            where = find_largest(table, seeds, size, min(size, many * k)).long()
            best = u[where].double().square().topk(k).values
            found[i] += float(winners[where].sum()) / k / DRAWS
            energy[i] += float(best.sum()) / whole / DRAWS
    return {"recall": found, "energy": energy}


def spent(size: int, workers: int, ratio: float) -> int:
    """Bytes a worker sends in a step of gs-SGD."""
    cost = EXCHANGES["gs-sgd"].bytes
    return cost(workers, align(size), entry_count(DENSITY, size), Encoding(), ratio=ratio)


def affordable(size: int, workers: int, budget: int) -> float:
    """The density at which gTop-k sends no more than `budget` bytes."""
    cost = EXCHANGES["gtopk"].bytes
    ks = range(1, size + 1)
    return bisect_right(ks, budget, key=lambda k: cost(workers, align(size), k, Encoding())) / size


def _train(settings: Settings, cell: Cell) -> list[Row]:
    """A row an epoch."""
    run = SMALL_RUN if settings.small else RUN
    given = run | {"method": cell["recipe"], "workers": cell["workers"], "seed": cell["seed"]}
    given |= {"density": DENSITY, "data_dir": settings.data_dir, "device": settings.device}
    if cell["recipe"] in SKETCHES:
        given["method_options"] = (f"ratio={cell['ratio']:g}",)
    if cell["recipe"] == "topk/gtopk":
        size, workers = models.model_spec(run["model"]).parameters, cell["workers"]
        given["density"] = affordable(size, workers, spent(size, workers, cell["ratio"]))
    options = resolve(given)
    simulation, rows = Simulation.from_options(options), []
    total = options.epochs * simulation.epoch_steps
    for epoch in range(1, options.epochs + 1):
        for _ in range(simulation.epoch_steps):
            simulation.step(options.lr * cosine(simulation.steps / total))
        row = {"model": options.model, "d": simulation.entries, "density": options.density}
        row |= {"epoch": epoch, "epochs": options.epochs, "steps": simulation.steps}
        rows.append(cell | row | {"score": simulation.score(), "bytes": simulation.bytes_sent})
    return rows


def _times(settings: Settings, cell: Cell) -> Iterator[Row]:
    """What one worker does itself in a step, and its bytes and rounds, each budget."""
    size, workers, device = cell["size"], cell["workers"], torch.device(settings.device)
    for ratio in SMALL_BUDGETS if settings.small else BUDGETS:
        other = affordable(size, workers, spent(size, workers, ratio))
        for name, density in (("sketched", DENSITY), ("gs-sgd", DENSITY), ("gtopk", other)):
            options = [f"ratio={ratio:g}"] if name != "gtopk" else []
            (row,) = bench_exchange(
                [workers], size, density, [name], device, data="t3", options=options, steps=4
            )
            yield cell | {"exchange": name, "ratio": ratio, "density": density} | {
                "local": sum(row.seconds.values()), "bytes": row.bytes, "rounds": row.rounds,
                "why": row.why,
            }  # fmt: skip


STUDY = Study(
    name="sketch",
    title="What a sketch finds",
    figures="Dai et al. (2021), gs-SGD; Ivkin et al. (2019), Sketched-SGD",
    cells=cells,
    measure=measure,
    page=page,
    files=("mnist", "cifar10", "ptb"),
)
