"""Where a run stands on disk: `checkpoint/trainer.pt` and every rank's compressor state.

trainer.pt names the folder of the compressor states that belong to it and is replaced last, in one
go: a crash at any moment leaves the old checkpoint or the new one, whole.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import gradwire
from gradwire.errors import ExchangeError, StateError
from gradwire.files import replace
from gradwire.train.folder import CHECKPOINT
from gradwire.train.place import Place

if TYPE_CHECKING:
    from gradwire.train.replica import Replica

TRAINER, VERSION = "trainer.pt", 2


@dataclass
class Position:
    """How far a run has come. Nothing random is kept: every step draws from its own seed.

    `offset` counts steps within `epoch`. The sums are over all ranks; loss is summed since the last
    metrics line.
    """

    step: int = 0
    epoch: int = 0
    offset: int = 0
    workers: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_dense: int = 0
    loss_sum: float = 0.0
    loss_steps: int = 0
    score: float | None = None

    def with_workers(self, workers: int, steps: int) -> "Position":
        """The same place in the epoch's permutation for another number of workers."""
        seen = self.offset * self.workers
        offset = min(-(-seen // workers), steps)
        return Position(**(asdict(self) | {"workers": workers, "offset": offset}))


def save(folder: Path, place: Place, position: Position, replica: "Replica") -> None:
    """Writes a checkpoint (collective)."""
    target = folder / CHECKPOINT
    wires = f"wire-{position.step:08d}"
    gradwire.save(replica.wire, target / wires)
    failure = ""
    if place.first:
        content = {
            "version": VERSION,
            "position": asdict(position),
            "model": replica.module.state_dict(),
            "optimizer": replica.optimizer.state_dict(),
            "wire": wires,
        }
        try:
            replace(target / TRAINER, lambda out: torch.save(content, out))
        except OSError as error:
            failure = f"{target / TRAINER} could not be written: {error.strerror}"
        else:
            _clear(target, wires)
    if failure := place.share(failure):
        raise ExchangeError(f"{failure}. The last checkpoint is untouched")


def _clear(target: Path, wires: str) -> None:
    """Removes what older checkpoints, and writers that were killed, have left."""
    for old in target.glob("wire-*"):
        if old.name != wires:
            shutil.rmtree(old, ignore_errors=True)
    for old in target.glob(f"{TRAINER}.*"):
        old.unlink(missing_ok=True)


def exists(folder: Path) -> bool:
    """Whether the run has a checkpoint."""
    return (folder / CHECKPOINT / TRAINER).is_file()


def load(folder: Path) -> dict[str, Any]:
    """What `save` wrote but for the compressor states, on CPU; tensors and plain values only."""
    path = folder / CHECKPOINT / TRAINER
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise StateError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise StateError(f"{path} is not a checkpoint of version {VERSION}. Start a new run.")
    return content


def load_wire(folder: Path, content: dict[str, Any], wire: Any) -> None:
    """Gives `wire` the state that belongs to the checkpoint (collective)."""
    gradwire.load(wire, folder / CHECKPOINT / content["wire"])
