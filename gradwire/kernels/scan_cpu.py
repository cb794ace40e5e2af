"""scan on the CPU: blocks that stay in the cache, so that memory is passed over once."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.types import align

BLOCK = 1 << 18
ALONE = (1 << 15) - 64
"""Entries that torch does not split over threads. Where cores are busy, beside other ranks or data
loaders, threads wait milliseconds for each other in every operation: a hundred times the work."""
LATE = 2e-3
"""Seconds, ten times what a block takes, after which one thread does the rest of the piece."""


def scan_cpu(
    residual: Tensor,
    pieces: Sequence[tuple[int, Tensor]],
    maxima: Tensor | None,
    group: int,
    unscale: Tensor | None = None,
) -> Tensor:
    """See `scan`."""
    factor = 1.0 if unscale is None else float(unscale)
    longest = align(min(BLOCK, max((g.numel() for _, g in pieces), default=0)))
    u, magnitude = torch.empty(2, longest, dtype=torch.float32).unbind()
    scratch = torch.empty(longest // group, dtype=torch.float32)
    finite = True
    for offset, gradient in pieces:
        start, step = 0, BLOCK
        while start < gradient.numel():
            begin = time.perf_counter()
            part = gradient[start : start + step]
            low, n = offset + start, part.numel()
            rows, first = align(n) // group, low // group
            kept, new, padded = residual[low : low + n], u[:n], u[: align(n)]
            torch.add(kept, part, alpha=factor, out=new)
            padded[n:] = 0
            largest = scratch[:rows] if maxima is None else maxima[first : first + rows]
            _largest(padded, magnitude, group, largest)
            if not float(largest.amax()) < float("inf"):
                finite = False
                torch.where(torch.isfinite(new), new, kept, out=new)
                _largest(padded, magnitude, group, largest)
            kept.copy_(new)
            start += step
            if time.perf_counter() - begin > LATE:
                step = ALONE
    return torch.tensor(finite, dtype=torch.bool)


def _largest(u: Tensor, scratch: Tensor, group: int, out: Tensor) -> None:
    magnitude = torch.abs(u, out=scratch[: u.numel()])
    torch.amax(magnitude.view(-1, group), dim=1, out=out)
