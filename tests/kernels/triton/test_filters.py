"""filter_gradients in Triton, beside its reference."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, ON_GPU  # isort: skip
from gradwire.workbench.simulate.filters import filter_gradients_torch
from gradwire.workbench.simulate.filters_triton import filter_gradients_triton

TYPES = [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32]
"""Triton's interpreter multiplies the bits of bf16."""
SHAPES = [(3, 16, 1, 8), (16, 16, 1, 9), (16, 24, 2, 8), (32, 64, 2, 6)]


@pytest.mark.parametrize(("inputs", "outputs", "stride", "side"), SHAPES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_workers_filters(inputs, outputs, stride, side, dtype):
    draw = torch.Generator().manual_seed(inputs)
    x = torch.randn(6, inputs, side, side, generator=draw).to(DEVICE, dtype)
    size = (side - 1) // stride + 1
    slope = torch.randn(6, outputs, size, size, generator=draw).to(DEVICE, dtype)
    found = filter_gradients_triton(x, slope, 2, 3, stride, 1)
    expected = filter_gradients_torch(x.double(), slope.double(), 2, 3, stride, 1)
    assert found.shape == (2, outputs, inputs, 3, 3)
    assert found.dtype == torch.float32
    assert (found - expected).norm() < 2e-3 * expected.norm()


def test_more_pixels_than_one_program_takes():
    x, slope = (torch.randn(4, 16, 24, 24, device=DEVICE) for _ in range(2))
    found = filter_gradients_triton(x, slope, 2, 3, 1, 1)
    expected = filter_gradients_torch(x, slope, 2, 3, 1, 1)
    assert (found - expected).norm() < 2e-3 * expected.norm()
    assert torch.equal(found, filter_gradients_triton(x, slope, 2, 3, 1, 1))
