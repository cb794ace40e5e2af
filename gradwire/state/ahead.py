"""Compile the kernels of a wire beside its first steps.

Triton compiles a kernel at its first launch, and holds up the step for seconds. Therefore another
process, `rehearsal.py`, compiles what the wire will launch. Until it is done the torch references
run, which give the same bits. One process per machine does it for all ranks: a lock in Triton's
cache decides which.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gradwire.accumulate.bundle import Bundle
from gradwire.config import Config
from gradwire.errors import one_line
from gradwire.kernels.dispatch import has_kernels, hold_kernels, release_kernels
from gradwire.torch_internals import kernel_cache
from gradwire.version import __version__

log = logging.getLogger("gradwire")

PATIENCE = 90.0
"""Seconds after which steps compile what they need themselves."""


@dataclass(frozen=True)
class Job:
    """All that decides which kernels a wire launches.

    bundles: of each the slots, with dtypes by name, and whether it is dense. processors: the
    multiprocessors of the device.
    """

    config: dict[str, Any]
    bundles: list[dict[str, Any]]
    ranks: int
    capability: tuple[int, int]
    processors: int
    versions: str

    @classmethod
    def of(
        cls, config: Config, bundles: Sequence[Bundle], ranks: int, device: torch.device
    ) -> "Job":
        """Return the job of a wire on a CUDA device."""
        import triton

        properties = torch.cuda.get_device_properties(device)
        return cls(
            config.asdict(),
            [_describe(bundle) for bundle in bundles],
            ranks,
            (properties.major, properties.minor),
            properties.multi_processor_count,
            f"gradwire {__version__}, torch {torch.__version__}, triton {triton.__version__}, "
            f"python {platform.python_version()}",
        )

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def _describe(bundle: Bundle) -> dict[str, Any]:
    slots = [asdict(slot) | {"dtype": str(slot.dtype), "name": ""} for slot in bundle.slots]
    return {"slots": slots, "dense": bundle.dense}


class KernelsAhead:
    """The wait of one wire for its kernels, in a thread that only waits."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._hold = hold_kernels()
        self._begin = time.monotonic()
        self.done = threading.Event()
        threading.Thread(target=self._wait, name="gradwire-kernels", daemon=True).start()

    def close(self) -> None:
        """Let the kernels take over, compiled or not."""
        release_kernels(self._hold)
        self.done.set()

    def _wait(self) -> None:
        try:
            made = compile_once(self._job, self._folder)
        except Exception as error:  # a wire runs without this help, only slower at first
            log.warning("kernels could not be compiled ahead: %s", one_line(error))
            made = -1
        seconds = time.monotonic() - self._begin
        self.close()
        if made >= 0:
            log.info("kernels took over after %.1f s; %d were compiled", seconds, made)


def compile_ahead(
    config: Config, bundles: Sequence[Bundle], ranks: int, device: torch.device
) -> KernelsAhead | None:
    """Begin to compile a wire's kernels; None if there are none, or they are compiled already."""
    if not has_kernels(device) or torch.version.hip is not None:
        return None
    job = Job.of(config, bundles, ranks, device)
    folder = Path(kernel_cache())
    if _marker(job, folder).exists():
        return None
    log.info("kernels are being compiled; until then torch's operations do their work")
    return KernelsAhead(job, folder)


def compile_once(job: Job, folder: Path) -> int:
    """Compile the job unless a process of this machine has; return the number of kernels made."""
    marker = _marker(job, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(marker.with_suffix(".lock"), "a") as lock:
        end = time.monotonic() + PATIENCE
        while not _lock(lock.fileno()):
            if time.monotonic() > end:
                raise TimeoutError(f"another process compiles them for over {PATIENCE:.0f} s")
            time.sleep(0.2)
        if marker.exists():
            return 0
        made = _run(job)
        scratch = marker.with_suffix(f".{os.getpid()}")
        scratch.write_text(job.versions)
        os.replace(scratch, marker)
        return made


def _run(job: Job) -> int:
    """Run the rehearsal in a process of its own, without a GPU."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    package = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, "-m", "gradwire.state.rehearsal"],
        input=job.text,
        text=True,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        env=environment,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(lines[-1])
    return int(done.stdout)


def _marker(job: Job, folder: Path) -> Path:
    """Return the file that says that this job's kernels are in Triton's cache."""
    return folder / f"gradwire-{job.digest}.done"


def _lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
