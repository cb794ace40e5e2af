"""The numbers of a run as they come: metrics.jsonl, and TensorBoard where it is installed."""

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
    """One line: the state after `step`. `loss` is the mean since the line before, over all ranks;
    bytes are of all ranks together since the start; `score` comes at the end of an epoch and is
    written under the name of what is measured.
    `seconds` counts training only, without evaluation and checkpoints."""

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
    """Writes records; continues after `step`, dropping what a broken-off run wrote beyond it."""

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
        """Appends a line and flushes it."""
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
    """The lines of a metrics.jsonl; a last line that was cut off is left out."""
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
    """Numbers by name, the step among them."""
    return (
        isinstance(record, dict)
        and isinstance(record.get("step"), int)
        and all(v is None or (isinstance(v, int | float) and _small(v)) for v in record.values())
    )


def _small(value: float) -> bool:
    """Whether a float can hold it; NaN is a number too."""
    return isinstance(value, float) or abs(value) < 2**63


def _board(folder: Path, step: int) -> TensorBoard | None:
    """TensorBoard, where it is installed."""
    try:
        return TensorBoard(folder / TENSORBOARD, purge_step=step + 1 if step else None)
    except ConfigError:
        return None
