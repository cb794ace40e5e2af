"""The momentum op: torch's SGD is the reference."""

import pytest
import torch

from gradwire import kernels


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_gathers_is_what_sgd_would_have_added_up(nesterov):
    theirs = torch.zeros(300, requires_grad=True)
    sgd = torch.optim.SGD([theirs], lr=1.0, momentum=0.7, nesterov=nesterov)
    residual, velocity, maxima = torch.zeros(320), torch.zeros(320), torch.zeros(5)
    for _ in range(5):
        theirs.grad = torch.randn(300)
        pieces = [(0, theirs.grad[:64] * 8), (64, theirs.grad[64:] * 8)]
        finite = kernels.momentum(
            residual, velocity, pieces, maxima, 64, 0.7, torch.tensor(0.125), nesterov
        )
        sgd.step()
        assert bool(finite)
    torch.testing.assert_close(residual[:300], -theirs.detach())
    assert torch.equal(maxima, residual.view(5, 64).abs().amax(1))
    assert not residual[300:].any()
    assert not velocity[300:].any()
