"""NVIDIA's Multi-Process Service, for the ranks of a lab that share a GPU."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory

import torch

from gradwire.errors import LabError
from gradwire.workbench.lab.network import Network

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PATIENCE = 20.0


@contextmanager
def shared_gpu(lab: Network) -> Iterator[dict[str, str]]:
    """What the ranks' environment needs for a service of their own; nothing without a GPU.

    Without the service kernels of different ranks take turns, and every small collective costs
    milliseconds. One that the user has started (CUDA_MPS_PIPE_DIRECTORY) is used as it is.
    """
    if not torch.cuda.device_count() or PIPES in os.environ:
        yield {}
        return
    control = shutil.which(CONTROL)
    if control is None:
        raise LabError(
            f"ranks that share a GPU need {CONTROL}, which is not in PATH. Install it with the "
            'driver, or hide the GPU: CUDA_VISIBLE_DEVICES=""'
        )
    with TemporaryDirectory(prefix="gradwire-mps-") as folder:
        ours = {PIPES: folder, LOGS: folder}
        # On rank 0's network it is found and ended with whatever else a killed lab leaves there.
        with lab.inside(0):
            _ask(control, ours, "-d")
        try:
            yield ours
        finally:
            with suppress(LabError):
                _ask(control, ours, words="quit\n")


def _ask(control: str, ours: dict[str, str], *options: str, words: str = "") -> None:
    try:
        subprocess.run(
            [control, *options],
            env={**os.environ, **ours},
            input=words,
            text=True,
            check=True,
            timeout=PATIENCE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LabError(f"{CONTROL} does not work: {error}") from error
