"""Vectors to measure on: of the kinds gradients come in, or recorded from a real model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import ConfigError, one_line

LAYERS = 40
LENGTHS = (64, 64, 256, 4096, 36_864, 65_536, 589_824, 1_048_576)


def gaussian(size: int, generator: torch.Generator) -> Tensor:
    """N(0, 1)."""
    return torch.randn(size, dtype=torch.float32, device=generator.device, generator=generator)


def laplace(size: int, generator: torch.Generator) -> Tensor:
    """Exponential magnitudes with random signs."""
    magnitudes = torch.empty(size, dtype=torch.float32, device=generator.device).exponential_(
        generator=generator
    )
    return magnitudes.copysign(gaussian(size, generator))


def t3(size: int, generator: torch.Generator) -> Tensor:
    """Student's t with three degrees of freedom: heavy tails."""
    squares = gaussian(size, generator).square()
    for _ in range(2):
        squares += gaussian(size, generator).square()
    return gaussian(size, generator) / (squares / 3).sqrt()


def layers(size: int, generator: torch.Generator) -> Tensor:
    """40 layers of equal length, each Gaussian with a log-normal scale of its own."""
    scales = torch.exp(1.5 * gaussian(LAYERS, generator))
    return gaussian(size, generator) * scales.repeat_interleave(-(-size // LAYERS))[:size]


def network(size: int, generator: torch.Generator) -> Tensor:
    """Layers of 64 to a million entries over and over, the shorter the larger their scale.

    As in real networks large entries lie together, in small layers, and groups of entries say
    little about how many there are.
    """
    lengths = torch.tensor(LENGTHS, dtype=torch.int64, device=generator.device).repeat(
        -(-size // sum(LENGTHS))
    )
    scales = torch.exp(0.5 * gaussian(len(lengths), generator)) / lengths
    return gaussian(size, generator) * scales.repeat_interleave(lengths)[:size]


def zeros(size: int, generator: torch.Generator) -> Tensor:
    """N(0, 1), nine in ten of them zero."""
    kept = torch.rand(size, dtype=torch.float32, device=generator.device, generator=generator) < 0.1
    return gaussian(size, generator) * kept


DATA: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    maker.__name__: maker for maker in (gaussian, laplace, t3, layers, network, zeros)
}


def draw(name: str, size: int, device: torch.device, seed: int) -> Tensor:
    """`size` fp32 entries of the named kind; the same for the same seed and device."""
    return DATA[name](size, torch.Generator(device).manual_seed(seed))


def read_gradient(path: Path) -> Tensor:
    """The flat fp32 vector in a .npy file, as `gradwire train --record-gradients` writes it."""
    try:
        # Mapped, a header cannot promise more than the file has.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise ValueError("it is an archive")
    except Exception as error:  # a damaged header can fail in many ways
        raise ConfigError(
            f"--gradient {path}: not a readable .npy file: {one_line(error)}"
        ) from None
    if array.ndim != 1 or array.dtype != np.float32 or not array.size:
        raise ConfigError(
            f"--gradient {path}: a flat fp32 vector is needed, got {array.dtype} of shape "
            f"{array.shape}"
        )
    if not np.isfinite(array).all():
        raise ConfigError(f"--gradient {path}: it has entries that are not finite")
    return torch.from_numpy(np.array(array))
