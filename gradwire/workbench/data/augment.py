"""Random crops and flips of a batch of images."""

import torch
import torch.nn.functional as F
from torch import Tensor

PAD = 4
"""Pixels around a CIFAR-10 image, as is usual."""


def crop_and_flip(images: Tensor, seed: int, pad: int = PAD) -> Tensor:
    """Shift images by up to `pad` pixels each way, black outside, and mirror half of them.

    The draws come from a new CPU generator, so they are the same for every device, and no global
    generator moves.
    """
    return cut_crops(images, draw_crops(seed, len(images), pad).to(images.device), pad)


def draw_crops(seed: int, n: int, pad: int = PAD) -> Tensor:
    """Draw a crop for each of `n` images: int64 [n, 3] of top, left, and 1 if mirrored."""
    generator = torch.Generator().manual_seed(seed)
    top = torch.randint(2 * pad + 1, (n, 1), dtype=torch.int64, generator=generator)
    left = torch.randint(2 * pad + 1, (n, 1), dtype=torch.int64, generator=generator)
    mirror = torch.rand((n, 1), dtype=torch.float32, generator=generator) < 0.5
    return torch.cat([top, left, mirror.long()], dim=1)


def cut_crops(images: Tensor, draws: Tensor, pad: int = PAD) -> Tensor:
    """Return the crops that `draw_crops` has drawn, without a wait for the device."""
    n, _, height, width = images.shape
    device = images.device
    top, left, mirror = draws[:, :, None].unbind(1)
    rows = top + torch.arange(height, dtype=torch.int64, device=device)
    columns = torch.arange(width, dtype=torch.int64, device=device)
    columns = left + torch.where(mirror > 0, columns.flip(0), columns)
    image = torch.arange(n, dtype=torch.int64, device=device)[:, None, None]
    padded = F.pad(images, (pad, pad, pad, pad))
    picked = padded[image, :, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()
