"""The momentum op: torch's SGD is the reference."""

import pytest
import torch

from gradwire import kernels
from gradwire.kernels.momentum import momentum_cpu, momentum_torch
from gradwire.kernels.scan import ALONE
from tests.kernels.compare import agree


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


@pytest.mark.parametrize("bad", [None, float("nan")])
@pytest.mark.parametrize("nesterov", [False, True])
def test_blocks_give_the_bits_of_the_reference(bad, nesterov):
    size = 3 * ALONE + 128
    gradient, start, speed = torch.randn(3, size).unbind()
    if bad is not None:
        gradient[ALONE] = bad
    pieces = [(0, gradient[:100]), (128, gradient[128 : 2 * ALONE + 131].bfloat16())]
    args = (start, speed, pieces, torch.zeros(size // 64), 64, 0.9, torch.tensor(0.5), nesterov)
    (finite,) = agree(momentum_torch, momentum_cpu, *args)
    assert bool(finite) == (bad is None)
