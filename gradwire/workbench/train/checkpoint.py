"""Where a run stands on disk: `checkpoint/trainer.pt` and every rank's compressor state.

trainer.pt names the folder of the compressor states that belong to it and is replaced last, in one
go: a crash at any moment leaves the old checkpoint or the new one, whole. Its last 32 bytes are the
sha256 of the rest, which torch.load does not read.
"""

import contextlib
import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

import gradwire
from gradwire.errors import ExchangeError, GradwireError, StateError, one_line
from gradwire.ranks.group import DistributedGroup
from gradwire.ranks.together import gather_words, raise_together
from gradwire.state.saved.files import replace
from gradwire.workbench.train.folder import CHECKPOINT, SAVED
from gradwire.workbench.train.worker import Worker

if TYPE_CHECKING:
    from gradwire.workbench.train.replica import Replica

TRAINER, VERSION = "trainer.pt", 3
DIGEST = 32
CPU = torch.device("cpu")


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


def save(folder: Path, worker: Worker, position: Position, replica: "Replica") -> None:
    """Writes a checkpoint (collective)."""
    target = folder / CHECKPOINT
    wires = f"wire-{position.step:08d}"
    gradwire.save(replica.wire, target / wires)
    failure = ""
    if worker.first:
        content = {
            "version": VERSION,
            "position": asdict(position),
            "model": replica.module.state_dict(),
            "optimizer": replica.optimizer.state_dict(),
            "wire": wires,
        }
        try:
            replace(target / TRAINER, lambda out: _write(content, out))
        except OSError as error:
            failure = f"{target / TRAINER} could not be written: {error.strerror}"
        else:
            _clear(target, wires)
            _note(folder, position.step)
    if failure := worker.share(failure):
        raise ExchangeError(f"{failure}. The last checkpoint is untouched")


def _clear(target: Path, wires: str) -> None:
    """Removes what older checkpoints, and writers that were killed, have left."""
    for old in target.glob("wire-*"):
        if old.name != wires:
            shutil.rmtree(old, ignore_errors=True)
    for old in target.glob(f"{TRAINER}.*"):
        old.unlink(missing_ok=True)


def _note(folder: Path, step: int) -> None:
    """Writes beside the checkpoint that there is one: without it nobody could tell later."""
    text = json.dumps({"step": step}).encode() + b"\n"
    with contextlib.suppress(OSError):
        replace(folder / SAVED, lambda out: out.write(text))


def exists(folder: Path) -> bool:
    """Whether the run has a checkpoint."""
    return (folder / CHECKPOINT / TRAINER).is_file()


def load(folder: Path, worker: Worker) -> dict[str, Any] | None:
    """What `save` wrote but for the compressor states, on CPU; None without a checkpoint.

    Collective: whether there is one is rank 0's word, and a file that is damaged, missing or
    another on one rank is an error on every rank.
    """
    if not worker.share(exists(folder)):
        return None
    path = folder / CHECKPOINT / TRAINER
    content: dict[str, Any] = {}
    digest, failure = b"", None
    try:
        content, digest = _read(path)
    except StateError as error:
        failure = error
    group = DistributedGroup(worker.control, CPU)
    raise_together(group, failure, StateError, CPU)
    digests = gather_words(group, digest.hex(), CPU)
    if odd := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise StateError(f"{path}: rank {odd[0]} has another one than rank 0. Copy one to all.")
    return content


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """The content and its sha256; tensors and plain values only."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}.") from error
    rest, digest = raw[:-DIGEST], raw[-DIGEST:]
    if hashlib.sha256(rest).digest() != digest:
        raise StateError(
            f"{path} is damaged, or of a version before {VERSION}: its sha256 does not fit. "
            f"Start a new run."
        )
    try:
        content = torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds
        raise StateError(f"{path} cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise StateError(f"{path} is not a checkpoint of version {VERSION}. Start a new run.")
    if not re.fullmatch(r"wire-\d+", str(content.get("wire"))):
        raise StateError(f"{path} names no folder of compressor states. Start a new run.")
    return content, digest


def _write(content: dict[str, Any], out: BinaryIO) -> None:
    torch.save(content, out)
    _seal(out)


def _seal(out: BinaryIO) -> None:
    """Appends the sha256 of what the file holds."""
    out.seek(0)
    out.write(hashlib.sha256(out.read()).digest())


@contextlib.contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Within this context a content that fits no such run is one line; alike on every rank."""
    try:
        yield
    except GradwireError:
        raise
    except Exception as error:  # torch raises many kinds
        path = folder / CHECKPOINT / TRAINER
        raise StateError(f"{path} is of another model or run: {one_line(error)}") from error


def load_wire(folder: Path, content: dict[str, Any], wire: Any) -> None:
    """Gives `wire` the state that belongs to the checkpoint (collective)."""
    gradwire.load(wire, folder / CHECKPOINT / content["wire"])
