"""NVIDIA's Multi-Process Service, for the ranks of a lab that share a GPU."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory

import torch

from gradwire.errors import LabError
from gradwire.workbench.lab.network import RankNetwork

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
PATIENCE = 20.0
"""Seconds for the service to start or to end."""


@contextmanager
def shared_gpu(lab: RankNetwork) -> Iterator[dict[str, str]]:
    """Start the service for this lab, and yield the environment variables that its ranks need.

    Without the service, kernels of different ranks take turns, and every small collective costs
    milliseconds. A service that the user has started (CUDA_MPS_PIPE_DIRECTORY) is used unchanged.
    Without a GPU nothing is started.
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
        environment = {PIPES: folder, LOGS: folder}
        # On rank 0's network, so the next lab ends the service if this lab is killed.
        with lab.inside(0):
            _control_service(control, environment, "-d")
        try:
            yield environment
        finally:
            with suppress(LabError):
                _control_service(control, environment, words="quit\n")


def _control_service(
    control: str, environment: dict[str, str], *options: str, words: str = ""
) -> None:
    """Run the service's control program with `words` as its input."""
    try:
        subprocess.run(
            [control, *options],
            env={**os.environ, **environment},
            input=words,
            text=True,
            check=True,
            timeout=PATIENCE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LabError(f"{CONTROL} does not work: {error}") from error
