"""Long runs on disk: a study that was stopped goes on in the middle of a cell."""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from gradwire.errors import StateError, one_line
from gradwire.state.saved import files
from gradwire.workbench.study.study import Cell, Row, Settings

PAUSE = 30.0
"""Seconds from one save, and one line on how far it is, to the next."""
SHARE = 0.05
"""Of the time goes into saving, at most."""


class Resumable(Protocol):
    """Whoever trains."""

    device: torch.device

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


class Unfinished:
    """The run of one cell: its rows so far and its trainer, where `settings` names a folder."""

    def __init__(self, settings: Settings, cell: Cell) -> None:
        self._cell = cell
        self._path = _path(settings, cell)
        self._saved = time.monotonic()
        self._cost = 0.0

    def begin(self, trainer: Resumable) -> list[Row]:
        """The rows that there are; `trainer` is then where it was after the last of them."""
        if self._path is None or not self._path.is_file():
            return []
        try:
            saved = torch.load(self._path, map_location=trainer.device, weights_only=True)
            rows: list[Row] = json.loads(saved["rows"])
            trainer.load_state_dict(saved["trainer"])
        except Exception as error:
            raise StateError(
                f"{self._path} cannot be read: {one_line(error)}. Remove it, and that run begins "
                "anew."
            ) from error
        self._tell(f"goes on after epoch {len(rows)}")
        return rows

    def keep(self, trainer: Resumable, rows: list[Row], of: int) -> None:
        """Saves now and then; there is a row for each of `of` epochs, in time.

        A disk that is full costs what was not saved, not the run.
        """
        if self._path is None or time.monotonic() - self._saved < max(PAUSE, self._cost / SHARE):
            return
        begin = time.monotonic()
        content = {"rows": json.dumps(rows), "trainer": trainer.state_dict()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(self._path, lambda out: torch.save(content, out))
        except OSError as error:
            self._tell(f"{self._path} cannot be written: {error.strerror}")
        self._saved = time.monotonic()
        self._cost = self._saved - begin
        self._tell(f"epoch {len(rows)} of {of}")

    def _tell(self, words: str) -> None:
        what = ", ".join(str(value) for value in self._cell.values())
        print(f"{what}: {words}", file=sys.stderr, flush=True)


def forget(settings: Settings, cell: Cell) -> None:
    """The cell is done: its rows are where those of all cells are."""
    path = _path(settings, cell)
    if path is not None:
        path.unlink(missing_ok=True)


def _path(settings: Settings, cell: Cell) -> Path | None:
    if not settings.unfinished:
        return None
    digest = hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()
    return Path(settings.unfinished, f"{digest[:16]}.pt")
