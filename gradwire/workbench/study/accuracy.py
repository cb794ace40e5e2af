"""Which recipe keeps dense accuracy with 0.2 % of its entries: ResNet-20, 16 virtual workers."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradwire.workbench.data import Data, Shard
from gradwire.workbench.simulate.local_sgd import LocalSgdSimulation
from gradwire.workbench.simulate.simulation import Simulation, load_examples
from gradwire.workbench.study.accuracy_page import page
from gradwire.workbench.study.study import Cell, Row, Settings, Study, repeatable
from gradwire.workbench.study.unfinished import Unfinished
from gradwire.workbench.train.options import Options, resolve
from gradwire.workbench.train.rates import cosine

WORKERS = 16
FULL: dict[str, Any] = {"model": "resnet20", "batch": 32, "lr": 0.4, "weight_decay": 1e-4}
SMALL: dict[str, Any] = {"model": "fnn3", "batch": 16, "lr": 0.1, "weight_decay": 1e-4}
EPOCHS, SMALL_EPOCHS, SEEDS, SMALL_SEEDS = 50, 4, 8, 2
"""The learning rate is warmed up over a tenth of the run, then falls like a cosine."""


@dataclass(frozen=True)
class Recipe:
    """How a run differs from dense: options of `gradwire train`; `every` > 0 means local steps.

    `lr` is a share of dense's. With `flush` the last step sends what is left. `early`: a share of
    the run, the first, and the density there. `times` as many epochs as dense are trained.
    """

    options: dict[str, Any] = field(default_factory=dict)
    lr: float = 1.0
    every: int = 0
    keep: bool = False
    flush: bool = False
    early: tuple[float, float] = (0.0, 0.0)
    times: int = 1


def _union(percent: float, **more: Any) -> dict[str, Any]:
    return {"method": "topk/union", "density": percent / 100, **more}


def _topk(percent: float, **more: Any) -> dict[str, Any]:
    return {"method": "topk/allgather", "density": percent / 100, **more}


EARLY = (0.1, 0.006)
MOMENTUM: dict[str, Any] = {"momentum_correction": True}
PLAIN: dict[str, Any] = {"momentum": 0.0}
"""Without momentum ten times the learning rate go as far as with 0.9."""


def _coded(method: str, percent: float, values: str, indices: str = "packed") -> dict[str, Any]:
    return {"method": method, "density": percent / 100, "values": values, "indices": indices}


UNION = _coded("topk/union", 0.2, "bf16") | PLAIN
"""Two thirds of the bytes of as many entries as fp32 and int32 in an all-gather."""


def _local(every: int, lr: float, keep: bool = True, share: float = 0.13) -> Recipe:
    """The entries of `share` % a step, in one exchange every `every` steps."""
    return Recipe(_union(share * every), lr, every, keep, flush=True)


GRID = ((1.0, 3.0), (1.0, 5.0), (1.5, 1.5), (1.5, 3.0), (1.5, 5.0), (2.0, 2.0))
"""Learning rate and weight decay as multiples of dense's."""


def _at(name: str, like: Recipe, *points: tuple[float, float]) -> dict[str, Recipe]:
    """`like` at each of these rates and decays: "dense-1.5-3"."""
    return {
        f"{name}-{rate:g}-{decay:g}": replace(
            like, options=like.options | {"weight_decay": decay * 1e-4}, lr=rate * like.lr
        )
        for rate, decay in points
    }


RECIPES: dict[str, Recipe] = {
    "dense": Recipe({"method": "dense"}),
    **_at("dense", Recipe({"method": "dense"}), *GRID),
    **_at("dense-plain", Recipe({"method": "dense"} | PLAIN, 10.0), (1.5, 1.5)),
    **_at("plain-union", Recipe(UNION, 10.0), *GRID),
    **_at("plain-union-half", Recipe(UNION | {"density": 0.001}, 10.0), (1.5, 3.0)),
    **_at("plain-union-quarter", Recipe(UNION | {"density": 5e-4}, 10.0), (1.5, 3.0)),
    **_at("plain-union-front", Recipe(UNION | {"density": 0.00155}, 10.0, early=EARLY), (1.5, 1.5)),
    **_at("plain-front", Recipe(_topk(0.155, **PLAIN), 10.0, early=EARLY), *GRID),
    "plain-follow": Recipe(_topk(0.2, follow_lr=True, weight_decay=1.5e-4, **PLAIN), 15.0),
    "topk-0.2": Recipe(_topk(0.2)),
    "union-0.13": Recipe(_union(0.13)),
    "union-0.13-half": Recipe(_union(0.13), 0.5),
    "union-0.2": Recipe(_union(0.2)),
    "momentum-0.2": Recipe(_topk(0.2, **MOMENTUM)),
    "momentum-front": Recipe(_topk(0.155, **MOMENTUM), early=EARLY),
    **_at("momentum-front", Recipe(_topk(0.155, **MOMENTUM), early=EARLY), (1.5, 1.5)),
    "momentum-front-more": Recipe(_topk(0.111, **MOMENTUM), early=(0.1, 0.01)),
    "momentum-twice": Recipe(_topk(0.073, **MOMENTUM), early=(0.05, 0.006), times=2),
    "union-front": Recipe(_union(0.05, warmup=(0.006, 0.002), warmup_steps=485)),
    "weights-2-half": _local(2, 0.5, keep=False),
    "weights-4": _local(4, 1.0, keep=False),
    "weights-4-half": _local(4, 0.5, keep=False),
    "weights-4-more": _local(4, 0.5, keep=False, share=0.175),
    "weights-8-half": _local(8, 0.5, keep=False),
    "keep-1-half": _local(1, 0.5),
    "keep-8-half": _local(8, 0.5),
    "bytes-int4": Recipe(_coded("topk/allgather", 1.0, "int4")),
    "bytes-union": Recipe(_coded("topk/union", 0.3, "bf16")),
    "bytes-oktopk": Recipe(_coded("topk/oktopk", 2.45, "bf16")),
    "bytes-randk": Recipe(_coded("randk/union", 6.3, "bf16", "int32")),
    "bytes-union-4": Recipe(_coded("topk/union", 1.25, "bf16"), 0.5, 4, flush=True),
    "bytes-sign-4": Recipe(_coded("topk/allgather", 7.4, "sign", "auto"), 0.5, 4, flush=True),
    "bytes-sign-8": Recipe(_coded("topk/allgather", 18.5, "sign", "auto"), 0.5, 8, flush=True),
    "bytes-all-16": Recipe({"method": "dense/dense-bf16"}, 0.5, 16, flush=True),
}
"""Of the union every worker sends values where any worker chose: it takes 1.5 times the bytes of an
all-gather, so 0.13 % of it are the bytes of 0.2 %. bytes-...: more entries in the bytes that 0.2 %
take as fp32 and int32, for comparison: by entries they do not belong here."""

SMALL_RECIPES = ("dense", "topk-0.2", "union-0.2", "weights-4-half", "keep-8-half")


def cells(settings: Settings) -> list[Cell]:
    """A training run each, seed by seed, so that a study that is stopped has pairs."""
    small = settings.small
    names = SMALL_RECIPES if small else tuple(RECIPES)
    seeds = settings.seeds or (SMALL_SEEDS if small else SEEDS)
    epochs = settings.epochs or (SMALL_EPOCHS if small else EPOCHS)
    return [
        {"recipe": name, "seed": settings.seed + seed, "epochs": epochs}
        for seed in range(seeds)
        for name in names
    ]


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """A row an epoch.

    bytes are those that all workers sent, entries those that a worker chose, all of them where
    everything was sent. steps are dense's when it is as far, and dense the bytes of an all-reduce
    at every one of them.
    """
    recipe = RECIPES[cell["recipe"]]
    given = (SMALL if settings.small else FULL) | {"seed": cell["seed"]}
    given |= {"epochs": cell["epochs"] * recipe.times}
    given |= recipe.options | {"workers": WORKERS, "data_dir": settings.data_dir}
    options = resolve(given | {"device": settings.device})
    with repeatable(settings):
        simulation = open_simulation(options, recipe)
        total, lr = options.epochs * simulation.epoch_steps, options.lr * recipe.lr
        dense = 2 * (WORKERS - 1) * 4 * simulation.entries * simulation.epoch_steps
        run = Unfinished(settings, cell)
        rows = run.begin(simulation)
        for epoch in range(len(rows) + 1, options.epochs + 1):
            losses = []
            for _ in range(simulation.epoch_steps):
                if recipe.flush and simulation.steps == total - 1:
                    simulation.flush()
                losses.append(simulation.step(lr * cosine(simulation.steps / total)))
            row: Row = {"epoch": epoch, "loss": float(torch.stack(losses).mean())}
            row |= {
                "score": simulation.score(),
                "bytes": simulation.bytes_sent,
                "entries": simulation.entries_chosen,
            }
            row |= {"dense": epoch * dense / recipe.times, "steps": simulation.steps / recipe.times}
            row |= {
                "d": simulation.entries,
                "activations": simulation.activations,
                "model": options.model,
            }
            row |= {"residual_bytes": simulation.residual_bytes}
            rows.append(cell | row)
            run.keep(simulation, rows, options.epochs)
    return rows


def open_simulation(options: Options, recipe: Recipe) -> Simulation:
    """The workers of a recipe."""
    data = load_examples(options)
    if recipe.early[0]:
        options = _falling(options, recipe.early, data)
    if not recipe.every:
        return Simulation(options, data, batched=True)
    return LocalSgdSimulation(options, data, recipe.every, keep_unsent=recipe.keep)


def _falling(options: Options, early: tuple[float, float], data: Data) -> Options:
    """`early`: a share of the run, and its density."""
    epoch = Shard(data.examples, options.batch, 0, options.workers, options.seed).steps
    share, density = early
    steps = round(share * options.epochs * epoch)
    return replace(options, warmup=(density,), warmup_steps=steps)


STUDY = Study(
    name="accuracy",
    title="Dense accuracy with 0.2 % of the entries",
    figures="ours: the gap that Shi et al. (2019) left, 0.6 to 0.8 points",
    cells=cells,
    measure=measure,
    page=page,
    files=("cifar10",),
    choosy=True,
)
