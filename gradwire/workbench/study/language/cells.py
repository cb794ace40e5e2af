"""The runs of `study language`: measure one, and list those that the results so far ask for."""

import functools
import hashlib
import math
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from gradwire.errors import ConfigError
from gradwire.torch_internals import keep_compiled_forms
from gradwire.workbench import models
from gradwire.workbench.data import DataError, Text
from gradwire.workbench.data.books import load_books, load_novels
from gradwire.workbench.simulate.language_run import LOOK, LanguageRun
from gradwire.workbench.study.language.choices import LINE, cell_recipe, list_cells
from gradwire.workbench.study.language.recipes import next_rates
from gradwire.workbench.study.study import Cell, Settings, StudyRow, repeatable
from gradwire.workbench.study.unfinished import UnfinishedRun

LOOKS = 4
"""Evaluations per run."""
MOST_KERNELS = 256
"""Compiled forms of the loss that torch keeps, because one process trains networks of many sizes.

After its own limit of 8 torch would go on without compiling.
"""


def more_cells(
    settings: Settings, rows: Sequence[StudyRow], pending: Sequence[Cell] = ()
) -> list[Cell]:
    """List the runs that `--extend` adds, given the rows so far.

    Rates are added by factors of 2 until the best one has a worse neighbour on both sides. Then the
    best rate gets the other seeds. Nothing is added beside runs that are still `pending`.
    """
    if not settings.extend:
        return []
    waits = {_line(cell) for cell in pending}
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if "test" in row and row["seed"] == settings.seed:
            found.setdefault(_line(row), {})[row["lr"]] = _rank(row["valid"])
    more = []
    for cell in {_line(cell): cell for cell in list_cells(settings)}.values():
        losses = found.get(_line(cell))
        if not losses or _line(cell) in waits:
            continue
        if rates := next_rates(losses):
            more += [cell | {"lr": rate} for rate in rates]
            continue
        best = min(losses, key=losses.__getitem__)
        seeds = range(settings.seed + 1, settings.seed + max(1, settings.seeds))
        more += [cell | {"lr": best, "seed": seed} for seed in seeds]
    return more


def _line(row: Mapping[str, Any]) -> str:
    """Return what runs that differ in rate and seed alone have in common."""
    return str([(name, row[name]) for name in LINE if name in row])


def _rank(loss: float) -> float:
    """Return the loss, or infinity for a run that diverged."""
    return loss if math.isfinite(loss) else math.inf


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Train the cell's recipe; return a row per evaluation, the last with the test loss.

    valid, test: the loss in nats per token. valid_byte, test_byte: per byte of the text.
    bytes: sent by all workers so far. dense: the bytes of a ring all-reduce of fp32 gradients at
    every step so far. bits: sent per entry, worker and step. text: a digest of the training text.
    """
    device = torch.device(settings.device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.set_float32_matmul_precision("high")
        keep_compiled_forms(MOST_KERNELS)
    with repeatable(settings):
        _, digest = _text(settings, cell)
        progress = _Progress(_open(settings, cell, device))
        run, saved = progress.run, UnfinishedRun(settings, cell)
        rows = saved.resume(progress)
        while run.steps < run.total:
            progress.step()
            if run.steps * LOOKS // run.total > len(rows):
                rows.append(cell | _row(progress, digest))
                if not math.isfinite(rows[-1]["loss"] + rows[-1]["valid"]):
                    # It diverged: the other steps are not worth their time.
                    rows[-1] |= {"test": math.inf, "test_byte": math.inf}
                    break
            if run.steps < run.total:
                saved.save_if_due(progress, rows, f"step {run.steps:,} of {run.total:,}")
    return rows


class _Progress:
    """A run, and the training losses since its last evaluation."""

    def __init__(self, run: LanguageRun) -> None:
        self.run, self.device = run, run.device
        self.losses: list[torch.Tensor] = []
        self._bytes_before = 0

    @property
    def bytes_sent(self) -> int:
        """Bytes that all workers have sent, also before the run was interrupted."""
        return self._bytes_before + self.run.bytes_sent

    def step(self) -> None:
        self.losses.append(self.run.step())

    def take_losses(self) -> list[torch.Tensor]:
        """Return the losses, and begin anew."""
        losses, self.losses = self.losses, []
        return losses

    def state_dict(self) -> dict[str, Any]:
        state = self.run.state_dict()
        return {"run": state, "losses": self.losses, "bytes_sent": self.bytes_sent}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.run.load_state_dict(saved["run"])
        self.losses = saved["losses"]
        # Virtual ranks count from 0 again, a cluster goes on.
        self._bytes_before = saved["bytes_sent"] - self.run.bytes_sent


@functools.lru_cache(maxsize=2)
def _read_text(name: str, folder: str | None, window: int, vocabulary: int) -> tuple[Text, str]:
    """Return a text and its digest. A process reads it once for all its cells."""
    if name == "novels":
        text = load_novels(window, vocabulary)
    elif folder is None:
        raise DataError(f"{name} is read from files: name their folder with --data-dir.")
    else:
        text = load_books(Path(folder).expanduser(), window, vocabulary)
    return text, hashlib.sha256(text.train.numpy().tobytes()).hexdigest()[:12]


def _open(settings: Settings, cell: Cell, device: torch.device) -> LanguageRun:
    """Return the run of a cell, on its text."""
    spec = models.model_spec(cell["model"])
    keywords = spec.make.keywords  # type: ignore[attr-defined]
    text, _ = _text(settings, cell)
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
        cell_recipe(cell),
        text,
        workers=cell["workers"],
        batch=batch,
        steps=cell["steps"],
        lr=cell["lr"],
        seed=cell["seed"],
        device=device,
    )


def _text(settings: Settings, cell: Cell) -> tuple[Text, str]:
    window = models.model_spec(cell["model"]).shape[0]
    return _read_text(cell["data"], settings.data_dir, window, cell.get("vocabulary", 0))


def _row(progress: _Progress, digest: str) -> StudyRow:
    """Return the numbers of a run so far."""
    run, text = progress.run, progress.run.text
    assert text.valid is not None
    sent = run.workers * run.entries * run.steps
    row: StudyRow = {
        "step": run.steps,
        "loss": mean(map(float, progress.take_losses())),
        "valid": run.score(text.valid, LOOK),
        "bytes": progress.bytes_sent,
        "dense": run.dense_bytes,
        "bits": 8 * progress.bytes_sent / sent,
        "d": run.entries,
        "seconds": run.seconds,
        "memory": _peak_memory(run.device),
        "text": digest,
    }
    if run.steps == run.total:
        row["test"] = run.score(text.test)
    scores = {name: row[name] for name in ("valid", "test") if name in row}
    return row | {
        f"{name}_byte": loss * text.tokens_per_byte(name) for name, loss in scores.items()
    }


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes of memory so far: of the GPU, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
