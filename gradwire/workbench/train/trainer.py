"""The training loop of one run on one rank: steps, records and checkpoints."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from gradwire.hashing import blake2b_seed
from gradwire.workbench.data import Data, Shard
from gradwire.workbench.train import checkpoint
from gradwire.workbench.train.checkpoint import Position
from gradwire.workbench.train.evaluate import (
    evaluate_model,
    parameters_digest,
    replicas_identical,
)
from gradwire.workbench.train.flag import FOLDER, Flag
from gradwire.workbench.train.folder import RESULT, write_json
from gradwire.workbench.train.gradients import record_gradient
from gradwire.workbench.train.metrics import Metrics, Record
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.progress import make_progress
from gradwire.workbench.train.replica import Replica
from gradwire.workbench.train.worker import Worker


@dataclass(frozen=True)
class RunLimits:
    """Limits and side products of one call of `gradwire train`. None changes a step."""

    max_steps: Annotated[
        int | None,
        Flag(FOLDER, "Stop after this number of steps in all, with a checkpoint.", minimum=1),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        Flag(
            FOLDER,
            "Steps between checkpoints, besides those at the ends of epochs.",
            minimum=1,
        ),
    ] = None
    record_gradients: Annotated[
        int | None,
        Flag(
            FOLDER,
            "Steps between records of gradient + residual on rank 0 (with --method dense, of the "
            "gradient). They are kept in gradients/, for bench compress --gradient.",
            minimum=1,
        ),
    ] = None
    quiet: Annotated[bool, Flag(FOLDER, "Show no progress.", short="-q")] = False


class Trainer:
    """Trainer of `options` in `folder`, from its checkpoint if there is one (collective)."""

    def __init__(
        self, options: Options, folder: Path, data: Data, worker: Worker, limits: RunLimits
    ) -> None:
        self.options, self.folder, self.data = options, folder, data
        self.worker, self.limits = worker, limits
        self.task = options.task
        self.shard = Shard(data.examples, options.batch, worker.rank, worker.world, options.seed)
        saved = checkpoint.load(folder, worker)
        network = {**options.size, **data.network}
        self.replica = Replica(options, network, worker, folder, saved, self.shard.steps)
        self.position = self._start_position(saved)
        self.end = self._last_step()
        self._loss = torch.zeros((), dtype=torch.float64, device=worker.device)
        if worker.first:
            self._loss += self.position.loss_sum
            self.metrics = Metrics(folder, self.position.step, self.task.column)
        # The counts of a resumed wire go on from its checkpoint, and the position has them already.
        before = self.replica.wire.stats()
        self._before = (before.bytes_sent, before.bytes_dense)
        self._carried = (self.position.bytes_sent, self.position.bytes_dense)
        wanted = worker.first and not limits.quiet
        self.progress = make_progress(options.title, self.task, self.end, options.epochs, wanted)

    def _start_position(self, saved: dict[str, Any] | None) -> Position:
        """Return the position of the checkpoint, or that of step 0 without a checkpoint."""
        if saved is None:
            return Position(workers=self.worker.world)
        with checkpoint.misfit_errors(self.folder):
            position = Position(**saved["position"])
        return position.with_workers(self.worker.world, self.shard.steps)

    def _last_step(self) -> int:
        """Return the step at which this call ends."""
        position = self.position
        left = (self.options.epochs - position.epoch) * self.shard.steps - position.offset
        end = position.step + max(0, left)
        return end if self.limits.max_steps is None else min(end, self.limits.max_steps)

    def run(self) -> dict[str, Any]:
        """Train, write result.json, and return its content. `stopped`: a signal ended the run."""
        stopped = False
        self._lap_start = time.perf_counter()
        while not stopped and self.position.step < self.end:
            stopped = self._epoch()
        result = self._result(stopped)
        if self.worker.first:
            write_json(self.folder / RESULT, result)
            self.metrics.close()
        self.progress.close()
        self.replica.close()
        return result

    def _epoch(self) -> bool:
        """Train to the end of the epoch or of this call; return True after a signal to stop."""
        position, every = self.position, self.limits.checkpoint_every
        for indices in self.shard.batches(position.epoch, position.offset):
            self._step(indices)
            self._record_gradient()
            stop = self.worker.agreed_to_stop()
            ends = position.offset == self.shard.steps
            last = position.step >= self.end
            if ends:
                self._end_epoch()
            elif self._record_is_due():
                self._record(None)
            if ends or last or stop or (every and position.step % every == 0):
                self._checkpoint()
            if last or stop:
                return stop
        return False

    def _record_is_due(self) -> bool:
        """Return True if a line of metrics is due, but not just before that of the epoch's end."""
        offset, every = self.position.offset, self.options.log_every
        return offset % every == 0 and self.shard.steps - offset >= every

    def _step(self, indices: torch.Tensor) -> None:
        """Take one step. All that is random in it depends on its own seed, so none is saved."""
        position = self.position
        seed = blake2b_seed(self.options.seed, position.epoch, position.offset, self.worker.rank)
        torch.manual_seed(seed)
        self.replica.set_lr(self.options.lr_at(position.epoch + position.offset / self.shard.steps))
        self._loss += self.replica.step(self.data.training_batch(indices, seed))
        position.loss_steps += 1
        position.offset += 1
        position.step += 1
        self.progress.step(position.step)

    def _record_gradient(self) -> None:
        """Write u of the first rank if it is due. The time is not training time."""
        every, step = self.limits.record_gradients, self.position.step
        if every and step % every == 0 and self.worker.first:
            self._lap()
            record_gradient(self.folder, step, self.replica.wire)
            self._lap_start = time.perf_counter()

    def _end_epoch(self) -> None:
        """Evaluate the model, write a record, and move on to the next epoch."""
        position = self.position
        self._lap()
        if position.epoch + 1 == self.options.epochs:
            self.replica.end_round()
        with self.replica.shared():
            model = self.replica.module
            position.score = evaluate_model(model, self.task, self.data, self.worker)
        self._lap_start = time.perf_counter()
        position.epoch, position.offset = position.epoch + 1, 0
        self._record(position.score)

    def _record(self, score: float | None) -> None:
        """Write a line of metrics (collective)."""
        position, world = self.position, self.worker.world
        density, norm = self._update_sums()
        record = Record(
            step=position.step,
            epoch=position.epoch,
            loss=round(position.loss_sum / (world * max(1, position.loss_steps)), 6),
            score=score,
            bytes_sent=position.bytes_sent,
            bytes_dense=position.bytes_dense,
            achieved_density=round(density / world, 8),
            residual_norm=round(norm / world, 6),
            lr=self.replica.optimizer.param_groups[0]["lr"],
            seconds=round(position.seconds, 3),
        )
        self._loss.zero_()
        position.loss_sum, position.loss_steps = 0.0, 0
        if self.worker.first:
            self.metrics.write(record)
        self.progress.record(record)

    def _update_sums(self) -> tuple[float, float]:
        """Update the position's sums; return the sums of density and residual norm (collective)."""
        self._lap()
        stats = self.replica.wire.stats()
        loss, sent, dense, density, norm = self.worker.sum(
            float(self._loss),
            stats.bytes_sent - self._before[0],
            stats.bytes_dense - self._before[1],
            stats.achieved_density,
            stats.residual_norm,
        )
        self.position.loss_sum = loss
        self.position.bytes_sent = self._carried[0] + int(sent)
        self.position.bytes_dense = self._carried[1] + int(dense)
        return density, norm

    def _lap(self) -> None:
        """Add the time since the last lap to the position; wait for the device first."""
        if self.worker.device.type == "cuda":
            torch.cuda.synchronize(self.worker.device)
        now = time.perf_counter()
        self.position.seconds += now - self._lap_start
        self._lap_start = now

    def _checkpoint(self) -> None:
        """Save a checkpoint (collective). The time is not training time."""
        self._update_sums()
        checkpoint.save(self.folder, self.worker, self.position, self.replica)
        self._lap_start = time.perf_counter()

    def _result(self, stopped: bool) -> dict[str, Any]:
        """Return the content of result.json (collective)."""
        position = self.position
        with self.replica.shared():
            own_digest = parameters_digest(self.replica.module)
        same = replicas_identical(own_digest, self.worker)
        last = self.metrics.last if self.worker.first else {}
        return {
            "title": self.options.title,
            "complete": position.epoch >= self.options.epochs,
            "stopped": stopped,
            "steps": position.step,
            "epochs": position.epoch,
            "loss": last.get("loss"),
            self.task.column: position.score,
            "bytes_sent": position.bytes_sent,
            "bytes_dense": position.bytes_dense,
            "achieved_density": last.get("achieved_density"),
            "residual_norm": last.get("residual_norm"),
            "seconds": round(position.seconds, 3),
            "stage_seconds": {k: round(v, 3) for k, v in self.replica.wire.stats().seconds.items()},
            "parameters": sum(p.numel() for p in self.replica.module.parameters()),
            "parameters_sha256": own_digest,
            "replicas_identical": same,
        }
