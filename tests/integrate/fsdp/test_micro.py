"""FSDP2 and gradient accumulation: micro-batches before the last wait in the residual."""

import pytest
import torch

from gradwire.errors import ConfigError
from tests.integrate.fsdp import models

MICRO = {
    "all-reduce off": lambda net, last: net.set_requires_all_reduce(last),
    "not the last": lambda net, last: net.set_is_last_backward(last),
    "gradient sync off": lambda net, last: net.set_requires_gradient_sync(last),
}


def accumulate(net, optimizer, how, steps):
    """Three micro-batches a step; the gradient's norm after the second and after the third."""
    for step in range(steps):
        optimizer.zero_grad()
        norms = []
        for micro in range(3):
            MICRO[how](net, micro == 2)
            models.loss(net, models.data(10 * step + micro)).backward()
            got = [p.grad.to_local().norm() for p in net.parameters() if p.grad is not None]
            norms.append(float(sum(got)))
        yield norms[1:]
        optimizer.step()


def micro_native(rank, how):
    axes = models.mesh()
    ours, wire = models.wrapped(axes, density=1.0)
    theirs = models.sharded(models.model(), axes)
    norms = []
    for net in (theirs, ours):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        norms = list(accumulate(net, optimizer, how, 3))
    steps = wire.stats().steps
    wire.close()
    return models.flat(ours), models.flat(theirs), steps, norms


@pytest.mark.parametrize("how", MICRO)
def test_micro_batches_equal_native_hybrid_sharding(ranks, how):
    for ours, theirs, steps, norms in ranks.run(4, micro_native, how):
        # The mean of sums and the sum of means are rounded differently.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert steps == 3
        for before, last in norms:
            assert before == 0, "a micro-batch before the last delivered something"
            assert last > 0


def micro_ledger(rank, how):
    net, wire = models.wrapped()
    seen = models.spied(wire)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows, old = [], models.joined(models.residuals(net, wire))
    for _ in accumulate(net, optimizer, how, 4):
        u = models.joined(seen) + old
        update = models.joined(models.gradients(net))
        old = models.joined(models.residuals(net, wire))
        rows.append((u, update, old))
        seen.clear()
    stats = wire.stats()
    wire.close()
    return rows, models.flat(net), stats.asdict()


@pytest.mark.parametrize("how", ["all-reduce off", "gradient sync off"])
def test_the_law_over_micro_batches(ranks, how):
    models.check_law(ranks.run(4, micro_ledger, how))


def micro_momentum(rank, how):
    net, wire = models.wrapped(momentum=0.9)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        for _ in accumulate(net, optimizer, how, 1):
            pass
    except ConfigError as error:
        return str(error)
    finally:
        wire.close()
    return "went on"


def test_momentum_wants_micro_batches_added_up_first(ranks):
    assert set(ranks.run(4, micro_momentum, "gradient sync off")) == {"went on"}
    for message in ranks.run(4, micro_momentum, "all-reduce off"):
        assert "use set_requires_gradient_sync(False) until the last one" in message
