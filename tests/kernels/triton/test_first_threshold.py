"""once in Triton: the reference's magnitude, taken once."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip
from gradwire.kernels.threshold import first_threshold_torch
from gradwire.kernels.triton.threshold import first_threshold_triton
from tests.compress.test_degenerate import INPUTS
from tests.distributions import draw


@pytest.mark.parametrize("name", [*INPUTS, "t3", "bf16"])
def test_the_first_u_that_is_not_zero(name):
    u = INPUTS[name] if name in INPUTS else draw("t3", 40_011)
    u = u.to(DEVICE, torch.bfloat16 if name == "bf16" else torch.float32)
    for step in (1, 7):
        mine, theirs = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
        for vector in (torch.zeros_like(u), u, -3 * u):
            found = first_threshold_triton(mine, vector, step, 0.125)
            # In fp32 the reference's squares may overflow, or vanish.
            expected = first_threshold_torch(theirs, vector.double(), step, 0.125)
            assert torch.isclose(mine, theirs, rtol=1e-6, atol=1e-44)
            assert found.shape == expected.shape == ()
            assert found == torch.nextafter(mine, torch.zeros_like(mine))
        assert (mine > 0) == u[::step].any()


def test_what_is_kept_stays():
    kept = torch.tensor(0.3, device=DEVICE)
    u = torch.full((9,), float("nan"), device=DEVICE)
    assert first_threshold_triton(kept, u, 1, 1.0) == first_threshold_torch(kept.clone(), u, 1, 1.0)
    assert kept == torch.tensor(0.3)
