"""The numbers of a run while it goes: metrics.jsonl, and TensorBoard where it is installed."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError, StateError, one_line
from gradwire.observe import TensorBoard
from gradwire.workbench.train.folder import METRICS, TENSORBOARD


@dataclass(frozen=True)
class Record:
    """A line of metrics.jsonl: the state after `step`.

    loss: the mean over all ranks since the line before.
    score: only at the end of an epoch. Its column has the name of the task's measure.
    bytes_sent, bytes_dense: sums over all ranks since the start.
    seconds: time of training only, without evaluation and checkpoints.
    """

    step: int
    epoch: int
    loss: float
    score: float | None
    bytes_sent: int
    bytes_dense: int
    achieved_density: float
    residual_norm: float
    lr: float
    seconds: float


class Metrics:
    """Writer of records. It drops the lines after `step` that a broken-off run has written."""

    def __init__(self, folder: Path, step: int, column: str = "test_accuracy") -> None:
        self._column = column
        path = folder / METRICS
        kept = [r for r in read_records(path) if r["step"] <= step]
        scratch = path.with_name(path.name + ".tmp")
        scratch.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf-8")
        os.replace(scratch, path)
        self.last: dict[str, Any] = kept[-1] if kept else {}
        self._file = path.open("a", encoding="utf-8")
        self._board = _board(folder, step)

    def write(self, record: Record) -> None:
        """Append a line and flush it."""
        self.last = {self._column if k == "score" else k: v for k, v in asdict(record).items()}
        self._file.write(json.dumps(self.last) + "\n")
        self._file.flush()
        if self._board is not None:
            known = {k: v for k, v in self.last.items() if v is not None and k != "step"}
            self._board.log(known, record.step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without a last line that was cut off."""
    if not path.is_file():
        return []
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise StateError(f"{path}, line {number}: {one_line(error)}") from error
        if not _is_record(record):
            raise StateError(f"{path}, line {number}: {line[:60]!r} is no record of a step")
        records.append(record)
    return records


def _is_record(record: Any) -> bool:
    """Return True for numbers by name that include the step."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("step"), int)
        and all(
            v is None or (isinstance(v, int | float) and _fits_float(v)) for v in record.values()
        )
    )


def _fits_float(value: float) -> bool:
    """Return True if a float can hold the number; NaN counts as a number."""
    return isinstance(value, float) or abs(value) < 2**63


def _board(folder: Path, step: int) -> TensorBoard | None:
    """Return a TensorBoard writer, or None where TensorBoard is not installed."""
    try:
        return TensorBoard(folder / TENSORBOARD, purge_step=step + 1 if step else None)
    except ConfigError:
        return None
