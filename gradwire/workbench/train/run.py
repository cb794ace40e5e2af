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
from gradwire.workbench.train.launch import launch
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.place import Place, under_torchrun
from gradwire.workbench.train.plan import Plan
from gradwire.workbench.train.trainer import Trainer

NEEDED = {"title": str, "epochs": int, "steps": int, "complete": bool, "replicas_identical": bool}
"""Of a result.json, what is said about a run that has ended."""


@dataclass(frozen=True)
class Outcome:
    """What came of a plan: the folder, each run's result.json, whether a signal ended it."""

    folder: Path
    results: tuple[dict[str, Any], ...]
    stopped: bool
    first: bool = True


def train(job: Plan) -> Outcome:
    """Does what `job` says on every rank; under torchrun only rank 0's outcome is `first`."""
    options = job.options
    if under_torchrun():
        return launch(_work, job, workers=options.workers, device=options.device)
    with lock.locked(job.folder):
        return _with_own_workers(job)


def _with_own_workers(job: Plan) -> Outcome:
    """The same where this process starts the ranks, if there is anything left to do."""
    options = job.options
    _open(job)
    results = [_finished(run, folder) for run, folder in job.runs()]
    if None not in results:
        return Outcome(job.folder, tuple(filter(None, results)), stopped=False)
    try:
        return launch(_work, job, workers=options.workers, device=options.device)
    except GradwireError:
        folders.discard_unused(job.folder)
        raise


def _open(job: Plan) -> None:
    """Readies the folder that is locked, or refuses to; says what starts at step 0 again."""
    if not job.resumed:
        folders.open_new(job.folder, job.overwrite)
    else:
        notes = [_beginning(job, run, folder) for run, folder in job.runs()]
        for note in filter(None, notes):
            print(f"note: {note}", flush=True)
    folders.write_config(job.folder, job.options, job.command)


def _beginning(job: Plan, run: Options, folder: Path) -> str:
    """What to say before a run that is not finished goes on."""
    return "" if _finished(run, folder) else beginning.check(folder, job.folder)


def _work(place: Place, job: Plan) -> Outcome:
    """One rank's part."""
    with contextlib.ExitStack() as until_the_end:
        if not place.own_workers:
            job = _shared(place, job, until_the_end)
        elif place.first:
            lock.join(job.folder)
        return _train_all(place, job)


def _train_all(place: Place, job: Plan) -> Outcome:
    """One rank's part in a folder that is open."""
    options = job.options
    spec = models.model_spec(options.model)
    examples = data.load_dataset(options.data, options.data_dir, spec.shape).to(place.device)
    results = []
    for run, folder in job.runs():
        result = place.share(_finished(run, folder))
        if result is None:
            if place.first and folder != job.folder:
                folders.write_config(folder, run, job.command)
            place.barrier()
            result = Trainer(run, folder, examples, place, job.sitting).run()
        results.append(result)
        if results[-1]["stopped"]:
            break
    return Outcome(job.folder, tuple(results), results[-1]["stopped"], place.first)


def _finished(run: Options, folder: Path) -> dict[str, Any] | None:
    """The result of a run that has nothing left to do."""
    result = folders.read_result(folder)
    if result is None:
        return None
    for name, kind in NEEDED.items():
        if not isinstance(result.get(name), kind):
            raise StateError(f"{folder / folders.RESULT}: {name} is {result.get(name)!r:.40}.")
    return result | {"stopped": False} if result["epochs"] >= run.epochs else None


def _shared(place: Place, job: Plan, until_the_end: contextlib.ExitStack) -> Plan:
    """Rank 0's plan, its folder locked and open; torchrun's ranks have each made their own."""
    refusal = ""
    if place.first:
        try:
            until_the_end.enter_context(lock.locked(job.folder))
            _open(job)
        except GradwireError as error:
            refusal = str(error)
    if refusal := place.share(refusal):
        raise ConfigError(refusal)
    return dataclasses.replace(job, folder=Path(place.share(str(job.folder))))
