"""scan on the CPU: blocks that stay in the cache, so that memory is passed over once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.types import align

BLOCK = 1 << 18


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
    u, magnitude = torch.empty(2, longest).unbind()
    scratch = torch.empty(longest // group)
    finite = True
    for offset, gradient in pieces:
        for start in range(0, gradient.numel(), BLOCK):
            part = gradient[start : start + BLOCK]
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
    return torch.tensor(finite)


def _largest(u: Tensor, scratch: Tensor, group: int, out: Tensor) -> None:
    magnitude = torch.abs(u, out=scratch[: u.numel()])
    torch.amax(magnitude.view(-1, group), dim=1, out=out)
