"""One GradScaler for two models: an overflow of one is no skipped step of the other."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import AttachError
from tests.integrate import models
from tests.integrate.fsdp import models as sharded_models
from tests.integrate.test_skipped import Ledger

OVERFLOWS = {2: (1,), 4: (0,), 5: (0, 1)}
"""By step, the models that overflow."""


class Trained:
    """A model, its wire, its optimiser and its books; the wire does not see what overflows."""

    def __init__(self, seed, scaler, known, fused):
        self.ddp = DistributedDataParallel(models.model(seed), bucket_cap_mb=0.01)
        self.extra = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.SGD([*self.ddp.parameters(), self.extra], 0.05, fused=fused)
        given = {"optimizer": self.optimizer} if known else {}
        self.wire = gradwire.attach(self.ddp, density=0.01, dense_below=0, scaler=scaler, **given)
        self.ledger = Ledger(self.ddp, self.wire)


def shared(rank, known, fused):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    both = [Trained(seed, scaler, known, fused) for seed in range(2)]
    for step in range(8):
        over = OVERFLOWS.get(step, ())
        for index, one in enumerate(both):
            one.ledger.gradient(rank, step)
            one.optimizer.zero_grad()
            loss = one.ddp(models.data(rank, step)).square().mean()
            scaler.scale(loss + one.extra * (float("inf") if index in over else 1)).backward()
        for index, one in enumerate(both):
            scaler.unscale_(one.optimizer)
            scaler.step(one.optimizer)
            if index not in over:
                one.ledger.update()
        scaler.update()
        if step == 2 and known:
            # What became of the step is not settled yet: it has to be in the checkpoint.
            for one in both:
                saved = one.wire.state_dict()
                one.wire.status.optimizer_watch.stepped.zero_()
                one.wire.load_state_dict(saved)
    found = [(one.ledger.error(), one.wire.stats().skipped) for one in both]
    for one in both:
        one.wire.close()
    return found, [len(one.optimizer._optimizer_step_post_hooks) for one in both]


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_another_model_puts_nothing_back(ranks, fused):
    for found, hooks in ranks.run(2, shared, True, fused):
        assert all(error < 1e-5 for error, _ in found)
        assert [skipped for _, skipped in found] == [2, 2]
        assert hooks == [0, 0]


def test_without_the_optimizer_any_overflow_decides(ranks):
    for found, _ in ranks.run(2, shared, False, False):
        assert all(error > 1e-3 for error, _ in found), "the test shows nothing"
        assert [skipped for _, skipped in found] == [3, 3]


def accumulated(rank):
    """Two backward passes and one step: the first is not a step that was skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    axes = sharded_models.mesh()
    net = sharded_models.sharded(sharded_models.model(), axes["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wire = gradwire.attach(
        net, replicate_group=axes["replicate"], density=0.02, scaler=scaler, optimizer=optimizer
    )
    for step in range(4):
        scaler.scale(sharded_models.loss(net, sharded_models.data(step))).backward()
        if step % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    skipped = wire.stats().skipped
    wire.close()
    return skipped


def test_a_pass_without_a_step_is_not_skipped_and_shards_take_an_optimizer(ranks):
    assert ranks.run(4, accumulated) == [0, 0, 0, 0]


def refused(rank):
    ddp, wire = models.wrapped()
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wrapper = torch.optim.SGD.__new__(torch.optim.SGD)
    said = []
    for given in ({"optimizer": [optimizer]}, {"optimizer": wrapper, "scaler": scaler}):
        try:
            gradwire.attach(ddp, **given)
        except AttachError as error:
            said.append(str(error))
    wire.close()
    return said


def test_what_tells_nothing_is_refused(ranks):
    alone, wrapper = ranks.run(1, refused)[0]
    assert "got list: give the one inside a wrapper" in alone
    assert "got SGD: give the one inside a wrapper" in wrapper
