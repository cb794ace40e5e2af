"""Runs of a language model at equal tokens: recipes, rows, and the table and chart of them."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

from gradwire.workbench import data, models
from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.report.outcome import size
from gradwire.workbench.simulate.local_simulation import LocalSimulation
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.study.study import Cell, Row, Settings, Table, repeatable
from gradwire.workbench.train.options import Options, resolve
from gradwire.workbench.train.rates import cosine

WORKERS, LOOKS, SEEDS = 4, 10, 3
NAMES = {
    "shakespeare": "tiny shakespeare, letters",
    "wikitext2": "WikiText-2, words",
    "phrases": "embedded phrases, words",
}
BATCH = {
    ("gpt-micro", "shakespeare"): 32,
    ("gpt-micro", "wikitext2"): 8,
    ("gpt-nano", "shakespeare"): 16,
    ("gpt-nano", "wikitext2"): 4,
    ("gpt-nano", "phrases"): 4,
}
"""Windows a worker and step. The learning rate is warmed up over a tenth of a run, then falls like
a cosine; weight decay is 0.1."""

Runs = dict[str, dict[int, list[Row]]]
"""Recipe, seed, and the rows of that run."""


@dataclass(frozen=True)
class Recipe:
    """A way to train: the largest learning rate of gpt-nano and of gpt-micro, options of `gradwire
    train`, and the arguments of `local_steps` where there are local steps."""

    lr: float
    micro: float = 1e-2
    given: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] | None = None


DENSE = Recipe(2e-3, 2e-2, {"method": "dense"})
"""AdamW with a dense all-reduce at every step. Half of these learning rates is 0.6 % worse on tiny
shakespeare, with both models."""


def cells_of(
    settings: Settings, tasks: Iterable[tuple[str, str]], recipes: Iterable[str]
) -> list[Cell]:
    """A run of each recipe for each model and data set; seed by seed, so that a study that is
    stopped has pairs."""
    chosen = [("gpt-nano", "phrases")] if settings.small else list(tasks)
    return [
        {"model": model, "data": name, "recipe": recipe, "seed": settings.seed + seed}
        for seed in range(1 if settings.small else SEEDS)
        for model, name in chosen
        for recipe in recipes
    ]


def follow(settings: Settings, cell: Cell, recipe: Recipe, steps: int) -> Iterator[Row]:
    """Trains for `steps` steps; a row at each of the looks.

    bytes are those that all workers sent, dense those of a dense all-reduce at every step.
    """
    options = options_of(settings, cell, recipe)
    shape = models.model_spec(options.model).shape
    text = data.load_dataset(options.data, options.data_dir, shape)
    with repeatable(settings):
        simulation = Simulation(options, text)
        if recipe.local is not None:
            simulation = LocalSimulation(options, text, steps, **recipe.local)
        tokens = WORKERS * options.batch * shape[0]
        dense, losses = 2 * (WORKERS - 1) * 4 * simulation.entries, []
        for step in range(1, steps + 1):
            with tensor_cores(simulation.device):
                losses.append(simulation.step(options.lr * cosine((step - 1) / steps)))
            if step * LOOKS % steps == 0:
                row = {"step": step, "tokens": step * tokens, "loss": mean(map(float, losses))}
                row |= {
                    "test": math.log(simulation.score()),
                    "bytes": simulation.bytes_sent,
                    "lr": options.lr,
                }
                yield cell | row | {"dense": step * dense, "d": simulation.entries}
                losses = []


def options_of(settings: Settings, cell: Cell, recipe: Recipe) -> Options:
    """The options of a run on the cell's data. On the embedded data, whose network is small, the
    learning rate is three times the recipe's."""
    place = cell["model"], cell["data"]
    given: dict[str, Any] = {"batch": BATCH[place], "weight_decay": 0.1, **recipe.given}
    given |= {name: cell[name] for name in ("model", "data", "seed")} | {"workers": WORKERS}
    given["lr"] = recipe.lr * (3 if settings.small else 1)
    if cell["model"] == "gpt-micro":
        given["lr"] = recipe.micro
    return resolve(given | {"data_dir": settings.data_dir, "device": settings.device})


def tensor_cores(device: torch.device) -> torch.autocast:
    """Matrix products of the passes in bf16 on CUDA. Casts are not kept: a graph would keep those
    of old weights."""
    on = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=on, cache_enabled=False)


def by_task(rows: Sequence[Row]) -> dict[str, Runs]:
    """The runs of every model and data set."""
    found: dict[str, Runs] = {}
    for row in sorted(rows, key=lambda row: row["seed"]):
        task = f"{row['model']} on {NAMES[row['data']]}"
        runs = found.setdefault(task, {}).setdefault(row["recipe"], {})
        runs.setdefault(row["seed"], []).append(row)
    return found


def gaps(runs: Runs, name: str) -> list[float]:
    """How much higher the last test loss is than dense AdamW's, as a share of that, by seed."""
    dense = runs.get("dense", {})
    return [
        rows[-1]["test"] / dense[seed][-1]["test"] - 1
        for seed, rows in runs[name].items()
        if seed in dense
    ]


def lowest_gaps(runs: Runs, name: str) -> list[float]:
    """The same of the lowest test losses: of a run that overfits the last one says little."""
    dense = runs.get("dense", {})
    return [_lowest(rows) / _lowest(dense[s]) - 1 for s, rows in runs[name].items() if s in dense]


def _lowest(rows: Sequence[Row]) -> float:
    return float(min(row["test"] for row in rows))


def saving(runs: Runs, name: str) -> float:
    """How many times fewer bytes than dense were sent."""
    last = [rows[-1] for rows in runs[name].values()]
    return sum(row["dense"] for row in last) / sum(row["bytes"] for row in last)


def table(task: str, runs: Runs) -> Table:
    """The last losses, and what was sent for them."""
    body = []
    for recipe, seeds in runs.items():
        last = [rows[-1] for rows in seeds.values()]
        apart = [] if recipe == "dense" else gaps(runs, recipe)
        numbers = [f"{mean(row[kind] for row in last):.3f}" for kind in ("loss", "test")]
        best = mean(map(_lowest, seeds.values()))
        sent = size(round(mean(row["bytes"] for row in last)))
        fewer = f"{saving(runs, recipe):,.0f}x fewer" if apart else ""
        body.append([recipe, f"{last[0]['lr']:g}", *numbers, spread(apart), f"{best:.3f}"])
        body[-1] += [str(len(last)), sent, fewer]
    some = next(iter(next(iter(runs.values())).values()))[-1]
    columns = ["", "lr", "training loss", "test loss", "against dense", "best", "seeds"]
    note = (
        f"{WORKERS} workers, {some['step']:,} steps, {some['tokens']:,} tokens, d = {some['d']:,}. "
        "Means over seeds; against dense: the mean of the pairs, and their range. All recipes of a "
        "seed see the same tokens in the same order; best is the lowest test loss of all looks."
    )
    return Table(task, [*columns, "bytes sent", ""], body, note)


def spread(apart: Sequence[float]) -> str:
    """ "+1.5 % (+1.2 to +1.8)" """
    if not apart:
        return ""
    ends = f" ({100 * min(apart):+.1f} to {100 * max(apart):+.1f})" if len(apart) > 1 else ""
    return f"{100 * mean(apart):+.1f} %{ends}"


def chart(study: str, task: str, runs: Runs) -> Chart:
    """Test loss against steps, the mean over seeds."""
    lines = []
    for recipe, seeds in runs.items():
        looks = list(zip(*seeds.values(), strict=False))
        style, color = ("dashes", GREY) if recipe == "dense" else ("dots", "")
        losses = [mean(row["test"] for row in look) for look in looks]
        lines.append(Line(recipe, [look[0]["step"] for look in looks], losses, style, color))
    row = next(iter(runs[next(iter(runs))].values()))[0]
    return Chart(f"{study}-{row['model']}-{row['data']}", task, "step", "test loss", lines)
