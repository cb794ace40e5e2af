"""Fault: a disk is full during the second checkpoint. The first checkpoint must stay good."""

import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults import crew, job
from faults.kills import WORLD, resume, unbroken
from faults.row import Row


def rows() -> list[Row]:
    """Return two rows: the disk of each rank in turn, and a disk that all share.

    For the second row root mounts a small disk.
    """
    whole = unbroken({})
    one = Row("disk full on one rank during a checkpoint")
    every = Row("disk full for all ranks during a checkpoint")
    one.came_of_it = every.came_of_it = "one line a rank; the old checkpoint resumes bit-equal"
    for rank in range(WORLD):
        one.count(full_on_one(rank, whole.digest))
    if os.geteuid():
        every.skipped = "needs root, to mount a small disk"
        return [one, every]
    for share in (1.2, 1.5, 1.8):
        every.count(full_for_all(share, whole.digest))
    return [one, every]


def full_on_one(victim: int, digest: str) -> str:
    """Fill one rank's disk, resume, and return a description of the loss, "" for none.

    A limit on the size of files stands for the full disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        endings = crew.run(WORLD, limited, folder, victim, log=Path(folder) / "log")
        for ending in endings:
            refusal = f"rank {victim} could not write"
            words = refusal if ending.rank == victim else f"rank {victim} failed"
            if words not in ending.error or "\n" in ending.error:
                return f"rank {victim}'s disk: {ending}"
        return _left(folder) or resume(folder, {}, digest)


def limited(rank: int, folder: str, victim: int) -> Any:
    """Train; from the second checkpoint on, no file of gradwire fits on the victim's disk."""
    import gradwire

    save = gradwire.save

    def saving(wire: Any, target: Path) -> None:
        if rank == victim and target.name > f"step-{job.EVERY:08d}":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        save(wire, target)

    gradwire.save = saving
    return job.train(rank, folder, {})


def full_for_all(share: float, digest: str) -> str:
    """Train on a disk with room for `share` checkpoints; return a description of the loss."""
    with small_disk() as folder:
        steps = crew.run(WORLD, job.train, str(folder / "measure"), {}, log=folder / "log")
        if steps[0].result is None:
            return f"measuring: {steps[0]}"
        (last,) = (folder / "measure").glob("step-*")
        size = sum(-(-file.stat().st_size // 4096) * 4096 for file in last.iterdir())
        subprocess.run(["rm", "-r", folder / "measure"], check=True)
        _resize(folder, int(share * size) + 16384)
        with tempfile.TemporaryDirectory() as elsewhere:
            log = Path(elsewhere) / "log"
            endings = crew.run(WORLD, job.train, str(folder / "run"), {}, log=log)
        for ending in endings:
            if not ending.error:
                return f"{share} checkpoints: {ending}"
        _resize(folder, 64 << 20)
        return _left(str(folder / "run")) or resume(str(folder / "run"), {}, digest)


def _left(folder: str) -> str:
    """Return words for the temporary files that failed saves have left behind, "" for none."""
    left = [path.name for path in Path(folder).rglob("*.tmp")]
    return f"left behind: {left}" if left else ""


@contextmanager
def small_disk() -> Iterator[Path]:
    """Mount a small disk in memory, and unmount it in the end."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def _resize(folder: Path, size: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)
