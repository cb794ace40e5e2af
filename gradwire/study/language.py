"""Runs of a language model at equal tokens: rows, and the table and chart that compare them."""

import math
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import Any

import torch

from gradwire import data, models
from gradwire.report.chart import GREY, Chart, Line
from gradwire.report.outcome import size
from gradwire.study.convergence import rate
from gradwire.study.crew import Crew
from gradwire.study.local_crew import LocalCrew
from gradwire.study.study import Cell, Row, Settings, Table, repeatable
from gradwire.train.options import Options, resolve

MODEL, WORKERS, LOOKS = "gpt-nano", 4, 5
NAMES = {
    "shakespeare": "tiny shakespeare, letters",
    "wikitext2": "WikiText-2, words",
    "phrases": "embedded phrases, words",
}
SMALL: dict[str, Any] = {"batch": 4, "weight_decay": 0.1}
FULL: dict[str, Any] = {"batch": 16, "weight_decay": 0.1}
"""Of every run; the learning rate is warmed up over a tenth of it, then falls like a cosine."""


def options_of(settings: Settings, cell: Cell, **given: Any) -> Options:
    """The options of a run on the cell's data."""
    given = (SMALL if settings.small else FULL) | given
    given |= {"model": MODEL, "workers": WORKERS, "seed": cell["seed"], "data": cell["data"]}
    return resolve(given | {"data_dir": settings.data_dir, "device": settings.device})


def follow(
    settings: Settings, cell: Cell, options: Options, steps: int, local: dict[str, Any] | None
) -> Iterator[Row]:
    """Trains for `steps` steps, with `local_steps(**local)` if given; a row at each of the looks.

    bytes are those that all workers sent, dense those of a dense all-reduce at every step.
    """
    text = data.load(options.data, options.data_dir, models.spec(options.model).shape)
    with repeatable(settings):
        crew = Crew(options, text) if local is None else LocalCrew(options, text, steps, **local)
        window = models.spec(options.model).shape[0]
        tokens, losses = WORKERS * options.batch * window, []
        dense = 2 * (WORKERS - 1) * 4 * crew.entries
        for step in range(1, steps + 1):
            with tensor_cores(crew.device):
                losses.append(crew.step(options.lr * rate((step - 1) / steps)))
            if step * LOOKS % steps == 0:
                row = {"step": step, "tokens": step * tokens, "loss": mean(map(float, losses))}
                row |= {"test": math.log(crew.score()), "bytes": crew.bytes_sent}
                yield cell | row | {"dense": step * dense, "d": crew.entries}
                losses = []


def tensor_cores(device: torch.device) -> torch.autocast:
    """Matrix products of the passes in bf16 on CUDA. Casts are not kept: a graph would keep those
    of old weights."""
    on = device.type == "cuda"
    return torch.autocast(device.type, torch.bfloat16, enabled=on, cache_enabled=False)


def by_data(rows: Sequence[Row]) -> dict[str, dict[str, list[Row]]]:
    """Data set, recipe, and the rows of that run."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["data"], {}).setdefault(row["recipe"], []).append(row)
    return found


def gap(runs: dict[str, list[Row]], name: str) -> float | None:
    """How much higher the last test loss is than dense AdamW's, as a share of that."""
    if "dense" not in runs:
        return None
    return runs[name][-1]["test"] / runs["dense"][-1]["test"] - 1


def table(name: str, runs: dict[str, list[Row]]) -> Table:
    """The last losses, and what was sent for them."""
    body = []
    for recipe, rows in runs.items():
        last, apart = rows[-1], gap(runs, recipe)
        against = "" if apart is None or recipe == "dense" else f"{100 * apart:+.1f} %"
        best = min(row["test"] for row in rows)
        times = last["dense"] / last["bytes"]
        fewer = "" if recipe == "dense" else f"{times:,.0f}x fewer"
        numbers = [f"{last['loss']:.3f}", f"{last['test']:.3f}", against, f"{best:.3f}"]
        body.append([recipe, *numbers, size(last["bytes"]), fewer])
    some = next(iter(runs.values()))[-1]
    columns = ["", "training loss", "test loss", "against dense", "best", "bytes sent", ""]
    note = (
        f"{WORKERS} workers, {some['step']:,} steps, {some['tokens']:,} tokens, "
        f"d = {some['d']:,}, seed {some['seed']}. All recipes see the same tokens in the same "
        "order; best is the lowest test loss of all looks."
    )
    return Table(NAMES[name], columns, body, note)


def chart(study: str, name: str, runs: dict[str, list[Row]]) -> Chart:
    """Test loss against steps."""
    lines = [
        Line(
            recipe,
            [row["step"] for row in rows],
            [row["test"] for row in rows],
            "dashes" if recipe == "dense" else "dots",
            GREY if recipe == "dense" else "",
        )
        for recipe, rows in runs.items()
    ]
    return Chart(f"{study}-{name}", f"GPT on {NAMES[name]}", "step", "test loss", lines)
