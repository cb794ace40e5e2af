"""The runs of `study language`: those of the study, or any that the command line names."""

import itertools
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from gradwire.errors import ConfigError, unknown
from gradwire.workbench import data, models
from gradwire.workbench.data import DataError, Text
from gradwire.workbench.simulate.language_run import LOOK, LanguageRecipe, LanguageRun
from gradwire.workbench.study.language.recipes import RATES, RECIPES
from gradwire.workbench.study.study import Cell, Settings, StudyRow, repeatable
from gradwire.workbench.study.unfinished import UnfinishedRun

LOOKS = 4
"""Evaluations per run."""

SIZES: dict[str, dict[str, int]] = {
    "gpt-tiny": {"tokens": 4_096, "steps": 700},
    "gpt-11m": {"tokens": 65_536, "steps": 1_500},
    "gpt-40m": {"tokens": 65_536, "steps": 1_000},
    "gpt-85m": {"tokens": 65_536, "steps": 1_900},
    "gpt-124m": {"tokens": 65_536, "steps": 1_900},
}
"""Tokens per step, of all workers together, and steps: one pass over the books at most."""

SMALL_CELLS = {"model": "gpt-tiny", "steps": 150, "recipe": "dense-adamw,dense-muon,muon"}
"""The choices of `--small`."""

FREE: dict[str, Callable[[str], Any]] = {
    "model": str,
    "width": int,
    "depth": int,
    "workers": int,
    "tokens": int,
    "steps": int,
    "recipe": str,
    "every": int,
    "lr": float,
}
"""The choices of the command line, each a value or a list with commas."""
CHOICES = (*FREE, "seeds")


def list_cells(settings: Settings) -> list[Cell]:
    """List a cell per run: the grid of the study, or every combination of the choices."""
    chosen: dict[str, Any] = dict(SMALL_CELLS) if settings.small else {}
    chosen |= settings.chosen
    lists = {name: _read(name, str(value)) for name, value in chosen.items()}
    lists.setdefault("model", ["gpt-11m"])
    lists.setdefault("recipe", list(RECIPES))
    lists.setdefault("workers", [4])
    seeds = range(settings.seed, settings.seed + (settings.seeds or 1))
    cells = [
        _cell(dict(zip(lists, values, strict=True)), lr, seed, settings.small)
        for seed in seeds
        for values in itertools.product(*lists.values())
        for lr in _rates(lists, values, settings.small)
    ]
    return list({str(cell): cell for cell in cells}.values())


def _read(name: str, text: str) -> list[Any]:
    """Return the values of a choice, "0.004,0.008" for instance."""
    tables: dict[str, Mapping[str, Any]] = {"model": SIZES, "recipe": RECIPES}
    known = tables.get(name)
    values = []
    for part in text.split(","):
        try:
            value = FREE[name](part.strip())
        except ValueError as error:
            raise ConfigError(f"--{name} takes numbers, got {part!r}.") from error
        if known is not None and value not in known:
            raise unknown(name, value, known)
        if known is None and value <= 0:
            raise ConfigError(f"--{name} must be above 0, got {part}.")
        values.append(value)
    return values


def _rates(lists: Mapping[str, list[Any]], values: Sequence[Any], small: bool) -> Sequence[float]:
    """Return the learning rates of a combination, one for `--small`."""
    if "lr" in lists:
        return (0.0,)
    chosen = dict(zip(lists, values, strict=True))
    rates = RATES[RECIPES[chosen["recipe"]].optimizer]
    return rates[2:3] if small else rates


def _cell(chosen: Mapping[str, Any], lr: float, seed: int, small: bool) -> Cell:
    """Return the whole cell of the choices, with the defaults of the model."""
    spec = models.model_spec(chosen["model"]).make.keywords  # type: ignore[attr-defined]
    recipe = RECIPES[chosen["recipe"]]
    cell = {"model": chosen["model"], "data": "novels" if small else "books"}
    for name in ("width", "depth"):
        cell[name] = chosen.get(name, spec[name])
    cell["workers"] = chosen["workers"]
    for name in ("tokens", "steps"):
        cell[name] = chosen.get(name, SIZES[chosen["model"]][name])
    every = recipe.rounds.get("every", 1)
    cell |= {"recipe": chosen["recipe"], "every": chosen.get("every", every)}
    if not recipe.rounds:
        cell["every"] = 1
    return cell | {"lr": chosen.get("lr", lr), "seed": seed}


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Train the cell's recipe; return a row per evaluation, the last with the test loss.

    valid, test: the loss in nats per token. bytes: sent by all workers so far. dense: the bytes of
    a ring all-reduce of fp32 gradients at every step so far. bits: sent per entry, worker and step.
    """
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.set_float32_matmul_precision("high")
    with repeatable(settings):
        run = _open(settings, cell, device)
        saved = UnfinishedRun(settings, cell)
        rows = saved.resume(run)
        losses: list[torch.Tensor] = []
        while run.steps < run.total:
            losses.append(run.step())
            if run.steps * LOOKS // run.total > len(rows):
                rows.append(cell | _row(run, losses))
                losses = []
                saved.save_if_due(run, rows, LOOKS)
    return rows


def _open(settings: Settings, cell: Cell, device: torch.device) -> LanguageRun:
    """Return the run of a cell, on its text."""
    spec = models.model_spec(cell["model"])
    keywords = spec.make.keywords  # type: ignore[attr-defined]
    text = data.load_dataset(cell["data"], settings.data_dir, spec.shape)
    assert isinstance(text, Text)
    head = keywords["width"] // keywords.get("heads", keywords["width"] // 64)
    size = {"width": cell["width"], "depth": cell["depth"], "heads": max(1, cell["width"] // head)}
    batch, rest = divmod(cell["tokens"], cell["workers"] * text.window)
    if rest or not batch:
        raise ConfigError(
            f"{cell['tokens']:,} tokens per step are no whole number of windows of {text.window} "
            f"for each of {cell['workers']} workers."
        )
    need, have = cell["steps"] * batch * cell["workers"], text.examples
    if need > have:
        raise DataError(
            f"{text.name} has {have:,} windows of {text.window}, {cell['steps']} steps of "
            f"{cell['tokens']:,} tokens take {need:,}: fewer --steps or --tokens."
        )
    return LanguageRun(
        lambda: models.build(cell["model"], **size, **text.network),
        _recipe(cell),
        text,
        workers=cell["workers"],
        batch=batch,
        steps=cell["steps"],
        lr=cell["lr"],
        seed=cell["seed"],
        device=device,
    )


def _recipe(cell: Cell) -> LanguageRecipe:
    """Return the cell's recipe, with its number of steps per round."""
    recipe = RECIPES[cell["recipe"]]
    if not recipe.rounds:
        return recipe
    return replace(recipe, rounds={**recipe.rounds, "every": cell["every"]})


def _row(run: LanguageRun, losses: Sequence[torch.Tensor]) -> StudyRow:
    """Return the numbers of a run so far."""
    assert run.text.valid is not None
    last = run.steps == run.total
    sent = run.workers * run.entries * run.steps
    row = {
        "step": run.steps,
        "loss": mean(map(float, losses)),
        "valid": run.score(run.text.valid, LOOK),
        "bytes": run.bytes_sent,
        "dense": run.dense_bytes,
        "bits": 8 * run.bytes_sent / sent,
        "d": run.entries,
        "seconds": run.seconds,
        "memory": _peak_memory(run.device),
    }
    return row | ({"test": run.score(run.text.test)} if last else {})


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes of memory so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
