"""The main job: a run and those it is compared with, on every rank."""

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

NEEDED = {"title": str, "epochs": int, "steps": int, "complete": bool, "replicas_identical": bool}
"""Of a result.json, what is said about a run that has ended."""


@dataclass(frozen=True)
class TrainOutcome:
    """What came of a plan: the folder, each run's result.json, whether a signal ended it."""

    folder: Path
    results: tuple[dict[str, Any], ...]
    stopped: bool
    first: bool = True


def train(job: TrainJob) -> TrainOutcome:
    """Does what `job` says on every rank; under torchrun only rank 0's outcome is `first`."""
    options = job.options
    if under_torchrun():
        return launch(_work, job, workers=options.workers, device=options.device)
    with lock.locked(job.folder):
        return _with_own_workers(job)


def _with_own_workers(job: TrainJob) -> TrainOutcome:
    """The same where this process starts the ranks, if there is anything left to do."""
    options = job.options
    _open(job)
    results = [finished_result(run, folder) for run, folder in job.runs()]
    if None not in results:
        return TrainOutcome(job.folder, tuple(filter(None, results)), stopped=False)
    try:
        return launch(_work, job, workers=options.workers, device=options.device)
    except GradwireError:
        folders.discard_unused(job.folder)
        raise


def _open(job: TrainJob) -> None:
    """Readies the folder that is locked, or refuses to; says what starts at step 0 again."""
    if not job.resumed:
        folders.open_new(job.folder, job.overwrite)
    else:
        notes = [_beginning(job, run, folder) for run, folder in job.runs()]
        for note in filter(None, notes):
            print(f"note: {note}", flush=True)
    folders.write_config(job.folder, job.options, job.command)


def _beginning(job: TrainJob, run: Options, folder: Path) -> str:
    """What to say before a run that is not finished goes on."""
    return "" if finished_result(run, folder) else beginning.check(folder, job.folder)


def _work(worker: Worker, job: TrainJob) -> TrainOutcome:
    """One rank's part."""
    with contextlib.ExitStack() as until_the_end:
        if not worker.own_workers:
            job = _shared(worker, job, until_the_end)
        elif worker.first:
            lock.join(job.folder)
        return _train_all(worker, job)


def _train_all(worker: Worker, job: TrainJob) -> TrainOutcome:
    """One rank's part in a folder that is open."""
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
    """The result of a run that has nothing left to do."""
    result = folders.read_result(folder)
    if result is None:
        return None
    for name, kind in NEEDED.items():
        if not isinstance(result.get(name), kind):
            raise StateError(f"{folder / folders.RESULT}: {name} is {result.get(name)!r:.40}.")
    return result | {"stopped": False} if result["epochs"] >= run.epochs else None


def _shared(worker: Worker, job: TrainJob, until_the_end: contextlib.ExitStack) -> TrainJob:
    """Rank 0's plan, its folder locked and open; torchrun's ranks have each made their own."""
    refusal = ""
    if worker.first:
        try:
            until_the_end.enter_context(lock.locked(job.folder))
            _open(job)
        except GradwireError as error:
            refusal = str(error)
    if refusal := worker.share(refusal):
        raise ConfigError(refusal)
    return dataclasses.replace(job, folder=Path(worker.share(str(job.folder))))
