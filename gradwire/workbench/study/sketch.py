"""Measure how many of the largest entries a sketch finds, and compare gs-SGD with gTop-k.

The cells are of three kinds: "u" measures recall on u of networks in training, "train" trains at
equal bytes, "time" measures the time of an exchange at equal bytes.
"""

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
from gradwire.workbench.study.fit import tail_index
from gradwire.workbench.study.sketch_page import page
from gradwire.workbench.study.study import Cell, Settings, Study, StudyRow, repeatable
from gradwire.workbench.train.options import cosine_factor, resolve

DENSITY = 0.001
RATIOS = (200, 100, 50, 20, 10, 5, 2, 1)
"""Entries of u over cells of the sketch."""
CANDIDATES = (1, 4, 10)
"""Entries that the sketch proposes, over k."""
DRAWS = 3
"""Sketches with different hashes, whose recalls are averaged."""
SOURCES = ("dense", "topk/allgather", "topk/gs-sgd")
"""Recipes that train the networks for cells "u". Sent entries are missing from the tail of u."""
MODELS, SMALL_MODELS = ("fnn3", "lenet5", "resnet20", "vgg16-cifar", "lstm-ptb"), ("lenet5",)
BUDGETS, SMALL_BUDGETS = (40.0, 10.0), (40.0,)
"""Sketch sizes, as d / cells, whose bytes gTop-k may also spend. 40 is near the smallest sketch."""
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
"""Entries of ResNet-50 and VGG-16; of FNN-3."""


def cells(settings: Settings) -> list[Cell]:
    """List the cells "u", then "train", then "time"."""
    small = settings.small
    steps, workers = (30, 4) if small else (400, 4)
    listed: list[Cell] = [
        {"what": "u", "model": model, "recipe": source, "workers": workers, "steps": steps}
        for model in (SMALL_MODELS if small else MODELS)
        for source in SOURCES
    ]
    workers = 8 if small else 16
    run = {"what": "train", "workers": workers, "seed": settings.seed}
    listed.append(run | {"recipe": "dense", "ratio": 0.0})
    for ratio in SMALL_BUDGETS if small else BUDGETS:
        listed += [run | {"recipe": name, "ratio": ratio} for name in (*SKETCHES, "topk/gtopk")]
    for size in SMALL_SIZES if small else SIZES:
        listed += [{"what": "time", "size": size, "workers": n} for n in (4, 8, 16)]
    return listed


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Measure one cell, by the kind that its "what" names."""
    with repeatable(settings), warnings.catch_warnings():
        # The exchange warns that a small sketch finds little, which is measured here.
        warnings.simplefilter("ignore", UserWarning)
        if cell["what"] == "u":
            return _recall_rows(settings, cell)
        if cell["what"] == "train":
            return _train_rows(settings, cell)
        return list(_time_rows(settings, cell))


def _recall_rows(settings: Settings, cell: Cell) -> list[StudyRow]:
    u = mean_u(settings, cell)
    k = entry_count(DENSITY, u.numel())
    common = cell | {"d": u.numel(), "k": k, "tail": tail_index(u[u != 0])}
    return [common | {"ratio": ratio, **measure_recall(u, k, ratio)} for ratio in RATIOS]


def mean_u(settings: Settings, cell: Cell) -> Tensor:
    """Return the mean of u over the workers, whose sketch is the mean of their sketches."""
    fields = {"model": cell["model"], "method": cell["recipe"], "workers": cell["workers"]}
    fields |= {"density": DENSITY, "seed": settings.seed, "device": settings.device}
    simulation = Simulation.from_options(resolve(fields | {"data_dir": settings.data_dir}))
    everyone = tuple(range(cell["workers"]))
    for step in range(cell["steps"]):
        simulation.step(watch=everyone if step == cell["steps"] - 1 else ())
    return torch.stack([simulation.u(worker) for worker in everyone]).mean(0)


def measure_recall(u: Tensor, k: int, ratio: float) -> dict[str, list[float]]:
    """Return recall and energy of a sketch of d / ratio cells, for each of CANDIDATES.

    recall: the share of the k largest entries among the candidates.
    energy: the energy of the k best candidates over the energy of the k largest entries.
    """
    u = pad(u, (0, align(u.numel()) - u.numel()))
    size, sketch, memory = u.numel(), SketchSize(ratio=ratio), Memory()
    indices, values = kernels.select(u, k)
    winners = torch.zeros(size, dtype=torch.bool, device=u.device)
    winners[indices.long()] = True
    largest_energy = float(values.double().square().sum())
    recall, energy = [0.0] * len(CANDIDATES), [0.0] * len(CANDIDATES)
    for _ in range(DRAWS):
        seeds = next_seeds(memory, sketch.rows, u.device)
        table = kernels.insert(u, sketch.column_count(size), seeds)
        for i, factor in enumerate(CANDIDATES):
            candidates = find_largest(table, seeds, size, min(size, factor * k)).long()
            best = u[candidates].double().square().topk(k).values
            recall[i] += float(winners[candidates].sum()) / k / DRAWS
            energy[i] += float(best.sum()) / largest_energy / DRAWS
    return {"recall": recall, "energy": energy}


def sketch_bytes(size: int, workers: int, ratio: float) -> int:
    """Return the bytes that a worker sends in a step of gs-SGD."""
    bytes_of = EXCHANGES["gs-sgd"].bytes
    return bytes_of(workers, align(size), entry_count(DENSITY, size), Encoding(), ratio=ratio)


def affordable_density(size: int, workers: int, budget: int) -> float:
    """Return the density at which gTop-k sends no more than `budget` bytes."""
    bytes_of = EXCHANGES["gtopk"].bytes
    ks = range(1, size + 1)
    return (
        bisect_right(ks, budget, key=lambda k: bytes_of(workers, align(size), k, Encoding())) / size
    )


def _train_rows(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Train at the bytes of the cell's sketch; return a row per epoch."""
    run = SMALL_RUN if settings.small else RUN
    fields = run | {"method": cell["recipe"], "workers": cell["workers"], "seed": cell["seed"]}
    fields |= {"density": DENSITY, "data_dir": settings.data_dir, "device": settings.device}
    if cell["recipe"] in SKETCHES:
        fields["options"] = (f"ratio={cell['ratio']:g}",)
    if cell["recipe"] == "topk/gtopk":
        size, workers = models.model_spec(run["model"]).parameters, cell["workers"]
        fields["density"] = affordable_density(
            size, workers, sketch_bytes(size, workers, cell["ratio"])
        )
    options = resolve(fields)
    simulation, rows = Simulation.from_options(options), []
    total = options.epochs * simulation.epoch_steps
    for epoch in range(1, options.epochs + 1):
        for _ in range(simulation.epoch_steps):
            simulation.step(options.lr * cosine_factor(simulation.steps / total))
        row = {"model": options.model, "d": simulation.entries, "density": options.density}
        row |= {"epoch": epoch, "epochs": options.epochs, "steps": simulation.steps}
        rows.append(cell | row | {"score": simulation.score(), "bytes": simulation.bytes_sent})
    return rows


def _time_rows(settings: Settings, cell: Cell) -> Iterator[StudyRow]:
    """Yield one worker's own work in a step, its bytes and its rounds, for each sketch size."""
    size, workers, device = cell["size"], cell["workers"], torch.device(settings.device)
    for ratio in SMALL_BUDGETS if settings.small else BUDGETS:
        gtopk_density = affordable_density(size, workers, sketch_bytes(size, workers, ratio))
        for name, density in (("sketched", DENSITY), ("gs-sgd", DENSITY), ("gtopk", gtopk_density)):
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
