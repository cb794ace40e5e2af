"""Everything beyond a threshold, by magnitude where there is no room for all of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels import above
from gradwire.kernels.select import above_cpu, above_torch
from tests.kernels.test_select import KINDS, sorted_topk, vector


def definition(u, threshold, capacity):
    """Indices, without padding."""
    passing = torch.nonzero(u.abs() > threshold).view(-1)
    if passing.numel() <= capacity:
        return passing.to(torch.int32)
    return passing[sorted_topk(u[passing], capacity).long()].to(torch.int32)


def check(version, u, threshold, capacity, maxima=None, block=0):
    indices, values, count = version(u, threshold, capacity, maxima, block)
    expected = definition(u, threshold, capacity)
    n = expected.numel()
    assert int(count) == n
    assert count.dtype == indices.dtype == torch.int32
    assert values.dtype == u.dtype
    assert torch.equal(indices[:n], expected)
    assert torch.equal(values[:n], u[expected.long()])
    assert indices.shape == values.shape == (capacity,)
    assert (indices[n:] == u.numel()).all()
    assert not values[n:].any()


@pytest.mark.parametrize("version", [above_torch, above_cpu])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 3000),
    capacity=st.integers(0, 3100),
    rank=st.floats(0, 1),
    grouped=st.booleans(),
)
def test_definition(version, kind, size, capacity, rank, grouped):
    u = vector(kind, size)
    threshold = u.abs().sort().values[int(rank * (size - 1))]
    maxima, block = None, 0
    if grouped:
        maxima, block = torch.stack([part.abs().max() for part in u.split(16)]), 16
    check(version, u, threshold, capacity, maxima, block)


@pytest.mark.parametrize("version", [above_torch, above_cpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_compared_without_rounding_the_threshold(version, dtype):
    u = vector("gaussian", 2000).to(dtype)
    for capacity in (10, 2000):
        threshold = torch.nextafter(u[7].abs().float(), torch.tensor(0.0))
        check(version, u.float() if dtype != torch.float64 else u, threshold, capacity)
        assert 7 in version(u, threshold, 2000)[0]


@pytest.mark.parametrize("threshold", [float("nan"), float("inf"), -1.0])
def test_thresholds_that_pass_nothing_or_everything(threshold):
    u = torch.tensor([1.0, 0.0, -2.0])
    for version in (above, above_torch):
        n = int(version(u, torch.tensor(threshold), 3)[2])
        assert n == (3 if threshold == -1 else 0)


def test_a_group_that_does_not_pass_is_not_read():
    u, maxima = torch.ones(128), torch.tensor([0.5, 1.0])
    assert above(u, torch.tensor(0.5), 128, maxima, 64)[0][:64].tolist() == list(range(64, 128))
