"""PyTorch's PowerSGD hook (Vogels et al., 2019), for comparison: what it sends and what it does.

Each gradient of a bucket is a matrix M of n x m, sent as P, n x r, and Q, m x r, where that is less
than half of it: P = M Q, all-reduce, Q = M^T P, all-reduce, M = P Q^T. Everything else goes as it
is in a third all-reduce. The three wait for one another.
"""

import math
from collections.abc import Sequence

from gradwire.plan.machine import Machine
from gradwire.plan.network import Leg, Network
from gradwire.plan.work import Work

PREFIX = "powersgd-"
LEAST = 2
"""How many times smaller P and Q must be together: PyTorch's `min_compression_rate`."""
PASSES = 44 / 12
"""Over the memory floor: M + error 12 bytes an entry, a copy 8, M three times 4, the error 12."""

Shapes = Sequence[Sequence[int]]


def rank_of(method: str) -> int:
    """4 of powersgd-4; 0 for other methods."""
    return int(method.removeprefix(PREFIX)) if method.startswith(PREFIX) else 0


def split(shapes: Shapes, rank: int) -> tuple[int, int, int, int]:
    """Entries sent as they are, of the Ps, of the Qs, and the number of matrices."""
    plain = left = right = matrices = 0
    for shape in shapes:
        n = shape[0] if shape else 1
        m = math.prod(shape) // n
        r = min(n, m, rank)
        if (n + m) * r * LEAST < n * m:
            left, right, matrices = left + n * r, right + m * r, matrices + 1
        else:
            plain += n * m
    return plain, left, right, matrices


def legs(shapes: Shapes, rank: int, network: Network) -> list[Leg]:
    """Three all-reduces around a ring."""
    rounds = 2 * (network.workers - 1)
    sent = [4 * n * rounds / network.workers for n in split(shapes, rank)[:3]]
    return [network.ring(size, rounds) for size in sent] if rounds else []


def work(shapes: Shapes, rank: int, device: Machine) -> Work:
    """The passes over the gradient, and a time for each matrix: each is a few small kernels."""
    matrices = split(shapes, rank)[3]
    entries = sum(math.prod(shape) for shape in shapes)
    each = device.costs.matrix[rank > 2]
    return Work(PASSES * device.floor(entries) + matrices * each + device.bundle, 0.0, 0.0)
