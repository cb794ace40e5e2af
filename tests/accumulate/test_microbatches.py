"""Micro-batches that wait in the residual."""

import pytest
import torch

from gradwire.accumulate import Bundle, Correction
from gradwire.accumulate.layout import assign_offsets
from gradwire.types import Everything, Slot

TAKEN, SKIPPED = torch.tensor(False), torch.tensor(True)


def bundle(**kw):
    slots = assign_offsets([Slot(str(n), (n,), (1,), torch.float32, numel=n) for n in (70, 5)])
    return Bundle(slots, torch.device("cpu"), rank=0, index=0, dense=False, **kw)


def pieces(b, seed):
    generator = torch.Generator().manual_seed(seed)
    return [(s.offset, torch.randn(s.numel, generator=generator)) for s in b.slots]


@pytest.mark.parametrize("skipped", [TAKEN, SKIPPED])
def test_held_and_delivered_later_is_the_sum(skipped):
    """The first of them settles the step before."""
    b = bundle()
    b.accumulate(pieces(b, 0), 0, TAKEN)
    before = b.u.clone() * skipped
    b.deliver(Everything(), ok=~TAKEN)
    for seed in (1, 2):
        b.add_microbatch(pieces(b, seed), skipped)
    assert bool(b.accumulate(pieces(b, 3), 0, skipped).finite)
    for seed in (1, 2, 3):
        for offset, gradient in pieces(b, seed):
            before[offset : offset + gradient.numel()] += gradient
    torch.testing.assert_close(b.u, before)


@pytest.mark.parametrize("bad", [0, 1])
def test_one_that_is_not_finite_spoils_the_step_and_only_that(bad):
    b = bundle()
    for micro in (0, 1):
        gradients = pieces(b, micro)
        if micro == bad:
            gradients[0][1][3] = float("inf")
        b.add_microbatch(gradients, TAKEN)
    assert not bool(b.accumulate(pieces(b, 2), 0, TAKEN).finite)
    assert torch.isfinite(b.u).all()
    b.deliver(Everything(), ok=TAKEN)
    assert bool(b.accumulate(pieces(b, 3), 0, SKIPPED).finite)


def test_momentum_does_not_decay_by_micro_batches():
    b = bundle(correction=Correction(momentum=0.9))
    with pytest.raises(AssertionError, match="would decay"):
        b.add_microbatch(pieces(b, 0), TAKEN)
