"""Gaussian_k as published: Algorithm 1, and the authors' code, with messages as long as needed."""

import torch
from torch import Tensor

from gradwire.compress.thresholds import normal_quantile, select_beyond
from gradwire.errors import ConfigError
from gradwire.types import Memory, Scan, Sparse

TESTS = {"paper": 4, "released": 3}
"""The number of thresholds that a variant tests."""


def published(u: Tensor, k: int, memory: Memory, scan: Scan | None, variant: str) -> Sparse:
    """Return the entries that the last test of `variant` let pass, whatever their number."""
    if u.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"gaussiank's variant {variant!r} asks the host how many entries passed, which no CUDA "
            "graph can capture: use variant='repaired'"
        )
    real = memory.real_size(u)
    share = k / real
    z = normal_quantile(1 - share if variant == "paper" else 1 - share / 2)
    tested, counts = successive_tests(u, mean_and_deviations(u, real, z), k, TESTS[variant])
    return select_beyond(u, tested[-1], memory.longest(counts[-1]), scan)


def mean_and_deviations(u: Tensor, real: int, z: float) -> Tensor:
    """Return mean + z std (N - 1, as torch.std) of the `real` entries; padding does not count."""
    total = u.sum(dtype=torch.float64)
    squares = torch.linalg.vector_norm(u, dtype=torch.float64).square()
    mean = total / real
    variance = (squares - total * mean) / max(1, real - 1)
    return (mean + z * variance.clamp(min=0).sqrt()).float()


def successive_tests(
    u: Tensor, threshold: Tensor, k: int, times: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the thresholds in the order of their tests, and how many entries passed each.

    A threshold that is accepted stays. Each test reads all of u.
    """
    magnitude = u.abs().to(torch.promote_types(u.dtype, torch.float32))
    tested: list[Tensor] = []
    counts: list[Tensor] = []
    for _ in range(times):
        passing = (magnitude > threshold).sum()
        tested.append(threshold)
        counts.append(passing)
        threshold = torch.where(
            3 * passing < 2 * k,
            threshold * 0.5,
            torch.where(3 * passing > 4 * k, threshold * 1.5, threshold),
        )
    return tested, counts
