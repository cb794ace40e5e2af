"""first_threshold in Triton: the reference's, up to the rounding of a mean."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip
from gradwire.kernels.threshold import first_threshold_torch
from gradwire.kernels.triton.threshold import first_threshold_triton
from tests.compress.test_degenerate import INPUTS
from tests.kernels.compare import agree


@pytest.mark.parametrize("name", [*INPUTS, "bf16"])
def test_the_first_u_that_is_not_zero_gives_the_threshold_for_good(name):
    u = INPUTS[name].to(DEVICE) if name in INPUTS else torch.randn(40_011).bfloat16().to(DEVICE)
    kept = torch.zeros((), device=DEVICE)
    for vector in (torch.zeros_like(u), u, -3 * u, torch.full_like(u, float("nan"))):
        if kept > 0 or vector.isfinite().all():
            args = (kept, vector, 7, 0.125)
            agree(first_threshold_torch, first_threshold_triton, *args, tolerance=1e-6, wide=1)
            first_threshold_triton(*args)
    assert (kept > 0) == u[::7].any()
