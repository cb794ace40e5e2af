"""draw: entries of a vector at random, no two the same, without looking at it."""

import math

import torch
from torch import Tensor

from gradwire.hashing import splitmix64_golden
from gradwire.kernels.dispatch import versions

ROUNDS = 6


def draw(
    k: int,
    size: int,
    length: int,
    draws: Tensor,
    stream: int,
    ends: Tensor | None = None,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """int32 indices, ascending, of k entries drawn uniformly from a vector; and how many they are.

    They are where 0 .. k-1 land under a permutation of 0 .. size-1 whose key is a hash of `draws`
    (0-d int64, how many draws there were, one more afterwards) and `stream`, a 64-bit number: the
    same on every device. A Feistel network permutes an a x b grid that just covers `size`; what
    lands outside walks on until it is inside.
    length: of the vector; `size` of it are not padding. ends, shifts (int64): the n-th of these is
    entry n + shifts[j], where j of the ends are <= n.
    """
    return _draw_on(draws.device)(k, size, length, draws, stream, ends, shifts)


def pick(u: Tensor, indices: Tensor) -> Tensor:
    """The entries of u that were drawn; zero where none was."""
    return _pick_on(u.device)(u, indices)


def draw_torch(
    k: int,
    size: int,
    length: int,
    draws: Tensor,
    stream: int,
    ends: Tensor | None = None,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `draw`. Sorts what was drawn.

    The grid exceeds `size` by less than one row, so few walks leave an entry outside once in 10^20
    draws, if at all: it then counts as not drawn, and its index is `length`.
    """
    key = splitmix64_golden(draws + stream)
    draws.add_(1)
    everyone = torch.arange(k, dtype=torch.int64, device=draws.device)
    drawn = permuted(everyone, size, key).sort().values
    inside = drawn < size
    where = drawn.clamp(max=size - 1)
    if ends is not None and shifts is not None:
        where = where + shifts[torch.searchsorted(ends, where, right=True)]
    indices = torch.where(inside, where, length).to(torch.int32)
    return indices, inside.sum(dtype=torch.int32)


def pick_torch(u: Tensor, indices: Tensor) -> Tensor:
    """See `pick`."""
    where = indices.clamp(max=u.numel() - 1)
    return torch.where(indices < u.numel(), u[where], 0)


def grid(size: int) -> tuple[int, int]:
    """The sides of the smallest grid, nearly a square, that has `size` cells."""
    a = max(1, math.isqrt(size))
    return a, -(-size // a)


def permuted(x: Tensor, size: int, key: Tensor) -> Tensor:
    """Where each x (int64) lands under a permutation of 0..size-1 keyed by `key` (0-d int64)."""
    a, b = grid(size)
    out = _feistel(x, a, b, key)
    for _ in range(_walks(size, a * b)):
        if out.device.type == "cpu" and bool((out < size).all()):
            break
        out = torch.where(out < size, out, _feistel(out, a, b, key))
    return out


def _walks(size: int, cells: int) -> int:
    """Steps after which an entry is outside with probability 10^-20; at most what is outside."""
    if cells == size:
        return 0
    return min(cells - size, math.ceil(math.log(1e-20) / math.log((cells - size) / cells)))


def _feistel(x: Tensor, a: int, b: int, key: Tensor) -> Tensor:
    left, right = x // b, x % b
    for r in range(ROUNDS):
        left = (left + (splitmix64_golden(right + key + 2 * r) & 0x7FFFFFFF)) % a
        right = (right + (splitmix64_golden(left + key + 2 * r + 1) & 0x7FFFFFFF)) % b
    return left * b + right


_draw_on = versions(draw_torch, triton="gradwire.kernels.triton.draw.draw_triton")
_pick_on = versions(pick_torch, triton="gradwire.kernels.triton.draw.pick_triton")
