"""scan: add the gradient to the residual, and find the maximum of every block on the way."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.pieces import Piece
from gradwire.types import align

STRETCH = 1 << 18
"""Entries that the CPU scans at a time, so that intermediate results stay in the cache."""
ALONE = (1 << 15) - 64
"""Entries that torch handles in one thread. On busy cores, beside other ranks or data loaders,
threads wait milliseconds for each other in every operation: a hundred times the work."""
LATE = 2e-3
"""Seconds, ten times the time of a stretch. After a slower stretch one thread does the others."""
LARGEST_U = 2.0**96
"""The largest magnitude that gets into u. A sum of 2^31 such entries or ranks is finite in fp32.
Beyond it an entry counts as not finite."""


__all__ = ["LARGEST_U", "Piece", "scan", "usable"]


def scan(
    residual: Tensor,
    pieces: Sequence[Piece],
    maxima: Tensor | None,
    block: int,
    unscale: Tensor | None = None,
    last_selection: LastSelection | None = None,
    skipped: Tensor | None = None,
) -> Tensor:
    """Turn `residual` into u in place, fill `maxima`, and return True if every entry was finite.

    The result is 0-d bool. An entry whose sum is not `usable` keeps its old residual, so a bad
    gradient never gets in. Moves 12 bytes per entry for fp32 gradients.
    residual: fp32 or bf16, a multiple of `block` long. A bf16 residual forgets the part of u that
    rounding takes away.
    pieces: flat gradients in any float dtype, each starting at a multiple of `block`.
    maxima: fp32, one for each block, or None if nobody needs them. int16 (CUDA): only the 16 bits
    after the sign.
    unscale: 0-d factor on the gradient (1 / loss scale).
    last_selection (CUDA): the maxima are counted there for the next selection.
    skipped: 0-d bool, if the residual still holds the winners of the last selection. They are
    cleared first, unless `skipped` is True.
    """
    version = _scan_on(residual.device)
    if last_selection is None:
        return version(residual, pieces, maxima, block, unscale)
    return version(residual, pieces, maxima, block, unscale, last_selection, skipped)


def usable(new: Tensor, old: Tensor) -> Tensor:
    """Return True for each entry that may take the place of the `old` one.

    Its magnitude is at most LARGEST_U, or that of the old one. An old entry may be larger, because
    some exchanges leave what several ranks sent with one of them. Refused, it would never leave.
    """
    return new.abs() <= old.abs().clamp(LARGEST_U, torch.finfo(old.dtype).max)


def scan_cpu(
    residual: Tensor,
    pieces: Sequence[tuple[int, Tensor]],
    maxima: Tensor | None,
    block: int,
    unscale: Tensor | None = None,
) -> Tensor:
    """Compute `scan` in stretches that stay in the cache, so that memory is read only once."""
    if residual.dtype != torch.float32:
        return scan_torch(residual, pieces, maxima, block, unscale)
    factor = 1.0 if unscale is None else float(unscale)
    if residual.numel() <= ALONE and _scan_few(residual, pieces, maxima, block, factor):
        return torch.tensor(True, dtype=torch.bool)
    longest = align(min(STRETCH, max((g.numel() for _, g in pieces), default=0)))
    u, magnitude = torch.empty(2, longest, dtype=torch.float32).unbind()
    scratch = torch.empty(longest // block, dtype=torch.float32)
    finite = True
    for offset, gradient in pieces:
        start, step = 0, STRETCH
        while start < gradient.numel():
            begin = time.perf_counter()
            part = gradient[start : start + step]
            low, n = offset + start, part.numel()
            rows, first = align(n) // block, low // block
            kept, new, padded = residual[low : low + n], u[:n], u[: align(n)]
            torch.add(kept, part, alpha=factor, out=new)
            padded[n:] = 0
            largest = scratch[:rows] if maxima is None else maxima[first : first + rows]
            _store_maxima(padded, magnitude, block, largest)
            if not float(largest.amax()) <= LARGEST_U:
                good = usable(new, kept)
                finite = finite and bool(good.all())
                torch.where(good, new, kept, out=new)
                _store_maxima(padded, magnitude, block, largest)
            kept.copy_(new)
            start += step
            if time.perf_counter() - begin > LATE:
                step = ALONE
    return torch.tensor(finite, dtype=torch.bool)


def _scan_few(
    residual: Tensor,
    pieces: Sequence[tuple[int, Tensor]],
    maxima: Tensor | None,
    block: int,
    factor: float,
) -> bool:
    """Scan all pieces at once, because each op takes longer than the few entries of a piece.

    Return False, and change no residual, if an entry is not usable.
    """
    u = residual.clone()
    for offset, gradient in pieces:
        u.narrow(0, offset, gradient.numel()).add_(gradient, alpha=factor)
    largest = torch.amax(u.abs().view(-1, block), dim=1)
    if not float(largest.amax()) <= LARGEST_U:
        return False
    residual.copy_(u)
    if maxima is not None:
        maxima.copy_(largest)
    return True


def _store_maxima(u: Tensor, scratch: Tensor, block: int, out: Tensor) -> None:
    magnitude = torch.abs(u, out=scratch[: u.numel()])
    torch.amax(magnitude.view(-1, block), dim=1, out=out)


def scan_torch(
    residual: Tensor,
    pieces: Sequence[tuple[int, Tensor]],
    maxima: Tensor | None,
    block: int,
    unscale: Tensor | None = None,
) -> Tensor:
    """Compute `scan` with torch ops."""
    finite = torch.ones((), dtype=torch.bool, device=residual.device)
    for offset, gradient in pieces:
        kept = residual[offset : offset + gradient.numel()]
        gradient = gradient.float() if unscale is None else gradient.float() * unscale
        u = (kept.float() + gradient).to(kept.dtype)
        good = usable(u, kept)
        finite = finite & good.all()
        kept.copy_(torch.where(good, u, kept))
    if maxima is not None:
        maxima.copy_(residual.abs().view(-1, block).amax(dim=1))
    return finite


_scan_on = versions(scan_torch, cpu=scan_cpu, triton="gradwire.kernels.triton.scan.scan_triton")
