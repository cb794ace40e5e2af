"""A rank that sleeps: within the timeout the others wait for it, beyond it they say so."""

import tempfile
from pathlib import Path

from faults import crew, job
from faults.inject import Strike
from faults.kills import WORLD, Unbroken, resume, unbroken
from faults.row import Row

NAP, SHORT, LONG = 2.0, 4.0, 12.0
"""Asleep within the usual timeout; a short timeout; asleep beyond that."""


def rows() -> list[Row]:
    """One try a setup, of both."""
    patient = Row(f"rank asleep for {NAP:g} s, timeout {job.TIMEOUT:g} s")
    patient.came_of_it = "the run goes on, bit-equal"
    short = Row(f"rank asleep for {LONG:g} s, timeout {SHORT:g} s")
    short.came_of_it = "the others name the rank; resumed bit-equal"
    for number, (name, fields) in enumerate(job.SETUPS.items()):
        whole = unbroken(fields)
        loss = nap(fields, Strike(number, "compress", 5, NAP), whole)
        patient.count(loss and f"{name}: {loss}")
        loss, seconds = oversleep(fields, Strike(number, "compress", 5, LONG), whole)
        short.count(loss and f"{name}: {loss}", seconds)
    return [patient, short]


def nap(fields: job.Fields, strike: Strike, whole: Unbroken) -> str:
    """What was lost, "" for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        endings = crew.run(WORLD, job.train, folder, fields, strike, log=Path(folder) / "log")
    wrong = [e for e in endings if e.result is None or e.result[1] != whole.digest]
    return str(wrong[0]) if wrong else ""


def oversleep(fields: job.Fields, strike: Strike, whole: Unbroken) -> tuple[str, float]:
    """What was lost, and how long before the sleeper woke the last of the others had its error."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        short = fields | {"timeout": SHORT}
        endings = crew.run(WORLD, job.train, folder, short, strike, log=log)
        others = [ending for ending in endings if ending.rank != strike.rank]
        seconds = LONG - (endings[strike.rank].at - max(ending.at for ending in others))
        for ending in others:
            if f"No word from rank {strike.rank} for" not in ending.error:
                return str(ending), seconds
        if "ExchangeError" not in endings[strike.rank].error:
            return f"the sleeper: {endings[strike.rank]}", seconds
        return resume(folder, fields, whole.digest), seconds
