"""What the ranks of these tests do; here because other processes have to import it."""

import dataclasses
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gradwire.errors import ConfigError, GradwireError
from gradwire.workbench import data, models
from gradwire.workbench.data import DataError
from gradwire.workbench.train import launch, lock, run
from gradwire.workbench.train.evaluate import parameters_digest, replicas_identical
from gradwire.workbench.train.options import resolve
from gradwire.workbench.train.trainer import RunLimits, Trainer
from gradwire.workbench.train.worker import Worker

QUIET = RunLimits(quiet=True)


def options(folder, **more):
    """A run of 2 workers, 10 epochs; of 8 steps where there are 133 examples."""
    choices = {
        "data_dir": str(folder) if folder else None,
        "epochs": 10,
        "batch": 8,
        "workers": 2,
        "log_every": 3,
        "device": "cpu",
    }
    return resolve(choices | {"model": "lenet5", "density": 0.05, "lr": 0.02} | more)


def place_of(rank):
    """A rank of the pool as one that torchrun started."""
    control = dist.new_group(backend="gloo")
    device = torch.device("cpu")
    return Worker(rank, dist.get_world_size(), rank, device, lambda: False, False, control)


def pooled(rank, work, *args):
    """What the workers of `launch` do, without the seconds that each takes to start."""
    return work(place_of(rank), *args)


def own(rank, work, *args):
    """The same, where the work is told that `launch` has started it."""
    return work(dataclasses.replace(place_of(rank), own_workers=True), *args)


def train(worker, run, folder, limits=QUIET):
    shape = models.model_spec(run.model).shape
    examples = data.load_dataset(run.data, run.data_dir, shape)
    return Trainer(run, folder, examples, worker, limits).run()


def whole_and_in_parts(worker, run, folder):
    """Results of the run in one go, in three sittings, and broken off after three steps."""

    def sit(name, steps):
        return train(worker, run, folder / name, RunLimits(max_steps=steps, quiet=True))

    whole = sit("whole", None)
    parts = [sit("parts", steps) for steps in (4, 13, None)]
    return whole, parts, sit("begun", 3)


def sum_of_ranks(worker):
    total = torch.ones(1) * worker.rank
    dist.all_reduce(total)
    return int(total), worker.world, torch.get_num_threads()


def fail_on_rank_1(worker, kind):
    if worker.rank == 1:
        if kind == "user":
            raise DataError("rank 1 has no such file.")
        if kind == "bug":
            raise ZeroDivisionError("a bug")
        os._exit(3)
    worker.barrier()


def sleep(worker):
    while not worker.agreed_to_stop():
        pass
    return "stopped"


def different_replicas(worker):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(worker.rank)
    return replicas_identical(parameters_digest(model), worker)


def hold(folder, ready):
    """Holds the lock of `folder` until the process is ended."""
    with lock.locked(folder):
        ready.set()
        time.sleep(600)


def race(rank, folder):
    """Whether this rank got the lock for which all asked at once."""
    worker = place_of(rank)
    worker.barrier()
    try:
        with lock.locked(folder):
            worker.barrier()
            return True
    except ConfigError:
        worker.barrier()
        return False


def refusal(worker, job):
    """What the ranks that torchrun started say of a folder that cannot be opened."""
    try:
        return run._work(worker, job)
    except GradwireError as error:
        return str(error)


def seen_lock(worker, job):
    """Rank 0's pid, where the run is, who was in its lock while it went, and what came out."""
    found, train_all = [], run._train_all

    def looking(worker, job):
        found.extend((job.folder / "lock").read_text().splitlines())
        worker.barrier()
        return train_all(worker, job)

    run._train_all = looking
    try:
        outcome = run._work(worker, job)
    finally:
        run._train_all = train_all
    lines = [json.loads(line) for line in found]
    return worker.share(os.getpid()), str(job.folder), lines, outcome


def deaf(worker, folder):
    """Waits as one does for a peer that never comes, and looks at nothing."""
    launch.ALONE = 0.2
    (Path(folder) / f"{worker.rank}").write_text(str(os.getpid()))
    time.sleep(600)
