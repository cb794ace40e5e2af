"""Random crops and flips of a batch of images."""

import torch
import torch.nn.functional as F
from torch import Tensor

PAD = 4


def crop_and_flip(images: Tensor, seed: int, pad: int = PAD) -> Tensor:
    """The images shifted by up to `pad` pixels each way, black outside, every second one mirrored.

    Drawn from a CPU generator of its own: the same on every device, and no global state moves.
    """
    return cut(images, draw(seed, len(images), pad).to(images.device), pad)


def draw(seed: int, n: int, pad: int = PAD) -> Tensor:
    """[n, 3]: top, left, and whether it is mirrored, of the crop of every image."""
    generator = torch.Generator().manual_seed(seed)
    top = torch.randint(2 * pad + 1, (n, 1), dtype=torch.int64, generator=generator)
    left = torch.randint(2 * pad + 1, (n, 1), dtype=torch.int64, generator=generator)
    mirror = torch.rand((n, 1), dtype=torch.float32, generator=generator) < 0.5
    return torch.cat([top, left, mirror.long()], dim=1)


def cut(images: Tensor, draws: Tensor, pad: int = PAD) -> Tensor:
    """The crops that were drawn; nothing waits for the device."""
    n, _, height, width = images.shape
    device = images.device
    top, left, mirror = draws[:, :, None].unbind(1)
    rows = top + torch.arange(height, dtype=torch.int64, device=device)
    columns = torch.arange(width, dtype=torch.int64, device=device)
    columns = left + torch.where(mirror > 0, columns.flip(0), columns)
    which = torch.arange(n, dtype=torch.int64, device=device)[:, None, None]
    padded = F.pad(images, (pad, pad, pad, pad))
    picked = padded[which, :, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()
