"""The results of a task: each recipe at its best learning rate."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from gradwire.workbench.study.language.choices import CHANGES, SIZES, changes_of
from gradwire.workbench.study.language.recipes import RECIPES, next_rates
from gradwire.workbench.study.study import StudyRow

TASK = ("model", "width", "depth", "data", "text", "vocabulary", "workers", "tokens", "steps")
"""Columns that the runs of one table have in common."""
DENSE = ("dense-adamw", "dense-muon")


@dataclass(frozen=True)
class Contender:
    """A recipe, with what was changed in it, at its best learning rate.

    rates: every learning rate that was run, with its loss on the validation text.
    last: the last row of each seed at the best of them.
    """

    name: str
    rates: Mapping[float, float]
    last: Sequence[StudyRow]

    @property
    def lr(self) -> float:
        return float(self.last[0]["lr"])

    @property
    def test(self) -> float:
        return mean(row["test"] for row in self.last)

    @property
    def valid(self) -> float:
        return mean(row["valid"] for row in self.last)

    @property
    def fewer(self) -> float:
        """Bytes of a dense all-reduce at every step over the bytes sent."""
        sent = sum(row["bytes"] for row in self.last)
        return sum(row["dense"] for row in self.last) / sent if sent else math.inf

    @property
    def bits(self) -> float:
        """Bits sent per entry, worker and step."""
        return mean(row["bits"] for row in self.last)

    @property
    def round_bits(self) -> float:
        """Bits per entry of both halves of an exchange: 64 H over the factor of fewer bytes."""
        return 64 * float(self.last[0]["every"]) / self.fewer

    @property
    def untried(self) -> list[float]:
        """Rates beside the best one that were not run."""
        return next_rates(self.rates)

    def loss_at(self, factor: float) -> float | None:
        """Return the validation loss at `factor` times the best rate; None if it was not run."""
        wanted = factor * self.lr
        near = (loss for lr, loss in self.rates.items() if abs(lr / wanted - 1) < 0.01)
        return next(near, None)

    @property
    def command(self) -> str:
        """The command that repeats these runs."""
        row = self.last[0]
        words = ["gradwire", "study", "language", "--model", str(row["model"])]
        for name in ("width", "depth", "vocabulary", "workers", "tokens", "steps"):
            if name in row and (name == "workers" or row[name] != _usual(row, name)):
                words += [f"--{name}", str(row[name])]
        words += ["--recipe", str(row["recipe"])]
        for name, value in changes_of(row).items():
            words += [f"--{name.replace('_', '-')}", _short(value)]
        seeds = [row["seed"] for row in self.last]
        words += ["--lr", _short(self.lr), "--seed", str(min(seeds)), "--seeds", str(len(seeds))]
        return shlex.join([*words, "--small"] if row["data"] == "novels" else words)


def _usual(row: StudyRow, name: str) -> Any:
    """Return a choice that the command may leave out."""
    from gradwire.workbench import models

    keywords = models.model_spec(row["model"]).make.keywords  # type: ignore[attr-defined]
    return {**keywords, **SIZES[row["model"]]}.get(name)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def find_tasks(rows: Sequence[StudyRow]) -> list[list[Contender]]:
    """Return the contenders of each task, the tasks in an order for readers."""
    tasks: dict[tuple[object, ...], list[StudyRow]] = {}
    for row in rows:
        if "test" in row:
            tasks.setdefault(tuple(row.get(name) for name in TASK), []).append(row)
    ordered = sorted(tasks.values(), key=lambda ended: (ended[0]["d"], ended[0]["workers"]))
    return [_contenders(ended) for ended in ordered]


def _contenders(ended: Sequence[StudyRow]) -> list[Contender]:
    """Return each recipe at the learning rate with the lowest loss on the validation text."""
    runs: dict[str, dict[float, dict[int, StudyRow]]] = {}
    for row in ended:
        runs.setdefault(_name(row), {}).setdefault(row["lr"], {})[row["seed"]] = row
    contenders = []
    for name, by_rate in runs.items():
        # Rates are compared by the seeds that all of them have, if there are any.
        common = set.intersection(*(set(seeds) for seeds in by_rate.values()))
        losses = {
            lr: mean(
                _rank(row["valid"]) for seed, row in seeds.items() if seed in (common or seeds)
            )
            for lr, seeds in by_rate.items()
        }
        best = min(losses, key=losses.__getitem__)
        last = [row for _, row in sorted(by_rate[best].items())]
        contenders.append(Contender(name, dict(sorted(losses.items())), last))
    return sorted(contenders, key=lambda contender: _rank(contender.test))


def _rank(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _name(row: StudyRow) -> str:
    """Return the recipe, with what was changed in it."""
    words = {"every": "H ="} | {name: name.replace("_", " ") for name in CHANGES}
    changes = [f"{words[name]} {_short(value)}" for name, value in changes_of(row).items()]
    return ", ".join([row["recipe"], *changes])


def recipes_not_run(contenders: Sequence[Contender]) -> list[str]:
    """Return the recipes of the study that this task has no run of, as they are."""
    return [name for name in RECIPES if not any(c.name == name for c in contenders)]
