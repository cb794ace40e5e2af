"""Checkpoints of a run: `checkpoint/trainer.pt` and the compressor state of every rank.

trainer.pt names the folder of the compressor states that belong to it. It is replaced last and in
one go, so a crash at any moment leaves the old checkpoint or the new one, whole. Its last 32 bytes
are the sha256 of the bytes before them; torch.load ignores these 32 bytes.
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
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.together import gather_words, raise_together
from gradwire.state.saved.files import replace_file
from gradwire.workbench.train.folder import CHECKPOINT, SAVED
from gradwire.workbench.train.worker import Worker

if TYPE_CHECKING:
    from gradwire.workbench.train.replica import Replica

TRAINER, VERSION = "trainer.pt", 3
_DIGEST_BYTES = 32
_CPU = torch.device("cpu")


@dataclass
class Position:
    """The progress of a run. No random state is kept, because every step draws from its own seed.

    offset: steps within `epoch`. workers: the number of ranks that took them.
    seconds: training time. bytes_sent, bytes_dense: sums over all ranks since the start.
    loss_sum, loss_steps: sum over all ranks, and steps, since the last line of metrics.
    score: that of the last test, None before the first.
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
        """Return the position for another number of workers, as far into the epoch's examples.

        `steps` are those of an epoch with `workers` workers. A started step counts as done.
        """
        seen = self.offset * self.workers
        offset = min(-(-seen // workers), steps)
        return Position(**(asdict(self) | {"workers": workers, "offset": offset}))


def save(folder: Path, worker: Worker, position: Position, replica: "Replica") -> None:
    """Write a checkpoint (collective). A write that fails is an ExchangeError on every rank."""
    target = folder / CHECKPOINT
    wires = f"wire-{position.step:08d}"
    gradwire.save(replica.wire, target / wires)
    failure = ""
    if worker.first:
        try:
            # In a run with rounds each rank's own weights are in its compressor state.
            with replica.shared():
                content = {
                    "version": VERSION,
                    "position": asdict(position),
                    "model": replica.module.state_dict(),
                    "optimizer": replica.optimizer.state_dict(),
                    "wire": wires,
                }
                replace_file(target / TRAINER, lambda out: _write(content, out))
        except OSError as error:
            failure = f"{target / TRAINER} could not be written: {error.strerror}"
        else:
            _remove_older(target, wires)
            _note_step(folder, position.step)
    if failure := worker.share(failure):
        raise ExchangeError(f"{failure}. The last checkpoint is untouched")


def _remove_older(target: Path, wires: str) -> None:
    """Remove the files of older checkpoints, and of writers that were killed."""
    for old in target.glob("wire-*"):
        if old.name != wires:
            shutil.rmtree(old, ignore_errors=True)
    for old in target.glob(f"{TRAINER}.*"):
        old.unlink(missing_ok=True)


def _note_step(folder: Path, step: int) -> None:
    """Write the step beside the checkpoint, to notice later that a checkpoint is gone."""
    text = json.dumps({"step": step}).encode() + b"\n"
    with contextlib.suppress(OSError):
        replace_file(folder / SAVED, lambda out: out.write(text))


def exists(folder: Path) -> bool:
    """Return True if the run has a checkpoint."""
    return (folder / CHECKPOINT / TRAINER).is_file()


def load(folder: Path, worker: Worker) -> dict[str, Any] | None:
    """Return the content of trainer.pt, on CPU; None without a checkpoint (collective).

    Rank 0 decides if there is a checkpoint. A file that is damaged or missing on one rank, or
    differs from that of rank 0, is a StateError on every rank.
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
    group = DistributedGroup(worker.control, _CPU)
    raise_together(group, failure, StateError, _CPU)
    digests = gather_words(group, digest.hex(), _CPU)
    if differing := [rank for rank, other in enumerate(digests) if other != digests[0]]:
        raise StateError(
            f"{path}: rank {differing[0]} has another one than rank 0. Copy one to all."
        )
    return content


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the content and its sha256. Only tensors and plain values are unpickled."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}.") from error
    packed, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if hashlib.sha256(packed).digest() != digest:
        raise StateError(
            f"{path} is damaged, or of a version before {VERSION}: its sha256 does not fit. "
            f"Start a new run."
        )
    try:
        content = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
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
    """Append the sha256 of the file's content."""
    out.seek(0)
    out.write(hashlib.sha256(out.read()).digest())


@contextlib.contextmanager
def misfit_errors(folder: Path) -> Iterator[None]:
    """Turn any error of torch in this context into a StateError of one line.

    The content of the checkpoint then does not fit the model or the optimiser. Every rank has the
    same content and raises the same error.
    """
    try:
        yield
    except GradwireError:
        raise
    except Exception as error:  # torch raises many kinds
        path = folder / CHECKPOINT / TRAINER
        raise StateError(f"{path} is of another model or run: {one_line(error)}") from error


def load_wire(folder: Path, content: dict[str, Any], wire: Any) -> None:
    """Load the compressor state that belongs to the checkpoint into `wire` (collective)."""
    gradwire.load(wire, folder / CHECKPOINT / content["wire"])
