"""draw: take distinct random entries of a vector, without a look at their values."""

import math

import torch
from torch import Tensor

from gradwire.hashing import splitmix64_golden
from gradwire.kernels.dispatch import versions

ROUNDS = 6
"""Rounds of the Feistel network."""


def draw(
    k: int,
    size: int,
    length: int,
    draws: Tensor,
    stream: int,
    ends: Tensor | None = None,
    shifts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return k distinct entries drawn uniformly: int32 indices, ascending, and count (0-d int32).

    A permutation of 0 .. size - 1 sends 0 .. k - 1 to the drawn entries. Its key is a hash of
    `draws` and `stream`, so that every device draws the same entries. The permutation is a Feistel
    network on an a x b grid that just covers `size`. An entry that lands outside `size` is permuted
    again until it lands inside.
    draws: 0-d int64, the number of draws before this one; one more afterwards. stream: a 64-bit
    number.
    length: entries of the vector, `size` of them not padding.
    ends, shifts (int64): entry n of `size` is entry n + shifts[j] of the vector, where j of the
    ends are <= n.
    """
    return _draw_on(draws.device)(k, size, length, draws, stream, ends, shifts)


def pick(u: Tensor, indices: Tensor) -> Tensor:
    """Return the entries of u at the drawn indices; zero where an index is padding."""
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
    """Compute `draw` with torch ops, and sort the drawn entries.

    Only a fixed number of extra permutations is made. Once in 10^20 draws an entry may stay
    outside. Such an entry counts as not drawn, and its index is `length`.
    """
    key = splitmix64_golden(draws + stream)
    draws.add_(1)
    order = torch.arange(k, dtype=torch.int64, device=draws.device)
    drawn = permuted(order, size, key).sort().values
    inside = drawn < size
    entries = drawn.clamp(max=size - 1)
    if ends is not None and shifts is not None:
        entries = entries + shifts[torch.searchsorted(ends, entries, right=True)]
    indices = torch.where(inside, entries, length).to(torch.int32)
    return indices, inside.sum(dtype=torch.int32)


def pick_torch(u: Tensor, indices: Tensor) -> Tensor:
    """Compute `pick` with torch ops."""
    inside = indices.clamp(max=u.numel() - 1)
    return torch.where(indices < u.numel(), u[inside], 0)


def grid(size: int) -> tuple[int, int]:
    """Return the sides of the smallest grid, nearly a square, that has `size` cells."""
    a = max(1, math.isqrt(size))
    return a, -(-size // a)


def permuted(x: Tensor, size: int, key: Tensor) -> Tensor:
    """Return the place of each x (int64) under a permutation of 0 .. size - 1.

    key: 0-d int64, the key of the permutation.
    """
    a, b = grid(size)
    out = _feistel(x, a, b, key)
    for _ in range(_walks(size, a * b)):
        if out.device.type == "cpu" and bool((out < size).all()):
            break
        out = torch.where(out < size, out, _feistel(out, a, b, key))
    return out


def _walks(size: int, cells: int) -> int:
    """Return the number of extra permutations that leave an entry outside with probability 10^-20.

    As many as there are cells outside always suffice.
    """
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
