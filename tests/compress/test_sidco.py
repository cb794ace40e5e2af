"""SIDCo: the stages by the table are those of the definition, and their number adapts."""

import math

import pytest
import torch

from gradwire.kernels.sidco import sidco_fit_torch
from gradwire.types import Memory
from tests.compress.test_selectors import choose, drawn


def definition(x, share, stages):
    """Stage by stage over the survivors."""
    if stages == 1:
        return float(x.mean()) * math.log(1 / share)
    threshold = float(x.mean()) * math.log(4)
    rate = (share / 0.25) ** (1 / (stages - 1))
    for _ in range(stages - 1):
        left = x[x > threshold]
        threshold = float(left.min() + (left.mean() - left.min()) * math.log(1 / rate))
    return threshold


@pytest.mark.parametrize("kind", ["gaussian", "t3", "layers", "zeros"])
def test_fit_is_the_definition(kind):
    x = drawn(kind, 10**5).abs()
    for share, stages in ((0.1, 1), (0.1, 2), (0.01, 3), (0.001, 4), (0.001, 7)):
        most = math.ceil(math.log2(1 / share))
        found = float(sidco_fit_torch(x, 1, share, torch.tensor(stages), most))
        assert found == pytest.approx(definition(x.double(), share, stages), rel=1e-5)


@pytest.mark.parametrize(("kind", "expected"), [("gaussian", [1, 2, 3, 4]), ("uniform", [6, 5])])
def test_stages_adapt_after_every_fifth_call(kind, expected):
    """One stage finds nothing on a Gaussian, six find too much on uniform data."""
    u, k, memory = drawn(kind, 10**5), 100, Memory()
    memory["stages"] = torch.tensor(expected[0])
    for stages in expected:
        for _ in range(5):
            assert int(memory["stages"]) == stages
            choose("sidco", u, k, memory, capacity=100.0)


def test_the_count_of_the_documented_data():
    """count / k with M = 1, 2, 3, 4 at density 0.001, from the literature."""
    for kind, expected in (("gaussian", [0, 0.10, 0.71, 1.06]), ("laplace", [1.03, 1.03, 1.02, 1])):
        x = drawn(kind, 10**6)[:400_000].abs()
        for stages, share in enumerate(expected, 1):
            n = int((x > sidco_fit_torch(x, 1, 0.001, torch.tensor(stages), 10)).sum())
            assert n / 400 == pytest.approx(share, abs=0.1)
