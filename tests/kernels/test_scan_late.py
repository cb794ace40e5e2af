"""The CPU scan beside busy cores: it goes on alone, with the same result."""

import importlib

import pytest
import torch

from gradwire.kernels.scan import scan_torch
from gradwire.types import align
from tests.kernels.compare import agree

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
    args = (kept, [(0, gradient)], torch.full((size // 64,), -1.0), 64)
    (finite,) = agree(scan_torch, module.scan_cpu, *args)
    assert bool(finite) == (bad is None)
