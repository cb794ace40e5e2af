"""PyTorch's PowerSGD hook (Vogels et al., 2019), for comparison: its bytes and its work.

Each gradient of a bucket is a matrix M of n x m. M is sent as P, n x r, and Q, m x r, if these are
less than half of M. The rounds are P = M Q, all-reduce, Q = M^T P, all-reduce, M = P Q^T.
Everything else goes unchanged in a third all-reduce. The three all-reduces wait for one another.
"""

import math
from collections.abc import Sequence

from gradwire.plan.machine import Machine
from gradwire.plan.network import Leg, Network
from gradwire.plan.work import Work

_PREFIX = "powersgd-"
_LEAST = 2
"""The factor by which P and Q together must be smaller: PyTorch's `min_compression_rate`."""
_PASSES = 44 / 12
"""Passes over the memory floor: M + error 12 bytes per entry, a copy 8, M 3 x 4, the error 12."""

_Shapes = Sequence[Sequence[int]]


def powersgd_rank(method: str) -> int:
    """Return 4 for powersgd-4; 0 for other methods."""
    rank = method.removeprefix(_PREFIX)
    return int(rank) if method.startswith(_PREFIX) and rank.isdecimal() else 0


def split_shapes(shapes: _Shapes, rank: int) -> tuple[int, int, int, int]:
    """Return the entries sent unchanged, as Ps and as Qs, and the number of matrices."""
    plain = left = right = matrices = 0
    for shape in shapes:
        n = shape[0] if shape else 1
        m = math.prod(shape) // n
        r = min(n, m, rank)
        if (n + m) * r * _LEAST < n * m:
            left, right, matrices = left + n * r, right + m * r, matrices + 1
        else:
            plain += n * m
    return plain, left, right, matrices


def powersgd_legs(shapes: _Shapes, rank: int, network: Network) -> list[Leg]:
    """Return three all-reduces."""
    rounds = 2 * (network.workers - 1)
    sent = [4 * n * rounds / network.workers for n in split_shapes(shapes, rank)[:3]]
    return [network.all_reduce(size) for size in sent] if rounds else []


def powersgd_work(shapes: _Shapes, rank: int, device: Machine) -> Work:
    """Return the passes over the gradient, and a time for each matrix.

    Each matrix takes a few small kernels.
    """
    matrices = split_shapes(shapes, rank)[3]
    entries = sum(math.prod(shape) for shape in shapes)
    matrix_seconds = device.costs.matrix[rank > 2]
    return Work(
        _PASSES * device.floor(entries) + matrices * matrix_seconds + device.bundle, 0.0, 0.0
    )
