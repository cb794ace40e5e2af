"""One rank of `gradwire bench step`: python -m gradwire.bench.step_rank JOB ANSWER."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from gradwire.bench.job import Job
from gradwire.bench.step import measure_steps
from gradwire.errors import GradwireError
from gradwire.train.place import Place, joined

FAILED = 2
PATIENCE = 300.0
"""Seconds after which a collective counts as stuck: kernels that are compiled take some."""


def rows_of(job: Job) -> list[dict[str, Any]]:
    """The rows, on a rank that finds what torchrun sets; a GPU may serve several ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu")
    if job.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
    place = Place(rank, world, 0, device, lambda: False, own_workers=False)
    with joined(place, timeout=PATIENCE):
        return measure_steps(place, job)


def main(job_file: str, answer_file: str) -> None:
    """Rank 0 writes the rows; a rank that is refused writes why, in one line."""
    answer = Path(answer_file)
    try:
        rows = rows_of(Job.read(Path(job_file).read_text()))
    except (GradwireError, torch.OutOfMemoryError) as error:
        line = str(error).partition("\n")[0]
        answer.with_suffix(".error").write_text(line)
        os._exit(FAILED)  # leaving the usual way would wait for peers that are not coming
    if os.environ["RANK"] == "0":
        answer.write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
