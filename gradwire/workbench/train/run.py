"""Do a training job on every rank: the main run, then the runs of --compare."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError, GradwireError, StateError
from gradwire.workbench import data, models
from gradwire.workbench.train import beginning, lock
from gradwire.workbench.train import folder as folders
from gradwire.workbench.train.job import TrainJob
from gradwire.workbench.train.launch import launch
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.trainer import Trainer
from gradwire.workbench.train.worker import Worker, under_torchrun

_NEEDED = {"title": str, "epochs": int, "steps": int, "complete": bool, "replicas_identical": bool}
"""The entries that the result.json of a finished run must have, and their types."""


@dataclass(frozen=True)
class TrainOutcome:
    """The outcome of a training job.

    results: the content of each run's result.json. stopped: True: a signal ended the job.
    first: True on rank 0, and in the process that started the ranks.
    """

    folder: Path
    results: tuple[dict[str, Any], ...]
    stopped: bool
    first: bool = True


def train(job: TrainJob) -> TrainOutcome:
    """Do `job` on every rank; under torchrun only rank 0's outcome is `first`."""
    options = job.options
    if under_torchrun():
        return launch(_work, job, workers=options.workers, device=options.device)
    with lock.locked(job.folder):
        return _with_own_workers(job)


def _with_own_workers(job: TrainJob) -> TrainOutcome:
    """Start the ranks and do `job`, unless every run is finished already."""
    options = job.options
    _open_folder(job)
    results = [finished_result(run, folder) for run, folder in job.runs()]
    if None not in results:
        return TrainOutcome(job.folder, tuple(filter(None, results)), stopped=False)
    try:
        return launch(_work, job, workers=options.workers, device=options.device)
    except GradwireError:
        folders.discard_unused(job.folder)
        raise


def _open_folder(job: TrainJob) -> None:
    """Prepare the locked folder, or refuse it; print a note on each run that starts again."""
    if not job.resumed:
        folders.open_new(job.folder, job.overwrite)
    else:
        notes = [_note_on_beginning(job, run, folder) for run, folder in job.runs()]
        for note in filter(None, notes):
            print(f"note: {note}", flush=True)
    folders.write_config(job.folder, job.options, job.command)


def _note_on_beginning(job: TrainJob, run: Options, folder: Path) -> str:
    """Return a note for the user on the beginning of a run; "" for a finished run."""
    return "" if finished_result(run, folder) else beginning.beginning_note(folder, job.folder)


def _work(worker: Worker, job: TrainJob) -> TrainOutcome:
    """Do this rank's part of the job, in a locked folder."""
    with contextlib.ExitStack() as until_the_end:
        if not worker.own_workers:
            job = _share_job(worker, job, until_the_end)
        elif worker.first:
            lock.join_lock(job.folder)
        return _train_all(worker, job)


def _train_all(worker: Worker, job: TrainJob) -> TrainOutcome:
    """Train every run that is not finished; stop after a run that a signal ended."""
    options = job.options
    spec = models.model_spec(options.model)
    examples = data.load_dataset(options.data, options.data_dir, spec.shape).to(worker.device)
    results = []
    for run, folder in job.runs():
        result = worker.share(finished_result(run, folder))
        if result is None:
            if worker.first and folder != job.folder:
                folders.write_config(folder, run, job.command)
            worker.barrier()
            result = Trainer(run, folder, examples, worker, job.limits).run()
        results.append(result)
        if results[-1]["stopped"]:
            break
    return TrainOutcome(job.folder, tuple(results), results[-1]["stopped"], worker.first)


def finished_result(run: Options, folder: Path) -> dict[str, Any] | None:
    """Return the result of a finished run; None if steps are left."""
    result = folders.read_result(folder)
    if result is None:
        return None
    for name, kind in _NEEDED.items():
        if not isinstance(result.get(name), kind):
            raise StateError(f"{folder / folders.RESULT}: {name} is {result.get(name)!r:.40}.")
    return result | {"stopped": False} if result["epochs"] >= run.epochs else None


def _share_job(worker: Worker, job: TrainJob, until_the_end: contextlib.ExitStack) -> TrainJob:
    """Return the job with rank 0's folder, locked and prepared by rank 0 (collective).

    Each rank of torchrun has read the command itself; the name of the folder has the time in it.
    """
    refusal = ""
    if worker.first:
        try:
            until_the_end.enter_context(lock.locked(job.folder))
            _open_folder(job)
        except GradwireError as error:
            refusal = str(error)
    if refusal := worker.share(refusal):
        raise ConfigError(refusal)
    return dataclasses.replace(job, folder=Path(worker.share(str(job.folder))))
