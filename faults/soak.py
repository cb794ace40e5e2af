"""Fault: a run of many steps. Memory, handles, threads and time must not grow.

`make faults` runs a thousand steps, `python -m faults.soak --steps 10000` more.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from examples import elastic
from faults import crew, job
from faults.row import Row

WORLD, TENTHS = 2, 10
SAVE_EVERY, LOOK_EVERY = 100, 10
MOST_BYTES = 4 << 20
MOST_TIME = 1.5
"""The most CPU time of the last tenth over that of the first. A busy machine is no growth."""


def soak(rank: int, folder: str, steps: int) -> list[dict[str, float]]:
    """Train, save and read stats; return this rank's measurements after each tenth of `steps`."""
    ddp, optimizer, wire = elastic.build(**job.COMMON)
    tenths, times, cpu = [], [], time.process_time()
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        elastic.loss_of(ddp, step).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        if step % LOOK_EVERY == 0:
            wire.stats()
        if step % SAVE_EVERY == 0:
            elastic.save(Path(folder), step, ddp, optimizer, wire)
        if step % (steps // TENTHS) == 0:
            now = time.process_time()
            tenths.append(_measure() | {"cpu": now - cpu, "step": statistics.median(times)})
            times, cpu = [], now
    return tenths


def _measure() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = len(os.listdir("/proc/self/task"))
    handles = len(os.listdir("/proc/self/fd"))
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "handles": handles, "threads": threads}


def growth(tenths: list[dict[str, float]]) -> str:
    """Return words for the growth from the first tenth to the last, "" for none."""
    first, last = tenths[0], tenths[-1]
    for unit, most in (("bytes", MOST_BYTES), ("handles", 0), ("threads", 0)):
        if last[unit] > first[unit] + most:
            return f"{unit} went from {first[unit]:,.0f} to {last[unit]:,.0f}"
    if last["cpu"] > MOST_TIME * first["cpu"]:
        return f"a tenth took {first['cpu']:.2f} s of the CPU at first, {last['cpu']:.2f} s at last"
    return ""


def run(steps: int) -> list[Any]:
    """Return each rank's measurements."""
    with tempfile.TemporaryDirectory() as folder:
        limit = crew.LIMIT + steps / 5
        return crew.run(WORLD, soak, folder, steps, log=Path(folder) / "log", limit=limit)


def row(steps: int = 1000) -> Row:
    """Return the row of a short run; each rank is a try."""
    row = Row(f"soak of {steps:,} steps", came_of_it="memory, handles, threads, time: no growth")
    for ending in run(steps):
        row.count(growth(ending.result) if ending.result else str(ending))
    return row


def main() -> None:
    """Run the command line: a long run, whose measurements it prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="a JSON file for the measurements")
    options = parser.parse_args()
    endings = run(options.steps)
    for ending in endings:
        if ending.result is None:
            raise SystemExit(str(ending))
        for name, at in (("first", 0), ("last", -1)):
            words = ", ".join(f"{unit} {n:,.5g}" for unit, n in ending.result[at].items())
            print(f"rank {ending.rank}, {name} tenth: {words}")
    if options.out:
        options.out.write_text(json.dumps([ending.result for ending in endings], indent=1))
    if grown := [words for ending in endings if (words := growth(ending.result))]:
        raise SystemExit(f"grown: {grown}")


if __name__ == "__main__":
    main()
