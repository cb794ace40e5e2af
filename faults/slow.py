"""Fault: a rank sleeps. The others wait for it within the timeout, and name it beyond."""

import tempfile
from pathlib import Path

from faults import crew, job
from faults.inject import Strike
from faults.kills import WORLD, Unbroken, resume, unbroken
from faults.row import Row

NAP, SHORT, LONG = 2.0, 4.0, 12.0
"""Seconds: a sleep within the usual timeout, a short timeout, and a sleep beyond that one."""


def rows() -> list[Row]:
    """Return two rows, each with one try per setup: a short sleep, and a long one."""
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
    """Sleep within the timeout, and return a description of the loss, "" for none."""
    with tempfile.TemporaryDirectory() as folder:
        endings = crew.run(WORLD, job.train, folder, fields, strike, log=Path(folder) / "log")
    wrong = [e for e in endings if e.result is None or e.result[1] != whole.digest]
    return str(wrong[0]) if wrong else ""


def oversleep(fields: job.Fields, strike: Strike, whole: Unbroken) -> tuple[str, float]:
    """Sleep beyond the timeout. Return a description of the loss, "" for none, and the seconds.

    The seconds last from the begin of the sleep to the last error of the other ranks.
    """
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
