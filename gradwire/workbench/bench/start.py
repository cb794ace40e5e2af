"""Starts the ranks of `bench step`: in the lab, on loopback, or as the ranks torchrun made."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradwire.errors import ConfigError, LabError
from gradwire.workbench.bench.job import Job
from gradwire.workbench.lab.lab import Lab, check_memory
from gradwire.workbench.lab.network import Loopback, RankNetwork
from gradwire.workbench.lab.processes import run_ranks
from gradwire.workbench.train.place import under_torchrun


def bench_step(job: Job, ranks: int, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """The rows of every method; `say` is told of the links."""
    if under_torchrun():
        if job.link:
            raise ConfigError(f"link={job.link!r}: under torchrun the network is what it is")
        from gradwire.workbench.bench.step_rank import rows_of

        return rows_of(job)
    if job.delay and not job.link:
        raise ConfigError(f"latency={job.delay:g} s is the lab's: give a link too, such as 1gbit")
    lab = Lab(ranks, job.link, job.delay) if job.link else None
    check_memory(ranks, job.memory if job.device == "cpu" else 0)
    if lab is None:
        return _rows(Loopback(ranks), job)
    with lab:
        say(lab.describe())
        return _rows(lab, replace(job, rate=lab.rate, measured=lab.measured))


def _rows(network: RankNetwork, job: Job) -> list[dict[str, Any]]:
    with TemporaryDirectory(prefix="gradwire-bench-") as folder:
        asked, answer = Path(folder, "job.json"), Path(folder, "rows.json")
        asked.write_text(job.json())
        command = [
            sys.executable,
            "-m",
            "gradwire.workbench.bench.step_rank",
            str(asked),
            str(answer),
        ]
        code = run_ranks(network, command)
        why = answer.with_suffix(".error")
        if why.exists():
            raise LabError(why.read_text())
        if code or not answer.exists():
            raise LabError(f"a rank ended with exit code {code}; what it said is above")
        rows: list[dict[str, Any]] = json.loads(answer.read_text())
        return rows
