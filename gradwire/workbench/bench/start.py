"""Start of `bench step`: in the lab, on loopback, or on the ranks that torchrun has started."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradwire.errors import ConfigError, LabError
from gradwire.workbench.bench.job import Job
from gradwire.workbench.lab.islands import cut_ranks
from gradwire.workbench.lab.lab import Lab, check_memory
from gradwire.workbench.lab.network import Loopback, RankNetwork
from gradwire.workbench.lab.processes import run_ranks
from gradwire.workbench.train.worker import under_torchrun


def bench_step(job: Job, ranks: int, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Measure every method of the job, and return the rows; `say` prints the lab's links.

    Under torchrun every rank calls this function, and every rank gets the rows (collective).
    """
    if under_torchrun():
        if job.link:
            raise ConfigError(f"link={job.link!r}: under torchrun the network is what it is")
        from gradwire.workbench.bench.step_rank import measure_rank

        return measure_rank(job)
    if job.delay and not job.link:
        raise ConfigError(f"latency={job.delay:g} s is the lab's: give a link too, such as 1gbit")
    cut_ranks(ranks, job.islands)
    lab = Lab(ranks, job.link, job.delay, job.islands) if job.link else None
    check_memory(ranks, job.memory if job.device == "cpu" else 0)
    if lab is None:
        return _run_job(Loopback(ranks), job)
    with lab:
        say(lab.describe())
        return _run_job(lab, replace(job, rate=lab.rate, measured=lab.measured))


def _run_job(network: RankNetwork, job: Job) -> list[dict[str, Any]]:
    """Run the job on all ranks of a network as processes, and return the rows of rank 0.

    Job and rows travel as files. A rank that fails leaves the reason in a third file.
    """
    with TemporaryDirectory(prefix="gradwire-bench-") as folder:
        job_file, answer = Path(folder, "job.json"), Path(folder, "rows.json")
        job_file.write_text(job.to_json())
        command = [
            sys.executable,
            "-m",
            "gradwire.workbench.bench.step_rank",
            str(job_file),
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
