"""The process of one rank: python -m gradwire.workbench.bench.step_rank JOB_FILE ANSWER_FILE."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import GradwireError
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.step import measure_steps
from gradwire.workbench.bench.watchdog import Watchdog
from gradwire.workbench.train.worker import Worker, joined

FAILED = 2
HINT = "Where ranks share a GPU, kernels of theirs can wait for each other: see docs/lab.md."
PATIENCE = 300.0
"""Seconds after which a step or a collective counts as stuck. Compiling kernels takes a while."""


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure_rank(
    job: Job, give_up: Callable[[str], object] = _print_error, one_machine: bool = False
) -> list[dict[str, Any]]:
    """Measure the job on this rank, and return the rows; the environment is that of torchrun.

    Several ranks may share a GPU. If a step never ends, `give_up` gets the reason, and the process
    exits. one_machine: True if all ranks are on this machine, though each claims to be a host.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_ranks = world if one_machine else int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device, sharing = torch.device("cpu"), 0
    if job.device == "cuda":
        gpus = torch.cuda.device_count()
        device, sharing = torch.device("cuda", rank % gpus), -(-local_ranks // gpus)
    worker = Worker(rank, world, 0, device, lambda: False, own_workers=False)

    def exit_stuck(reason: str) -> None:
        give_up(f"rank {rank} of {world}: {reason}. {HINT}")
        os._exit(FAILED)

    with joined(worker, timeout=PATIENCE):
        return measure_steps(worker, job, Watchdog(PATIENCE, exit_stuck), sharing)


def main(job_file: str, answer_file: str) -> None:
    """Measure the job in `job_file`; rank 0 writes the rows to `answer_file`.

    A rank that fails writes the reason, in one line, beside the answer.
    """
    answer = Path(answer_file)
    error_file = answer.with_suffix(".error")
    try:
        rows = measure_rank(
            Job.from_json(Path(job_file).read_text()), error_file.write_text, one_machine=True
        )
    except (GradwireError, torch.OutOfMemoryError) as error:
        error_file.write_text(str(error).partition("\n")[0])
        os._exit(FAILED)  # a normal exit would wait for peers that never come
    if os.environ["RANK"] == "0":
        answer.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
