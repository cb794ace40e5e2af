"""The reference of permuted: plain torch, any device, no host sync on CUDA."""

import math

import torch
from torch import Tensor

ROUNDS = 6


def permuted_torch(x: Tensor, size: int, key: Tensor) -> Tensor:
    """See `permuted`."""
    a = max(1, math.isqrt(size))
    b = -(-size // a)
    out = _feistel(x, a, b, key)
    for _ in range(walks(size, a * b)):
        if out.device.type == "cpu" and bool((out < size).all()):
            break
        out = torch.where(out < size, out, _feistel(out, a, b, key))
    return out


def walks(size: int, grid: int) -> int:
    """Steps after which an entry is outside with probability 10^-20; at most what is outside."""
    if grid == size:
        return 0
    return min(grid - size, math.ceil(math.log(1e-20) / math.log((grid - size) / grid)))


def _feistel(x: Tensor, a: int, b: int, key: Tensor) -> Tensor:
    left, right = x // b, x % b
    for r in range(ROUNDS):
        left = (left + (mix(right + key + 2 * r) & 0x7FFFFFFF)) % a
        right = (right + (mix(left + key + 2 * r + 1) & 0x7FFFFFFF)) % b
    return left * b + right


_A, _B = -7046029254386353131, -4658895280553007687


def mix(x: Tensor) -> Tensor:
    """A 64-bit finaliser (splitmix64) on int64 tensors, whose products wrap."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _B
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _A
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
