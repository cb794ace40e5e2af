"""Save long training runs, so that an interrupted study goes on in the middle of a cell."""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import torch

from gradwire.errors import StateError, one_line
from gradwire.state.saved import files
from gradwire.workbench.study.study import Cell, Settings, StudyRow

PAUSE = 30.0
"""Seconds between saves, at least. Each save also prints a line of progress."""
SAVE_SHARE = 0.05
"""Share of the time that saving may take."""


class Resumable(Protocol):
    """A trainer whose state can be saved."""

    device: torch.device

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, saved: dict[str, Any]) -> None: ...


class UnfinishedRun:
    """The saved run of one cell: its rows so far, and the state of its trainer.

    Nothing is saved if `settings` names no folder for unfinished runs.
    """

    def __init__(self, settings: Settings, cell: Cell) -> None:
        self._cell = cell
        self._path = _path(settings, cell)
        self._saved = time.monotonic()
        self._cost = 0.0

    def resume(self, trainer: Resumable) -> list[StudyRow]:
        """Return the saved rows, and restore the trainer as it was when they were saved."""
        if self._path is None or not self._path.is_file():
            return []
        try:
            saved = torch.load(self._path, map_location=trainer.device, weights_only=True)
            rows: list[StudyRow] = json.loads(saved["rows"])
            trainer.load_state_dict(saved["trainer"])
        except Exception as error:
            raise StateError(
                f"{self._path} cannot be read: {one_line(error)}. Remove it, and that run begins "
                "anew."
            ) from error
        self._tell(f"goes on after {saved.get('position', 'a save')}")
        return rows

    def save_if_due(self, trainer: Resumable, rows: list[StudyRow], position: str) -> None:
        """Save the run if the last save is long enough ago; `position` says how far it is.

        An error of the disk is printed and does not end the run.
        """
        if self._path is None or time.monotonic() - self._saved < max(
            PAUSE, self._cost / SAVE_SHARE
        ):
            return
        begin = time.monotonic()
        words = {"rows": json.dumps(rows), "position": position}
        content = {**words, "trainer": trainer.state_dict()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            files.replace_file(self._path, lambda out: torch.save(content, out))
        except OSError as error:
            self._tell(f"{self._path} cannot be written: {error.strerror}")
        self._saved = time.monotonic()
        self._cost = self._saved - begin
        self._tell(position)

    def _tell(self, words: str) -> None:
        cell = ", ".join(str(value) for value in self._cell.values())
        print(f"{cell}: {words}", file=sys.stderr, flush=True)


def remove_unfinished(settings: Settings, cell: Cell) -> None:
    """Remove the saved run of a cell whose rows are in the study's folder."""
    path = _path(settings, cell)
    if path is not None:
        path.unlink(missing_ok=True)


def _path(settings: Settings, cell: Cell) -> Path | None:
    """Return the file of a cell's run, named by a hash of the cell."""
    if not settings.unfinished:
        return None
    digest = hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()
    return Path(settings.unfinished, f"{digest[:16]}.pt")
