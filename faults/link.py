"""A link of the lab cut and joined again, under a run of three ranks."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import crew, job
from faults.kills import unbroken
from faults.row import Row
from faults.worker import answers
from gradwire.errors import LabError
from gradwire.workbench.lab.lab import Lab
from gradwire.workbench.lab.processes import rank_environment

RANKS, VICTIM, LINK = 3, 1, "100mbit"
PACE = 0.1
PATIENT, SHORT = 60.0, 4.0
CUT, LONG = 5.0, 10.0


def rows() -> list[Row]:
    """Cut for less than the timeout, and for longer."""
    patient = Row(f"link cut for {CUT:g} s, timeout {PATIENT:g} s")
    patient.came_of_it = "the run goes on, bit-equal"
    short = Row(f"link cut for {LONG:g} s, timeout {SHORT:g} s")
    short.came_of_it = "error on every rank; resumed bit-equal"
    try:
        with Lab(RANKS, LINK) as lab:
            digest = unbroken({}, RANKS).digest
            patient.count(*cut(lab, PATIENT, CUT, digest))
            short.count(*cut(lab, SHORT, LONG, digest))
    except LabError as error:
        patient.skipped = short.skipped = str(error)
    return [patient, short]


def cut(lab: Lab, timeout: float, away: float, digest: str) -> tuple[str, float | None]:
    """What was lost, and how long after the cut the last rank had its error, if it did."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = _start(lab, folder, timeout)
        _until(lambda: (Path(folder) / "latest").exists())
        lab.set_link(VICTIM, up=False)
        begin = time.monotonic()
        time.sleep(away)
        lab.set_link(VICTIM, up=True)
        said = _end(ranks)
        errors = {rank: answer["error"] for rank, answer in said.items() if "error" in answer}
        if timeout > away:
            fine = [answer.get("digest") for answer in said.values()] == [digest] * RANKS
            return "" if fine else f"timeout {timeout:g} s: {said}", None
        if len(errors) < RANKS or any("in stage exchange" not in e for e in errors.values()):
            return f"timeout {timeout:g} s: {said}", None
        seconds = max(answer["at"] for answer in said.values()) - begin
        said = _end(_start(lab, folder, PATIENT))
        fine = [answer.get("digest") for answer in said.values()] == [digest] * RANKS
        return "" if fine else f"resumed: {said}", seconds


def _start(lab: Lab, folder: str, timeout: float) -> list["subprocess.Popen[str]"]:
    given = ["--timeout", str(timeout), "--pace", str(PACE), "--steps", str(job.STEPS)]
    command = [sys.executable, "-m", "faults.worker", folder, *given]
    ranks = []
    for rank in range(RANKS):
        where = lab.address(0), lab.interface, lab.port
        environment = rank_environment(rank, RANKS, *where) | {"OMP_NUM_THREADS": "1"}
        with lab.inside(rank):
            ranks.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    text=True,
                )
            )  # fmt: skip
    return ranks


def _end(ranks: list["subprocess.Popen[str]"]) -> dict[int, dict[str, Any]]:
    """What the ranks said; one that hangs says nothing."""
    said: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + crew.LIMIT
    for process in ranks:
        try:
            said |= answers(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    return dict(sorted(said.items()))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + crew.LIMIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
