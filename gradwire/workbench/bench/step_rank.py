"""One rank of `gradwire bench step`: python -m gradwire.workbench.bench.step_rank JOB ANSWER."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import GradwireError
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.patience import Patience
from gradwire.workbench.bench.step import measure_steps
from gradwire.workbench.train.place import Place, joined

FAILED = 2
HINT = "Where ranks share a GPU, kernels of theirs can wait for each other: see docs/lab.md."
PATIENCE = 300.0
"""Seconds after which a step or a collective is stuck: kernels that are compiled take some."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def rows_of(
    job: Job, give_up: Callable[[str], object] = _say, one_machine: bool = False
) -> list[dict[str, Any]]:
    """The rows, on a rank that finds what torchrun sets; a GPU may serve several ranks.

    A step that does not end ends the process, after `give_up` was told. one_machine: all ranks are
    on this one, though each claims a host of its own.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = world if one_machine else int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device, sharing = torch.device("cpu"), 0
    if job.device == "cuda":
        gpus = torch.cuda.device_count()
        device, sharing = torch.device("cuda", rank % gpus), -(-here // gpus)
    place = Place(rank, world, 0, device, lambda: False, own_workers=False)

    def stuck(what: str) -> None:
        give_up(f"rank {rank} of {world}: {what}. {HINT}")
        os._exit(FAILED)

    with joined(place, timeout=PATIENCE):
        return measure_steps(place, job, Patience(PATIENCE, stuck), sharing)


def main(job_file: str, answer_file: str) -> None:
    """Rank 0 writes the rows; a rank that is refused writes why, in one line."""
    answer = Path(answer_file)
    why = answer.with_suffix(".error")
    try:
        rows = rows_of(Job.read(Path(job_file).read_text()), why.write_text, one_machine=True)
    except (GradwireError, torch.OutOfMemoryError) as error:
        why.write_text(str(error).partition("\n")[0])
        os._exit(FAILED)  # leaving the usual way would wait for peers that are not coming
    if os.environ["RANK"] == "0":
        answer.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
