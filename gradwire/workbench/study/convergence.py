"""Measure the accuracy that compression costs, with 16 virtual workers.

Repeats Figures 1 and 6 of Shi et al. (2019).
"""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import torch

from gradwire.workbench import models
from gradwire.workbench.report.chart import GREY, MORE_COLOURS, Chart, Line
from gradwire.workbench.report.curves import COLOURS
from gradwire.workbench.report.outcome import format_bytes
from gradwire.workbench.simulate.simulation import Simulation, load_examples
from gradwire.workbench.study.study import (
    Cell,
    Page,
    Runs,
    Settings,
    Study,
    StudyRow,
    StudyTable,
    group_runs,
    is_registered,
    join_names,
    repeatable,
)
from gradwire.workbench.study.unfinished import UnfinishedRun
from gradwire.workbench.train.options import cosine_factor, resolve
from gradwire.workbench.train.task import TASKS, TrainTask

DENSITY, WORKERS = 0.001, 16
RECIPES: dict[str, dict[str, Any]] = {
    "dense": {},
    "topk/allgather": {},
    "topk/union": {},
    "topk/gtopk": {},
    "randk/allgather": {},
    "randk/allgather without feedback": {"options": ("feedback=false",)},
    "gaussiank/allgather": {},
    "dgc/allgather with momentum": {"momentum_correction": True},
    "topk/sketched": {},
    "topk/gs-sgd": {},
}
"""The recipes, and the options of `gradwire train` that a recipe's name does not give.

Momentum correction changes nothing for LSTM-PTB, which trains without momentum.
"""

RUNS: dict[str, dict[str, Any]] = {
    "resnet20": {"epochs": 120, "lr": 0.4, "weight_decay": 1e-4},
    "vgg16-cifar": {"epochs": 120, "batch": 32, "lr": 0.1, "weight_decay": 5e-4},
    "lstm-ptb": {"epochs": 20},
    "lstm-an4": {"epochs": 40},
}
"""The networks, and their options of `gradwire train`."""

BATCHED_MODELS = ("resnet20",)
"""Small convolutional networks, whose workers' passes run as one batch on CUDA."""

SMALL: dict[str, dict[str, Any]] = {"fnn3": {"epochs": 4, "batch": 16, "lr": 0.1}}
SEEDS, SMALL_SEEDS = 3, 2
SLOW = ("topk/sketched", "topk/gs-sgd")
"""Recipes that take half a minute each on a CPU.

A small study runs one of the two, with one seed. They compute the same sum by different routes.
"""
MOST_DOTS = 40
"""Epochs up to which a chart has a dot per epoch."""
PAPER = {
    "topk/allgather": "-0.6 to -0.8 points",
    "gaussiank/allgather": "-0.6 to -0.8 points",
    "randk/allgather": "much slower",
}
"""The paper's text on CIFAR-10; Figures 1 and 6 show curves without numbers."""


def cells(settings: Settings) -> list[Cell]:
    """List a cell per training run, seed by seed, so that an interrupted study has pairs."""
    runs, seeds = (SMALL, SMALL_SEEDS) if settings.small else (RUNS, SEEDS)
    return [
        {"model": model, "recipe": name, "seed": settings.seed + seed, "epochs": epochs}
        for model in runs
        for epochs in [settings.epochs or runs[model]["epochs"]]
        for seed in range(settings.seeds or seeds)
        for name in RECIPES
        if _is_available(name) and not (settings.small and _leave_out(name, seed))
    ]


def _is_available(name: str) -> bool:
    return is_registered(name.partition(" ")[0])


def _leave_out(name: str, seed: int) -> bool:
    """Return True for the cells of SLOW that a small study does not run."""
    return name == SLOW[0] or (name in SLOW and seed > 0)


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Train the cell's recipe; return a row per epoch."""
    model = cell["model"]
    fields = (SMALL if settings.small else RUNS)[model] | {"model": model, "seed": cell["seed"]}
    fields |= {"method": cell["recipe"].partition(" ")[0], "epochs": cell["epochs"]}
    fields |= RECIPES[cell["recipe"]] | {"workers": WORKERS, "density": DENSITY}
    options = resolve(fields | {"data_dir": settings.data_dir, "device": settings.device})
    with repeatable(settings):
        simulation = Simulation(options, load_examples(options), batched=model in BATCHED_MODELS)
        total = options.epochs * simulation.epoch_steps
        run = UnfinishedRun(settings, cell)
        rows = run.resume(simulation)
        for epoch in range(len(rows) + 1, options.epochs + 1):
            rates = [
                options.lr * cosine_factor((simulation.steps + i) / total)
                for i in range(simulation.epoch_steps)
            ]
            loss = torch.stack([simulation.step(lr) for lr in rates]).mean()
            row = {"task": models.model_spec(model).task, "epoch": epoch, "loss": float(loss)}
            row |= {
                "score": simulation.score(),
                "bytes": simulation.bytes_sent,
                "d": simulation.entries,
                "residual_bytes": simulation.residual_bytes,
                "activations": simulation.activations,
            }
            rows.append(cell | row)
            run.save_if_due(simulation, rows, f"epoch {len(rows)} of {options.epochs}")
    return rows


def page(rows: Sequence[StudyRow]) -> Page:
    """Show scores against epochs and bytes, and the final scores, per network and run length."""
    by_recipe = sorted(rows, key=lambda row: list(RECIPES).index(row["recipe"]))
    tasks = group_runs(by_recipe, lambda row: (row["model"], row["epochs"]))
    sentences = [_summarise(*key, runs) for key, runs in tasks.items()]
    missing = [name for name in RECIPES if not _is_available(name)]
    if missing:
        sentences.append(f"Not measured, because not in this version: {join_names(missing)}.")
    tables = [_score_table(model, runs) for (model, _), runs in tasks.items()]
    charts = [
        _score_chart(*key, runs, x) for key, runs in tasks.items() for x in ("epoch", "bytes")
    ]
    return Page(" ".join(sentences), tables, charts)


def _summarise(model: str, epochs: int, runs: Runs) -> str:
    """Name the recipes that come closest to dense and stay farthest from it."""
    task = TASKS[models.model_spec(model).task]
    gaps = {
        name: mean(by_seed)
        for name in runs
        if name != "dense" and (by_seed := _score_gaps(runs, name))
    }
    if not gaps:
        return f"{model}, {epochs} epochs, has no pair of runs yet."
    order = sorted(gaps, key=gaps.__getitem__, reverse=task.higher_is_better)
    ends = [f"{name} ({_format_gap(gaps[name], task)})" for name in (order[0], order[-1])]
    return (
        f"{model}, {epochs} epochs, k = {DENSITY:g} d, {WORKERS} workers: {ends[0]} comes closest "
        f"to dense, {ends[1]} stays farthest."
    )


def _score_gaps(runs: Runs, name: str) -> list[float]:
    """Return the last score minus that of dense, by common seed."""
    dense = runs.get("dense", {})
    return [
        rows[-1]["score"] - dense[seed][-1]["score"]
        for seed, rows in runs[name].items()
        if seed in dense
    ]


def _format_gap(gap: float, task: TrainTask) -> str:
    """Return a difference of scores, in points unless the score is a perplexity."""
    return f"{gap:+.2f}" if task.measure == "test perplexity" else f"{100 * gap:+.1f} points"


def _score_chart(model: str, epochs: int, runs: Runs, x: str) -> Chart:
    """Draw the mean score over seeds against `x`, "epoch" or "bytes"."""
    task, lines = TASKS[models.model_spec(model).task], []
    percent = 1 if task.measure == "test perplexity" else 100
    for name, seeds in runs.items():
        steps = list(zip(*seeds.values(), strict=False))
        xs = [row[0][x] / (1e6 if x == "bytes" else 1) for row in steps]
        ys = [percent * mean(row["score"] for row in step) for step in steps]
        style = "dashes" if name == "dense" else "dots" if epochs <= MOST_DOTS else "line"
        lines.append(Line(name, xs, ys, style, _colour(name)))
    figure = "Figures 1 and 6" if x == "epoch" else "The same by bytes"
    label = "epoch" if x == "epoch" else "MB sent by all workers"
    unit = task.measure if percent == 1 else f"{task.measure}, %"
    caption = f"{figure}: {model}, {epochs} epochs, k = {DENSITY:g} d, {WORKERS} workers"
    return Chart(f"{model}-{epochs}-{x}", caption, label, unit, lines, log_x=x == "bytes")


def _colour(name: str) -> str:
    """Return the colour of a recipe, which is the same in every chart."""
    compressed = [recipe for recipe in RECIPES if recipe != "dense"]
    return GREY if name == "dense" else (COLOURS + MORE_COLOURS)[compressed.index(name)]


def _score_table(model: str, runs: Runs) -> StudyTable:
    task = TASKS[models.model_spec(model).task]
    body, count = [], max(map(len, runs.values()))
    for name, seeds in runs.items():
        last = [rows[-1] for rows in seeds.values()]
        scores, gaps = [row["score"] for row in last], _score_gaps(runs, name)
        spread = f"{min(map(task.words, scores))} to {max(map(task.words, scores))}"
        spread += f", {len(seeds)} of them" if len(seeds) < count else ""
        paired = _format_gap(mean(gaps), task) if gaps and name != "dense" else ""
        if len(gaps) > 1 and name != "dense":
            paired += f" +- {_format_gap(stdev(gaps), task).lstrip('+')}"
        sent = mean(row["bytes"] for row in last)
        dense = mean(rows[-1]["bytes"] for rows in runs["dense"].values()) if "dense" in runs else 0
        share = f"{dense / sent:.0f}x fewer" if dense and name != "dense" else ""
        body.append([name, task.words(mean(scores)), spread, paired, PAPER.get(name, "")])
        body[-1] += [format_bytes(sent), share]
    any_row = next(iter(next(iter(runs.values())).values()))[-1]
    columns = ["", task.measure, "seeds", "against dense", "paper, against dense", "bytes", ""]
    note = (
        f"{count} seed{'s' * (count != 1)}, {any_row['epochs']} epochs, d = {any_row['d']:,}; all "
    )
    note += f"{WORKERS} residuals take {format_bytes(any_row['residual_bytes'])}. "
    note += "Pairs share seed and order of "
    kinds = {
        run[-1].get("activations", "fp32") for seeds in runs.values() for run in seeds.values()
    }
    note += f"examples. Activations: {join_names(sorted(kinds))}. "
    note += "The paper: 120 epochs of CIFAR-10, VGG-16 and ResNet-20."
    return StudyTable(f"{model} after {any_row['epochs']} epochs", columns, body, note)


STUDY = Study(
    name="convergence",
    title="What compression costs in accuracy",
    figures="Shi et al. (2019), Figures 1 and 6",
    cells=cells,
    measure=measure,
    page=page,
    files=("cifar10", "ptb", "an4"),
    choices=("seeds", "epochs"),
)
