"""Recorded gradients: the vector that a worker compressed, as flat .npy files."""

import os
from pathlib import Path

import numpy as np
import torch

from gradwire.state.state import State
from gradwire.workbench.train.folder import GRADIENTS


@torch.no_grad()
def record_gradient(folder: Path, step: int, state: State) -> Path:
    """Write u of the step just taken as one fp32 vector, and return the path of the file.

    u is gradient + residual; in a dense run it is the gradient. Between steps a bundle still holds
    u. The file appears whole or not at all, and needs no pickle.
    """
    parts = [b.u[s.offset : s.offset + s.numel] for b in state.bundles for s in b.slots]
    path = folder / GRADIENTS / f"step-{step:06d}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    with scratch.open("wb") as file:
        np.save(file, torch.cat(parts).cpu().numpy(), allow_pickle=False)
    os.replace(scratch, path)
    return path
