"""What is learned of u from a part of it."""

import pytest
import torch

from gradwire.compress.dgc import RUN_LENGTH, sample_runs
from gradwire.compress.thresholds import prime_stride, sample_magnitudes
from gradwire.kernels.threshold import just_below


@pytest.mark.parametrize(("size", "entries"), [(10, 3), (10**6, 100), (131_072, 2), (7, 100)])
def test_stride_is_prime_and_leaves_enough(size, entries):
    step = prime_stride(size, entries)
    assert step == 1 or all(step % f for f in range(2, step))
    assert sample_magnitudes(torch.ones(size), entries).numel() >= min(size, entries)
    assert prime_stride(10**6, 100) == 9973


@pytest.mark.parametrize("number", [0, 5, 2**61 + 3])
@pytest.mark.parametrize(
    ("size", "entries"), [(10**6, 10**4), (10**6 + 5, 999), (100, 8), (64, 1), (7, 3), (90, 88)]
)
def test_runs_are_of_eight_at_a_prime_distance_from_a_random_start(size, entries, number):
    seen = sample_runs(-torch.arange(1, size + 1).float(), entries, torch.tensor(number))
    assert min(size, entries) <= seen.numel() <= size
    if seen.numel() < size:
        rows = seen.view(-1, RUN_LENGTH) - 1
        step = prime_stride(size // RUN_LENGTH, -(-entries // RUN_LENGTH))
        assert all(step % f for f in range(2, step))
        starts = (torch.arange(len(rows)) * step + number % step) * RUN_LENGTH
        assert torch.equal(rows, (starts[:, None] + torch.arange(RUN_LENGTH)).float())


def test_just_below():
    x = torch.tensor([0.0, 1e-45, 1.0, 3e38])
    below = just_below(x)
    assert (below[1:] < x[1:]).all()
    assert below[0] == 0
    assert float(below[2]) == 1 - 2**-24
