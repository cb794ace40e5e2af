"""What is learned of u from a part of it."""

import math

import pytest
import torch

from gradwire.compress.thresholds import (
    RANKED_MAXIMA,
    RUN_LENGTH,
    count_bounds,
    prime_stride,
    sample_magnitudes,
    sample_runs,
)
from gradwire.kernels.threshold import STEP, highest_rung, just_below, ranked_values
from gradwire.types import Scan
from tests.compress.test_selectors import drawn, scanned
from tests.distributions import MAKERS


def magnitudes(u, scan, *counts):
    values, every, ranks = count_bounds(u, scan, *counts)
    return ranked_values(values, every, *ranks)


@pytest.mark.parametrize("kind", MAKERS)
def test_k_entries_reach_it_and_not_many_more(kind):
    u = drawn(kind, 10**6)
    ordered = u.abs().sort(descending=True).values
    for k in (1, 1000, 10**5):
        for scan in (scanned(u, k)[1], None):
            low = magnitudes(u, scan, k)[0]
            if low > 0:
                n = int((u.abs() >= low).sum())
                assert k <= n
                assert n <= 2 * k + 500 or scan is None or kind == "layers"
            assert low <= ordered[k - 1]


def test_reached_counts_the_groups_that_are_sampled():
    """Maxima 1, 2, 3, ...: the rank can be read off."""
    n = 50 * RANKED_MAXIMA
    step = prime_stride(n, RANKED_MAXIMA)
    scan = Scan(torch.tensor(True), torch.arange(n).float(), 64)
    u, k = torch.zeros(64), 10 * step
    first, second = magnitudes(u, scan, k, 2 * k)
    kth = n - k
    assert 0 <= kth - float(first) <= (6 * math.sqrt(10) + 2) * step
    assert float(second) < float(first)


@pytest.mark.parametrize(("size", "entries"), [(10, 3), (10**6, 100), (131_072, 2), (7, 100)])
def test_stride_is_prime_and_leaves_enough(size, entries):
    step = prime_stride(size, entries)
    assert step == 1 or all(step % f for f in range(2, step))
    assert sample_magnitudes(torch.ones(size), entries).numel() >= min(size, entries)
    assert prime_stride(10**6, 100) == 9973


@pytest.mark.parametrize(
    ("size", "entries"), [(10**6, 10**4), (10**6 + 5, 999), (100, 8), (64, 1), (7, 3), (90, 88)]
)
def test_runs_are_of_eight_at_a_prime_distance(size, entries):
    seen = sample_runs(-torch.arange(1, size + 1).float(), entries)
    assert min(size, entries) <= seen.numel() <= size
    if seen.numel() < size:
        rows = seen.view(-1, RUN_LENGTH) - 1
        step = (
            int(rows[1, 0]) // RUN_LENGTH
            if len(rows) > 1
            else prime_stride(size // RUN_LENGTH, -(-entries // RUN_LENGTH))
        )
        assert all(step % f for f in range(2, step))
        expected = torch.arange(0, size - RUN_LENGTH + 1, RUN_LENGTH * step)[
            :, None
        ] + torch.arange(RUN_LENGTH)
        assert torch.equal(rows, expected.float())


def test_just_below():
    x = torch.tensor([0.0, 1e-45, 1.0, 3e38])
    below = just_below(x)
    assert (below[1:] < x[1:]).all()
    assert below[0] == 0
    assert float(below[2]) == 1 - 2**-24


def test_the_rung_is_on_the_ladder_and_within_one_step():
    mean, top = torch.tensor(0.8), torch.tensor(5.7)
    step = math.log(5.7 / 0.8) * STEP
    for sure in (0.1, 0.9, 3.29, 5.69):
        found = float(highest_rung(mean, top, torch.tensor(sure)))
        assert sure * math.exp(-step) * (1 - 1e-5) <= found <= sure
        assert math.log(found / 0.8) / step == pytest.approx(
            round(math.log(found / 0.8) / step), abs=1e-3
        )
