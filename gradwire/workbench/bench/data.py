"""Vectors to measure on: synthetic ones that look like gradients, or a recorded gradient."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import ConfigError, one_line

LAYERS = 40
LENGTHS = (64, 64, 256, 4096, 36_864, 65_536, 589_824, 1_048_576)
"""Entries of each layer of `network`, from a norm's bias to a large convolution."""


def gaussian(size: int, generator: torch.Generator) -> Tensor:
    """Draw entries from N(0, 1)."""
    return torch.randn(size, dtype=torch.float32, device=generator.device, generator=generator)


def laplace(size: int, generator: torch.Generator) -> Tensor:
    """Draw exponential magnitudes with random signs."""
    magnitudes = torch.empty(size, dtype=torch.float32, device=generator.device).exponential_(
        generator=generator
    )
    return magnitudes.copysign(gaussian(size, generator))


def t3(size: int, generator: torch.Generator) -> Tensor:
    """Draw from Student's t with three degrees of freedom, which has heavy tails."""
    return _student(3, size, generator)


def t5(size: int, generator: torch.Generator) -> Tensor:
    """Draw from Student's t with five degrees of freedom."""
    return _student(5, size, generator)


def _student(degrees: int, size: int, generator: torch.Generator) -> Tensor:
    squares = gaussian(size, generator).square()
    for _ in range(degrees - 1):
        squares += gaussian(size, generator).square()
    return gaussian(size, generator) / (squares / degrees).sqrt()


def gennormal(size: int, generator: torch.Generator) -> Tensor:
    """Draw with a density that falls as exp(-|x|^0.5): heavier tails than exponential ones."""
    gamma = laplace(size, generator).abs() + laplace(size, generator).abs()
    return gamma.square().copysign(gaussian(size, generator))


def shifted(size: int, generator: torch.Generator) -> Tensor:
    """Draw from N(0.3, 1), whose mean is not zero."""
    return gaussian(size, generator) + 0.3


def uniform(size: int, generator: torch.Generator) -> Tensor:
    """Draw evenly from [-1, 1): there is no tail."""
    return (
        torch.rand(size, dtype=torch.float32, device=generator.device, generator=generator)
        .mul_(2)
        .sub_(1)
    )


def layers(size: int, generator: torch.Generator) -> Tensor:
    """Draw 40 Gaussian layers of equal length; each layer has a log-normal scale."""
    scales = torch.exp(1.5 * gaussian(LAYERS, generator))
    return gaussian(size, generator) * scales.repeat_interleave(-(-size // LAYERS))[:size]


def network(size: int, generator: torch.Generator) -> Tensor:
    """Draw layers of 64 to a million entries; the shorter a layer, the larger its scale.

    As in real networks, large entries lie together in small layers. An estimate from groups of
    neighbours is therefore poor.
    """
    lengths = torch.tensor(LENGTHS, dtype=torch.int64, device=generator.device).repeat(
        -(-size // sum(LENGTHS))
    )
    scales = torch.exp(0.5 * gaussian(len(lengths), generator)) / lengths
    return gaussian(size, generator) * scales.repeat_interleave(lengths)[:size]


def zeros(size: int, generator: torch.Generator) -> Tensor:
    """Draw from N(0, 1), and set nine entries in ten to zero."""
    kept = torch.rand(size, dtype=torch.float32, device=generator.device, generator=generator) < 0.1
    return gaussian(size, generator) * kept


def equal(size: int, generator: torch.Generator) -> Tensor:
    """Return entries of one magnitude with random signs: nothing but ties."""
    return gaussian(size, generator).sign()


def two_values(size: int, generator: torch.Generator) -> Tensor:
    """Draw magnitudes of 1, and of 2 for one entry in 500."""
    return equal(size, generator) * (1 + _one_in(500, size, generator))


def sorted_up(size: int, generator: torch.Generator) -> Tensor:
    """Draw from N(0, 1), in ascending order of magnitude: the largest are neighbours."""
    return gaussian(size, generator).abs().sort().values


def one_layer(size: int, generator: torch.Generator) -> Tensor:
    """Draw from N(0, 1); 1 % of neighbouring entries are a thousand times larger."""
    u = gaussian(size, generator)
    u[size // 2 : size // 2 + max(1, size // 100)] *= 1000
    return u


def powers(size: int, generator: torch.Generator) -> Tensor:
    """Draw powers of two from 2^-20 to 2^19: many ties, and gaps between them."""
    exponents = torch.randint(
        -20, 20, (size,), dtype=torch.int64, device=generator.device, generator=generator
    )
    return torch.ldexp(equal(size, generator), exponents)


def denormals(size: int, generator: torch.Generator) -> Tensor:
    """Draw magnitudes too small for fp32's exponent."""
    return gaussian(size, generator) * 1e-40


def few(size: int, generator: torch.Generator) -> Tensor:
    """Draw from N(0, 1), and keep one entry in 5,000: fewer than most densities want."""
    return gaussian(size, generator) * _one_in(5000, size, generator)


def one_hot(size: int, generator: torch.Generator) -> Tensor:
    """Draw from N(0, 1); one entry of every 32 neighbours is a hundred times larger."""
    u = gaussian(size, generator)
    u[::32] *= 100
    return u


def constant(size: int, generator: torch.Generator) -> Tensor:
    """Draw from N(0, 1), the same for every seed: one gradient for ever."""
    return gaussian(size, torch.Generator(generator.device).manual_seed(0))


def _one_in(n: int, size: int, generator: torch.Generator) -> Tensor:
    """Return 1 for one entry in n on average, and 0 for the others."""
    drawn = torch.rand(size, dtype=torch.float32, device=generator.device, generator=generator)
    return (drawn < 1 / n).float()


USUAL = (
    gaussian, laplace, t5, t3, gennormal, layers, network, zeros, shifted, uniform,
)  # fmt: skip
ADVERSARIAL = (
    equal, two_values, sorted_up, one_layer, powers, denormals, few, one_hot, constant,
)  # fmt: skip
DATA: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    maker.__name__.replace("_", "-"): maker for maker in (*USUAL, *ADVERSARIAL)
}
"""The kinds of vectors by name. The later ones are made to be hard to select from."""


def draw_vector(name: str, size: int, device: torch.device, seed: int) -> Tensor:
    """Draw `size` fp32 entries of the kind `name`; equal for an equal seed and device."""
    return DATA[name](size, torch.Generator(device).manual_seed(seed))


def read_gradient(path: Path) -> Tensor:
    """Read the flat fp32 vector of a .npy file that `gradwire train --record-gradients` wrote."""
    try:
        # Mapped into memory, so a header that promises more than the file has is an error at once.
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
