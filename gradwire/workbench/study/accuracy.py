"""Find the recipes that keep dense accuracy with 0.2 % of the entries.

ResNet-20 on CIFAR-10 with 16 virtual workers. Each recipe runs with the same seeds as dense.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradwire.workbench.data import Data, Shard
from gradwire.workbench.simulate.local_sgd import LocalSgdSimulation
from gradwire.workbench.simulate.simulation import Simulation, load_examples
from gradwire.workbench.study.accuracy_page import page
from gradwire.workbench.study.study import Cell, Settings, Study, StudyRow, repeatable
from gradwire.workbench.study.unfinished import UnfinishedRun
from gradwire.workbench.train.options import Options, cosine_factor, resolve

WORKERS = 16
FULL: dict[str, Any] = {"model": "resnet20", "batch": 32, "lr": 0.4, "weight_decay": 1e-4}
SMALL: dict[str, Any] = {"model": "fnn3", "batch": 16, "lr": 0.1, "weight_decay": 1e-4}
EPOCHS, SMALL_EPOCHS, SEEDS, SMALL_SEEDS = 50, 4, 8, 2


@dataclass(frozen=True)
class AccuracyRecipe:
    """The differences of a run from the dense run.

    options: options of `gradwire train`. lr: factor on the learning rate of dense.
    every: above 0, the workers do local steps and exchange weights every `every` steps.
    keep_unsent: local steps keep the part of their change that was not sent.
    flush: True: the last step sends everything.
    early: (share, density): the density in the first `share` of the run.
    epoch_factor: factor on the number of epochs.
    """

    options: dict[str, Any] = field(default_factory=dict)
    lr: float = 1.0
    every: int = 0
    keep_unsent: bool = False
    flush: bool = False
    early: tuple[float, float] = (0.0, 0.0)
    epoch_factor: int = 1


def _union(percent: float, **more: Any) -> dict[str, Any]:
    return {"method": "topk/union", "density": percent / 100, **more}


def _topk(percent: float, **more: Any) -> dict[str, Any]:
    return {"method": "topk/allgather", "density": percent / 100, **more}


EARLY = (0.1, 0.006)
"""0.6 % of the entries in the first tenth of the run."""
CORRECTION: dict[str, Any] = {"momentum_correction": True}
# Momentum of 0.9 multiplies the step by ten, so recipes without it use ten times the rate.
PLAIN: dict[str, Any] = {"momentum": 0.0}


def _coded(method: str, percent: float, values: str, indices: str = "packed") -> dict[str, Any]:
    return {"method": method, "density": percent / 100, "values": values, "indices": indices}


# This takes two thirds of the bytes that an all-gather of fp32 and int32 takes.
UNION = _coded("topk/union", 0.2, "bf16") | PLAIN


def _local(every: int, lr: float, keep: bool = True, share: float = 0.13) -> AccuracyRecipe:
    """Return local steps that exchange the entries of `share` % per step, every `every` steps."""
    return AccuracyRecipe(_union(share * every), lr, every, keep, flush=True)


GRID = ((1.0, 3.0), (1.0, 5.0), (1.5, 1.5), (1.5, 3.0), (1.5, 5.0), (2.0, 2.0))
"""Factors on the learning rate and the weight decay of dense."""


def _on_grid(
    name: str, like: AccuracyRecipe, *points: tuple[float, float]
) -> dict[str, AccuracyRecipe]:
    """Return the recipe `like` at each (rate, decay), under names such as "dense-1.5-3"."""
    return {
        f"{name}-{rate:g}-{decay:g}": replace(
            like, options=like.options | {"weight_decay": decay * 1e-4}, lr=rate * like.lr
        )
        for rate, decay in points
    }


RECIPES: dict[str, AccuracyRecipe] = {
    "dense": AccuracyRecipe({"method": "dense"}),
    **_on_grid("dense", AccuracyRecipe({"method": "dense"}), *GRID),
    **_on_grid("dense-plain", AccuracyRecipe({"method": "dense"} | PLAIN, 10.0), (1.5, 1.5)),
    **_on_grid("plain-union", AccuracyRecipe(UNION, 10.0), *GRID),
    **_on_grid("plain-union-half", AccuracyRecipe(UNION | {"density": 0.001}, 10.0), (1.5, 3.0)),
    **_on_grid("plain-union-quarter", AccuracyRecipe(UNION | {"density": 5e-4}, 10.0), (1.5, 3.0)),
    **_on_grid(
        "plain-union-front",
        AccuracyRecipe(UNION | {"density": 0.00155}, 10.0, early=EARLY),
        (1.5, 1.5),
    ),
    **_on_grid("plain-front", AccuracyRecipe(_topk(0.155, **PLAIN), 10.0, early=EARLY), *GRID),
    "plain-follow": AccuracyRecipe(_topk(0.2, follow_lr=True, weight_decay=1.5e-4, **PLAIN), 15.0),
    "topk-0.2": AccuracyRecipe(_topk(0.2)),
    "union-0.13": AccuracyRecipe(_union(0.13)),
    "union-0.13-half": AccuracyRecipe(_union(0.13), 0.5),
    "union-0.2": AccuracyRecipe(_union(0.2)),
    "momentum-0.2": AccuracyRecipe(_topk(0.2, **CORRECTION)),
    "momentum-front": AccuracyRecipe(_topk(0.155, **CORRECTION), early=EARLY),
    **_on_grid(
        "momentum-front", AccuracyRecipe(_topk(0.155, **CORRECTION), early=EARLY), (1.5, 1.5)
    ),
    "momentum-front-more": AccuracyRecipe(_topk(0.111, **CORRECTION), early=(0.1, 0.01)),
    "momentum-twice": AccuracyRecipe(
        _topk(0.073, **CORRECTION), early=(0.05, 0.006), epoch_factor=2
    ),
    "union-front": AccuracyRecipe(_union(0.05, warmup=(0.006, 0.002), warmup_steps=485)),
    "weights-2-half": _local(2, 0.5, keep=False),
    "weights-4": _local(4, 1.0, keep=False),
    "weights-4-half": _local(4, 0.5, keep=False),
    "weights-4-more": _local(4, 0.5, keep=False, share=0.175),
    "weights-8-half": _local(8, 0.5, keep=False),
    "keep-1-half": _local(1, 0.5),
    "keep-8-half": _local(8, 0.5),
    "bytes-int4": AccuracyRecipe(_coded("topk/allgather", 1.0, "int4")),
    "bytes-union": AccuracyRecipe(_coded("topk/union", 0.3, "bf16")),
    "bytes-oktopk": AccuracyRecipe(_coded("topk/oktopk", 2.45, "bf16")),
    "bytes-randk": AccuracyRecipe(
        _coded("randk/union", 6.3, "bf16", "int32") | {"options": ("shared=true",)}
    ),
    "bytes-union-4": AccuracyRecipe(_coded("topk/union", 1.25, "bf16"), 0.5, 4, flush=True),
    "bytes-sign-4": AccuracyRecipe(
        _coded("topk/allgather", 7.4, "sign", "auto"), 0.5, 4, flush=True
    ),
    "bytes-sign-8": AccuracyRecipe(
        _coded("topk/allgather", 18.5, "sign", "auto"), 0.5, 8, flush=True
    ),
    "bytes-all-16": AccuracyRecipe({"method": "dense/dense-bf16"}, 0.5, 16, flush=True),
}
"""All recipes by name.

In a union exchange every worker sends a value wherever any worker chose an entry. That takes 1.5
times the bytes of an all-gather, so a union of 0.13 % takes the bytes of 0.2 %.
bytes-...: more entries, in the bytes that 0.2 % take as fp32 and int32. They exceed the target of
0.2 % of the entries and are here for comparison.
"""

SMALL_RECIPES = ("dense", "topk-0.2", "union-0.2", "weights-4-half", "keep-8-half")


def cells(settings: Settings) -> list[Cell]:
    """List a cell per training run, seed by seed, so that an interrupted study has pairs."""
    small = settings.small
    names = SMALL_RECIPES if small else tuple(RECIPES)
    seeds = settings.seeds or (SMALL_SEEDS if small else SEEDS)
    epochs = settings.epochs or (SMALL_EPOCHS if small else EPOCHS)
    return [
        {"recipe": name, "seed": settings.seed + seed, "epochs": epochs}
        for seed in range(seeds)
        for name in names
    ]


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Train the cell's recipe; return a row per epoch.

    bytes: sent by all workers so far. entries: chosen by one worker so far; a step that sends
    everything counts all entries. steps: steps of the dense run after the same share of the run.
    dense: the bytes of an all-reduce at each of these steps.
    """
    recipe = RECIPES[cell["recipe"]]
    fields = (SMALL if settings.small else FULL) | {"seed": cell["seed"]}
    fields |= {"epochs": cell["epochs"] * recipe.epoch_factor}
    fields |= recipe.options | {"workers": WORKERS, "data_dir": settings.data_dir}
    options = resolve(fields | {"device": settings.device})
    with repeatable(settings):
        simulation = _open_simulation(options, recipe)
        total, lr = options.epochs * simulation.epoch_steps, options.lr * recipe.lr
        dense = 2 * (WORKERS - 1) * 4 * simulation.entries * simulation.epoch_steps
        run = UnfinishedRun(settings, cell)
        rows = run.resume(simulation)
        for epoch in range(len(rows) + 1, options.epochs + 1):
            losses = []
            for _ in range(simulation.epoch_steps):
                if recipe.flush and simulation.steps == total - 1:
                    simulation.flush()
                # The rate is warmed up over a tenth of the run, then falls like a cosine.
                losses.append(simulation.step(lr * cosine_factor(simulation.steps / total)))
            row: StudyRow = {"epoch": epoch, "loss": float(torch.stack(losses).mean())}
            row |= {
                "score": simulation.score(),
                "bytes": simulation.bytes_sent,
                "entries": simulation.entries_chosen,
            }
            row |= {
                "dense": epoch * dense / recipe.epoch_factor,
                "steps": simulation.steps / recipe.epoch_factor,
            }
            row |= {
                "d": simulation.entries,
                "activations": simulation.activations,
                "model": options.model,
            }
            row |= {"residual_bytes": simulation.residual_bytes}
            rows.append(cell | row)
            run.save_if_due(simulation, rows, f"epoch {len(rows)} of {options.epochs}")
    return rows


def _open_simulation(options: Options, recipe: AccuracyRecipe) -> Simulation:
    """Return the simulation that trains by a recipe."""
    data = load_examples(options)
    if recipe.early[0]:
        options = _with_early_density(options, recipe.early, data)
    if not recipe.every:
        return Simulation(options, data, batched=True)
    return LocalSgdSimulation(options, data, recipe.every, keep_unsent=recipe.keep_unsent)


def _with_early_density(options: Options, early: tuple[float, float], data: Data) -> Options:
    """Return options whose warm-up has the density of `early` in the first part of the run."""
    epoch_steps = Shard(data.examples, options.batch, 0, options.workers, options.seed).steps
    share, density = early
    steps = round(share * options.epochs * epoch_steps)
    return replace(options, warmup=(density,), warmup_steps=steps)


STUDY = Study(
    name="accuracy",
    title="Dense accuracy with 0.2 % of the entries",
    figures="ours: the gap that Shi et al. (2019) left, 0.6 to 0.8 points",
    cells=cells,
    measure=measure,
    page=page,
    files=("cifar10",),
    choices=("seeds", "epochs"),
)
