"""Fault: each of four ranks is killed at each moment. The resumed run must be bit-equal."""

import random
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from faults import crew, job
from faults.inject import MOMENTS, Strike
from faults.row import Row

WORLD = 4
AT_ONCE = 4
DDP = r"^RuntimeError: \[.*gloo.*Connection (closed|reset) by peer"


@dataclass(frozen=True)
class Unbroken:
    """A run without a fault: the digest of its parameters, and the counts of moments per rank."""

    digest: str
    seen: tuple[dict[str, int], ...]


def unbroken(fields: job.Fields, world: int = WORLD) -> Unbroken:
    """Run `job.train` to its end without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        endings = crew.run(world, job.train, folder, fields, log=Path(folder) / "log")
    if wrong := [ending for ending in endings if ending.result is None]:
        raise AssertionError(f"nothing was struck, and yet: {wrong[0]}")
    digests = {ending.result[1] for ending in endings}
    assert len(digests) == 1, "replicas differ"
    return Unbroken(digests.pop(), tuple(ending.result[2] for ending in endings))


def kill(fields: job.Fields, strike: Strike, whole: Unbroken) -> tuple[str, float]:
    """Kill a rank and resume. Return a description of the loss, "" for none, and the seconds.

    The seconds last from the kill to the last survivor's error.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        endings = crew.run(WORLD, job.train, folder, fields, strike, log=log)
        loss, seconds = verdict(endings, strike.rank, whole.digest)
        return loss or resume(folder, fields, whole.digest), seconds


def verdict(endings: list[crew.Ending], victim: int, digest: str) -> tuple[str, float]:
    """Return "" if every survivor has finished, or has named victim and stage in time.

    Also return the seconds from the kill to the last survivor's error. At the second forward pass
    DDP itself exchanges a few numbers. A rank that fails there raises torch's own error, and does
    not sign either.
    """
    if not endings[victim].killed:
        return f"rank {victim} was not killed: {endings[victim]}", 0.0
    survivors = [ending for ending in endings if ending.rank != victim]
    seconds = max(ending.at for ending in survivors) - endings[victim].at
    silent = {victim, *(ending.rank for ending in survivors if re.search(DDP, ending.error))}
    for ending in survivors:
        finished = ending.result is not None and ending.result[1] == digest
        named = victim in (ranks := named_by(ending)) and ranks <= silent
        if not (finished or named or ending.rank in silent):
            return f"rank {ending.rank}, after rank {victim} was killed: {ending}", seconds
    if seconds > job.TIMEOUT:
        return f"rank {victim}: survivors took {seconds:.1f} s", seconds
    return "", seconds


def named_by(ending: crew.Ending) -> set[int]:
    """Return the ranks that a survivor has named as silent."""
    words = rf"rank {ending.rank} of .* in stage exchange\. No word from ranks? ([\d, ]+) for"
    match = re.search(words, ending.error)
    return {int(rank) for rank in match[1].split(",")} if match else set()


def resume(folder: str, fields: job.Fields, digest: str) -> str:
    """Resume in `folder`, and return the difference from the unbroken run, "" for none."""
    endings = crew.run(WORLD, job.train, folder, fields, log=Path(folder) / "log")
    for ending in endings:
        if ending.result is None or ending.result[1] != digest:
            return f"resumed: {ending}, the unbroken run has {digest}"
    return ""


def strikes(whole: Unbroken, seed: str) -> list[Strike]:
    """Return a strike for every rank and moment, at a random one of the moment's times."""
    draw = random.Random(seed)
    return [
        Strike(rank, moment, draw.randint(1, whole.seen[rank][moment]))
        for rank in range(WORLD)
        for moment in MOMENTS
    ]


def rows() -> list[Row]:
    """Return one row per moment, over all setups."""
    table = {moment: Row(f"rank killed: {moment}") for moment in MOMENTS}
    for name, fields in job.SETUPS.items():
        whole = unbroken(fields)
        planned = strikes(whole, name)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            outcomes = pool.map(lambda s: kill(fields, s, whole), planned)  # noqa: B023
            for strike, (loss, seconds) in zip(planned, outcomes, strict=True):
                table[strike.moment].count(loss and f"{name}, {strike}: {loss}", seconds)
    for row in table.values():
        row.came_of_it = "survivors name the rank; resumed bit-equal"
    return list(table.values())
