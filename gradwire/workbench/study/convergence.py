"""Figures 1 and 6: what compression costs in accuracy, on 16 virtual workers."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import torch

from gradwire.workbench import models
from gradwire.workbench.report.chart import GREY, MORE, Chart, Line
from gradwire.workbench.report.curves import COLOURS
from gradwire.workbench.report.outcome import size
from gradwire.workbench.simulate.simulation import Simulation, load_examples
from gradwire.workbench.study.study import (
    Cell,
    Page,
    Row,
    Settings,
    Study,
    Table,
    listed,
    repeatable,
    there,
)
from gradwire.workbench.study.unfinished import Unfinished
from gradwire.workbench.train.options import resolve
from gradwire.workbench.train.rates import cosine
from gradwire.workbench.train.task import TASKS, Task

DENSITY, WORKERS = 0.001, 16
WANTED: dict[str, dict[str, Any]] = {
    "dense": {},
    "topk/allgather": {},
    "topk/union": {},
    "topk/gtopk": {},
    "randk/allgather": {},
    "randk/allgather without feedback": {"method_options": ("feedback=false",)},
    "gaussiank/allgather": {},
    "dgc/allgather with momentum": {"momentum_correction": True},
    "topk/sketched": {},
    "topk/gs-sgd": {},
}
"""What is compared, and the options of `gradwire train` that its name does not say. LSTM-PTB has no
momentum, so there is none to correct."""

RUNS: dict[str, dict[str, Any]] = {
    "resnet20": {"epochs": 120, "lr": 0.4, "weight_decay": 1e-4},
    "vgg16-cifar": {"epochs": 120, "batch": 32, "lr": 0.1, "weight_decay": 5e-4},
    "lstm-ptb": {"epochs": 20},
    "lstm-an4": {"epochs": 40},
}
"""The learning rate is warmed up over a tenth of the run, then falls like a cosine."""

BATCHED_MODELS = ("resnet20",)
"""Small networks of convolutions: on CUDA the passes of their workers are one batch."""

SMALL: dict[str, dict[str, Any]] = {"fnn3": {"epochs": 4, "batch": 16, "lr": 0.1}}
SEEDS, SMALL_SEEDS = 3, 2
SLOW = ("topk/sketched", "topk/gs-sgd")
"""Half a minute each on a CPU. A small study has one of them, once: they differ in how a sum
travels, not in what it is."""
FEW = 40
"""Epochs up to which each has a dot."""
PAPER = {
    "topk/allgather": "-0.6 to -0.8 points",
    "gaussiank/allgather": "-0.6 to -0.8 points",
    "randk/allgather": "much slower",
}
"""What the text says of CIFAR-10; Figures 1 and 6 have curves only."""


def cells(settings: Settings) -> list[Cell]:
    """A training run each, seed by seed, so that a study that is stopped has pairs."""
    runs, seeds = (SMALL, SMALL_SEEDS) if settings.small else (RUNS, SEEDS)
    return [
        {"model": model, "recipe": name, "seed": settings.seed + seed, "epochs": epochs}
        for model in runs
        for epochs in [settings.epochs or runs[model]["epochs"]]
        for seed in range(settings.seeds or seeds)
        for name in WANTED
        if _there(name) and not (settings.small and _leave_out(name, seed))
    ]


def _there(name: str) -> bool:
    return there(name.partition(" ")[0])


def _leave_out(name: str, seed: int) -> bool:
    return name == SLOW[0] or (name in SLOW and seed > 0)


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """A row an epoch."""
    model = cell["model"]
    given = (SMALL if settings.small else RUNS)[model] | {"model": model, "seed": cell["seed"]}
    given |= {"method": cell["recipe"].partition(" ")[0], "epochs": cell["epochs"]}
    given |= WANTED[cell["recipe"]] | {"workers": WORKERS, "density": DENSITY}
    options = resolve(given | {"data_dir": settings.data_dir, "device": settings.device})
    with repeatable(settings):
        simulation = Simulation(options, load_examples(options), batched=model in BATCHED_MODELS)
        total = options.epochs * simulation.epoch_steps
        run = Unfinished(settings, cell)
        rows = run.begin(simulation)
        for epoch in range(len(rows) + 1, options.epochs + 1):
            rates = [
                options.lr * cosine((simulation.steps + i) / total)
                for i in range(simulation.epoch_steps)
            ]
            loss = torch.stack([simulation.step(lr) for lr in rates]).mean()
            row = {"task": models.model_spec(model).task, "epoch": epoch, "loss": float(loss)}
            row |= {
                "score": simulation.score(),
                "bytes": simulation.bytes_sent,
                "d": simulation.entries,
            }
            row |= {
                "residual_bytes": simulation.residual_bytes,
                "activations": simulation.activations,
            }
            rows.append(cell | row)
            run.keep(simulation, rows, options.epochs)
    return rows


Runs = dict[str, dict[int, list[Row]]]
"""Recipe, seed, and the rows of that run."""


def page(rows: Sequence[Row]) -> Page:
    """Score against epochs and bytes, and final numbers with their spread; a length at a time."""
    found: dict[tuple[str, int], Runs] = {}
    for row in sorted(rows, key=lambda row: list(WANTED).index(row["recipe"])):
        runs = found.setdefault((row["model"], row["epochs"]), {})
        runs.setdefault(row["recipe"], {}).setdefault(row["seed"], []).append(row)
    says = [_says(*key, runs) for key, runs in found.items()]
    missing = [name for name in WANTED if not _there(name)]
    if missing:
        says.append(f"Not measured, because not in this version: {listed(missing)}.")
    tables = [_table(model, runs) for (model, _), runs in found.items()]
    charts = [_chart(*key, runs, x) for key, runs in found.items() for x in ("epoch", "bytes")]
    return Page(" ".join(says), tables, charts)


def _says(model: str, epochs: int, runs: Runs) -> str:
    """Who comes closest to dense, and who stays farthest."""
    task = TASKS[models.model_spec(model).task]
    gaps = {name: mean(_gaps(runs, name)) for name in runs if name != "dense" and _gaps(runs, name)}
    if not gaps:
        return f"{model}, {epochs} epochs, has no pair of runs yet."
    order = sorted(gaps, key=gaps.__getitem__, reverse=task.higher_is_better)
    ends = [f"{name} ({words(gaps[name], task)})" for name in (order[0], order[-1])]
    return (
        f"{model}, {epochs} epochs, k = {DENSITY:g} d, {WORKERS} workers: {ends[0]} comes closest "
        f"to dense, {ends[1]} stays farthest."
    )


def _gaps(runs: Runs, name: str) -> list[float]:
    """The last score less that of dense, for every seed that both have."""
    dense, own = runs.get("dense", {}), runs[name]
    return [own[seed][-1]["score"] - dense[seed][-1]["score"] for seed in own if seed in dense]


def words(gap: float, task: Task) -> str:
    """A difference of scores: points for shares, as it is for perplexity."""
    return f"{gap:+.2f}" if task.measure == "test perplexity" else f"{100 * gap:+.1f} points"


def _chart(model: str, epochs: int, runs: Runs, x: str) -> Chart:
    """The mean over seeds."""
    task, lines = TASKS[models.model_spec(model).task], []
    percent = 1 if task.measure == "test perplexity" else 100
    for name, seeds in runs.items():
        steps = list(zip(*seeds.values(), strict=False))
        xs = [row[0][x] / (1e6 if x == "bytes" else 1) for row in steps]
        ys = [percent * mean(row["score"] for row in step) for step in steps]
        style = "dashes" if name == "dense" else "dots" if epochs <= FEW else "line"
        lines.append(Line(name, xs, ys, style, _colour(name)))
    figure = "Figures 1 and 6" if x == "epoch" else "The same by bytes"
    label = "epoch" if x == "epoch" else "MB sent by all workers"
    unit = task.measure if percent == 1 else f"{task.measure}, %"
    caption = f"{figure}: {model}, {epochs} epochs, k = {DENSITY:g} d, {WORKERS} workers"
    return Chart(f"{model}-{epochs}-{x}", caption, label, unit, lines, log_x=x == "bytes")


def _colour(name: str) -> str:
    """The same in every chart, whatever else is in it."""
    compressed = [each for each in WANTED if each != "dense"]
    return GREY if name == "dense" else (COLOURS + MORE)[compressed.index(name)]


def _table(model: str, runs: Runs) -> Table:
    task = TASKS[models.model_spec(model).task]
    body, count = [], max(map(len, runs.values()))
    for name, seeds in runs.items():
        last = [rows[-1] for rows in seeds.values()]
        scores, gaps = [row["score"] for row in last], _gaps(runs, name)
        spread = f"{min(map(task.words, scores))} to {max(map(task.words, scores))}"
        spread += f", {len(seeds)} of them" if len(seeds) < count else ""
        paired = words(mean(gaps), task) if gaps and name != "dense" else ""
        if len(gaps) > 1 and name != "dense":
            paired += f" +- {words(stdev(gaps), task).lstrip('+')}"
        sent = mean(row["bytes"] for row in last)
        dense = mean(rows[-1]["bytes"] for rows in runs["dense"].values()) if "dense" in runs else 0
        share = f"{dense / sent:.0f}x fewer" if dense and name != "dense" else ""
        body.append([name, task.words(mean(scores)), spread, paired, PAPER.get(name, "")])
        body[-1] += [size(sent), share]
    some = next(iter(next(iter(runs.values())).values()))[-1]
    columns = ["", task.measure, "seeds", "against dense", "paper, against dense", "bytes", ""]
    note = f"{count} seed{'s' * (count != 1)}, {some['epochs']} epochs, d = {some['d']:,}; all "
    note += (
        f"{WORKERS} residuals take {size(some['residual_bytes'])}. Pairs share seed and order of "
    )
    kinds = {
        run[-1].get("activations", "fp32") for seeds in runs.values() for run in seeds.values()
    }
    note += f"examples. Activations: {listed(sorted(kinds))}. "
    note += "The paper: 120 epochs of CIFAR-10, VGG-16 and ResNet-20."
    return Table(f"{model} after {some['epochs']} epochs", columns, body, note)


STUDY = Study(
    name="convergence",
    title="What compression costs in accuracy",
    figures="Shi et al. (2019), Figures 1 and 6",
    cells=cells,
    measure=measure,
    page=page,
    files=("cifar10", "ptb", "an4"),
    choosy=True,
)
