"""Fault: a link of the lab is cut and joined again, under a run of three ranks."""

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
    """Return two rows: a cut shorter than the timeout, and a longer one."""
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
    """Cut a link for `away` seconds. Return a description of the loss, "" for none, and seconds.

    The seconds last from the cut to the last rank's error; None without errors.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = _start(lab, folder, timeout)
        _until(lambda: (Path(folder) / "latest").exists())
        lab.set_link(VICTIM, up=False)
        begin = time.monotonic()
        time.sleep(away)
        lab.set_link(VICTIM, up=True)
        answered = _end(ranks)
        errors = {rank: answer["error"] for rank, answer in answered.items() if "error" in answer}
        if timeout > away:
            fine = [answer.get("digest") for answer in answered.values()] == [digest] * RANKS
            return "" if fine else f"timeout {timeout:g} s: {answered}", None
        if len(errors) < RANKS or any("in stage exchange" not in e for e in errors.values()):
            return f"timeout {timeout:g} s: {answered}", None
        seconds = max(answer["at"] for answer in answered.values()) - begin
        answered = _end(_start(lab, folder, PATIENT))
        fine = [answer.get("digest") for answer in answered.values()] == [digest] * RANKS
        return "" if fine else f"resumed: {answered}", seconds


def _start(lab: Lab, folder: str, timeout: float) -> list["subprocess.Popen[str]"]:
    flags = ["--timeout", str(timeout), "--pace", str(PACE), "--steps", str(job.STEPS)]
    command = [sys.executable, "-m", "faults.worker", folder, *flags]
    ranks = []
    for rank in range(RANKS):
        store = lab.address(0), lab.interface, lab.port
        environment = rank_environment(rank, RANKS, *store) | {"OMP_NUM_THREADS": "1"}
        with lab.inside(rank):
            ranks.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    text=True,
                )
            )  # fmt: skip
    return ranks


def _end(ranks: list["subprocess.Popen[str]"]) -> dict[int, dict[str, Any]]:
    """Return the ranks' answers; a rank that hangs has none."""
    answered: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + crew.LIMIT
    for process in ranks:
        try:
            answered |= answers(
                process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0]
            )
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    return dict(sorted(answered.items()))


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + crew.LIMIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
