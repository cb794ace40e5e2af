"""Train small language models by recipes, and compare the losses at equal tokens.

The studies `adam` and `local_steps` share these recipes, rows, table and chart.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

from gradwire.workbench import data, models
from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.report.outcome import format_bytes
from gradwire.workbench.simulate.local_simulation import LocalSimulation
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.study.study import (
    Cell,
    Runs,
    Settings,
    StudyRow,
    StudyTable,
    group_runs,
    repeatable,
)
from gradwire.workbench.train.options import Options, cosine_factor, resolve

WORKERS, EVALUATIONS, SEEDS = 4, 10, 3
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
"""Windows of text per worker and step."""


@dataclass(frozen=True)
class LanguageRecipe:
    """A way to train.

    lr, micro: the largest learning rates for gpt-nano and gpt-micro.
    options: options of `gradwire train`.
    local: the arguments of `local_steps`, or None to exchange gradients.
    """

    lr: float
    micro: float = 1e-2
    options: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] | None = None


# Half of these learning rates gives a loss 0.6 % higher on tiny shakespeare, with both models.
DENSE = LanguageRecipe(2e-3, 2e-2, {"method": "dense"})
"""AdamW with a dense all-reduce at every step."""


def list_cells(
    settings: Settings, tasks: Iterable[tuple[str, str]], recipes: Iterable[str]
) -> list[Cell]:
    """List a cell per model, data set, recipe and seed.

    Seeds come one after another, so that an interrupted study has pairs.
    """
    chosen = [("gpt-nano", "phrases")] if settings.small else list(tasks)
    return [
        {"model": model, "data": name, "recipe": recipe, "seed": settings.seed + seed}
        for seed in range(1 if settings.small else SEEDS)
        for model, name in chosen
        for recipe in recipes
    ]


def train_rows(
    settings: Settings, cell: Cell, recipe: LanguageRecipe, steps: int
) -> Iterator[StudyRow]:
    """Train for `steps` steps, and yield a row at each evaluation.

    bytes: sent by all workers so far. dense: the bytes of an all-reduce at every step so far.
    """
    options = _make_options(settings, cell, recipe)
    shape = models.model_spec(options.model).shape
    text = data.load_dataset(options.data, options.data_dir, shape)
    with repeatable(settings):
        simulation = Simulation(options, text)
        if recipe.local is not None:
            simulation = LocalSimulation(options, text, steps, **recipe.local)
        tokens = WORKERS * options.batch * shape[0]
        dense, losses = 2 * (WORKERS - 1) * 4 * simulation.entries, []
        for step in range(1, steps + 1):
            with _bf16_products(simulation.device):
                # The rate is warmed up over a tenth of the run, then falls like a cosine.
                losses.append(simulation.step(options.lr * cosine_factor((step - 1) / steps)))
            if step * EVALUATIONS % steps == 0:
                row = {"step": step, "tokens": step * tokens, "loss": mean(map(float, losses))}
                row |= {
                    "test": math.log(simulation.score()),
                    "bytes": simulation.bytes_sent,
                    "lr": options.lr,
                }
                yield cell | row | {"dense": step * dense, "d": simulation.entries}
                losses = []


def _make_options(settings: Settings, cell: Cell, recipe: LanguageRecipe) -> Options:
    """Return the options of a run on the cell's data."""
    batch = BATCH[cell["model"], cell["data"]]
    fields: dict[str, Any] = {"batch": batch, "weight_decay": 0.1, **recipe.options}
    fields |= {name: cell[name] for name in ("model", "data", "seed")} | {"workers": WORKERS}
    # The network for the embedded data is small and takes three times the rate.
    fields["lr"] = recipe.lr * (3 if settings.small else 1)
    if cell["model"] == "gpt-micro":
        fields["lr"] = recipe.micro
    return resolve(fields | {"data_dir": settings.data_dir, "device": settings.device})


def _bf16_products(device: torch.device) -> torch.autocast:
    """Return a context in which matrix products are in bf16 on CUDA."""
    on = device.type == "cuda"
    # Without a cache, because a captured graph would reuse the casts of old weights.
    return torch.autocast(device.type, torch.bfloat16, enabled=on, cache_enabled=False)


def runs_by_task(rows: Sequence[StudyRow]) -> dict[str, Runs]:
    """Return the runs of each model and data set."""
    by_seed = sorted(rows, key=lambda row: row["seed"])
    return group_runs(by_seed, lambda row: f"{row['model']} on {NAMES[row['data']]}")


def loss_gaps(runs: Runs, name: str) -> list[float]:
    """Return the relative difference of the last test loss from dense AdamW's, by common seed."""
    dense = runs.get("dense", {})
    return [
        rows[-1]["test"] / dense[seed][-1]["test"] - 1
        for seed, rows in runs[name].items()
        if seed in dense
    ]


def lowest_loss_gaps(runs: Runs, name: str) -> list[float]:
    """Return the relative difference of the lowest test loss from dense AdamW's, by common seed.

    The last loss of a run that overfits says little.
    """
    dense = runs.get("dense", {})
    return [_lowest(rows) / _lowest(dense[s]) - 1 for s, rows in runs[name].items() if s in dense]


def _lowest(rows: Sequence[StudyRow]) -> float:
    return float(min(row["test"] for row in rows))


def times_fewer_bytes(runs: Runs, name: str) -> float:
    """Return the bytes of dense over the bytes sent."""
    last = [rows[-1] for rows in runs[name].values()]
    return sum(row["dense"] for row in last) / sum(row["bytes"] for row in last)


def loss_table(task: str, runs: Runs) -> StudyTable:
    """Return a table of the last losses and the bytes sent."""
    body = []
    for recipe, seeds in runs.items():
        last = [rows[-1] for rows in seeds.values()]
        gaps = [] if recipe == "dense" else loss_gaps(runs, recipe)
        numbers = [f"{mean(row[kind] for row in last):.3f}" for kind in ("loss", "test")]
        best = mean(map(_lowest, seeds.values()))
        sent = format_bytes(round(mean(row["bytes"] for row in last)))
        fewer = f"{times_fewer_bytes(runs, recipe):,.0f}x fewer" if gaps else ""
        body.append([recipe, f"{last[0]['lr']:g}", *numbers, _format_gaps(gaps), f"{best:.3f}"])
        body[-1] += [str(len(last)), sent, fewer]
    any_row = next(iter(next(iter(runs.values())).values()))[-1]
    columns = ["", "lr", "training loss", "test loss", "against dense", "best", "seeds"]
    note = (
        f"{WORKERS} workers, {any_row['step']:,} steps, {any_row['tokens']:,} tokens, "
        f"d = {any_row['d']:,}. "
        "Means over seeds; against dense: the mean of the pairs, and their range. All recipes of a "
        "seed see the same tokens in the same order; best is the lowest test loss of all looks."
    )
    return StudyTable(task, [*columns, "bytes sent", ""], body, note)


def _format_gaps(gaps: Sequence[float]) -> str:
    """Return the mean and the range, as "+1.5 % (+1.2 to +1.8)"."""
    if not gaps:
        return ""
    ends = f" ({100 * min(gaps):+.1f} to {100 * max(gaps):+.1f})" if len(gaps) > 1 else ""
    return f"{100 * mean(gaps):+.1f} %{ends}"


def loss_chart(study: str, task: str, runs: Runs) -> Chart:
    """Return a chart of the test loss against steps, as means over seeds."""
    lines = []
    for recipe, seeds in runs.items():
        # An interrupted seed has fewer rows; the chart ends where the shortest run ends.
        evaluations = list(zip(*seeds.values(), strict=False))
        style, color = ("dashes", GREY) if recipe == "dense" else ("dots", "")
        losses = [mean(row["test"] for row in seed_rows) for seed_rows in evaluations]
        steps = [seed_rows[0]["step"] for seed_rows in evaluations]
        lines.append(Line(recipe, steps, losses, style, color))
    row = next(iter(runs[next(iter(runs))].values()))[0]
    return Chart(f"{study}-{row['model']}-{row['data']}", task, "step", "test loss", lines)
