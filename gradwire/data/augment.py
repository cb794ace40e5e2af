"""Random crops and flips of a batch of images."""

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_and_flip(images: Tensor, seed: int, pad: int = 4) -> Tensor:
    """The images shifted by up to `pad` pixels each way, black outside, every second one mirrored.

    Drawn from a CPU generator of its own: the same on every device, and no global state moves.
    """
    n, _, height, width = images.shape
    draw = torch.Generator().manual_seed(seed)
    top = torch.randint(2 * pad + 1, (n, 1), generator=draw)
    left = torch.randint(2 * pad + 1, (n, 1), generator=draw)
    mirror = torch.rand((n, 1), generator=draw) < 0.5
    rows = top + torch.arange(height)
    columns = torch.arange(width)
    columns = left + torch.where(mirror, columns.flip(0), columns)
    return _pick(F.pad(images, (pad, pad, pad, pad)), rows, columns)


def _pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Image i's `rows[i]` x `columns[i]`, all channels."""
    device = images.device
    which = torch.arange(len(images), device=device)[:, None, None]
    picked = images[which, :, rows.to(device)[:, :, None], columns.to(device)[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()
