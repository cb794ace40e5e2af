"""The CPU scan beside busy cores: it goes on alone, with the same result."""

import importlib

import pytest
import torch

from gradwire.kernels.scan import scan_torch
from gradwire.types import align

module = importlib.import_module("gradwire.kernels.scan")


@pytest.mark.parametrize("late", [0.0, float("inf")])
@pytest.mark.parametrize("bad", [None, 2**18 + 70_001])
def test_blocks_of_any_size_give_the_same(late, bad, monkeypatch):
    monkeypatch.setattr(module, "LATE", late)
    generator = torch.Generator().manual_seed(3)
    gradient = torch.randn(2**18 + 100_003, generator=generator)
    if bad is not None:
        gradient[bad] = float("nan")
    size = align(gradient.numel())
    kept = torch.zeros(size)
    kept[: gradient.numel()] = torch.randn(gradient.numel(), generator=generator)
    outcomes = []
    for version in (scan_torch, module.scan_cpu):
        u, maxima = kept.clone(), torch.full((size // 64,), -1.0)
        finite = version(u, [(0, gradient)], maxima, 64)
        assert bool(finite) == (bad is None)
        outcomes.append((u, maxima))
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
