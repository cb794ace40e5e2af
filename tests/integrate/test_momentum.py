"""Momentum correction under DDP: overflows, unused parameters, and plain SGD when all is sent."""

import torch
from torch import nn

from tests.integrate import models
from tests.integrate.test_skipped import Ledger, poison


def dense(rank, corrected, nesterov):
    fields = {"momentum": 0.9, "nesterov": nesterov} if corrected else {}
    ddp, wire = models.wrapped(method="dense", **fields)
    rest = {} if corrected else {"momentum": 0.9, "nesterov": nesterov}
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.05, **rest)
    models.train(ddp, rank, 6, optimizer=sgd)
    wire.close()
    return models.flat(ddp)


def test_everything_sent_is_sgd_with_momentum(ranks):
    for nesterov in (False, True):
        (ours, _), (theirs, _) = (ranks.run(2, dense, x, nesterov) for x in (True, False))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


class Momentum(Ledger):
    """What comes in is each step's momentum; without masking it depends on the gradients only."""

    def __init__(self, ddp, wire):
        super().__init__(ddp, wire)
        self.m = {n: torch.zeros(p.shape) for n, p in self.net.named_parameters()}

    def gradient(self, rank, step, poison=None):
        before = {n: total.clone() for n, total in self.came_in.items()}
        super().gradient(rank, step)
        for name, total in self.came_in.items():
            m = 0.9 * self.m[name] + (total - before[name])
            step_in = m.clone()
            if name == poison:
                m.view(-1)[3], step_in.view(-1)[3] = self.m[name].view(-1)[3], 0
            self.m[name] = m
            total.copy_(before[name] + step_in)


def scaled(rank, fields):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    ddp, wire = models.wrapped(scaler=scaler, momentum=0.9, masking=False, **fields)
    switch = {"on": False}
    poison(ddp, "b.weight", switch)
    ledger = Momentum(ddp, wire)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(7):
        bad = step in (0, 3, 4)
        switch["on"] = bad and rank == 1
        ledger.gradient(rank, step, "b.weight" if switch["on"] else None)
        optimizer.zero_grad()
        scaler.scale(ddp(models.data(rank, step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if not bad:
            ledger.update()
    error, stats = ledger.error(), wire.stats()
    wire.close()
    return models.flat(ddp).numpy().tobytes(), error, stats.skipped, stats.bytes_sent


def test_overflows_lose_neither_gradient_nor_momentum(ranks):
    for fields in ({}, {"exchange": "union"}, {"values": "int8", "indices": "packed"}):
        results = ranks.run(2, scaled, fields)
        assert len({r[0] for r in results}) == 1
        for _, error, skipped, _ in results:
            assert error < 1e-4
            assert skipped == 3


class Branches(nn.Module):
    """`b` takes part only when asked."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.use = nn.Linear(31, 40), nn.Linear(31, 40), True

    def forward(self, x):
        return self.a(x) + (self.b(x) if self.use else 0)


def partly_used(rank):
    torch.manual_seed(0)
    net = Branches()
    ddp, wire = models.wrapped(
        net=net, ddp={"find_unused_parameters": True}, density=0.05, momentum=0.9, masking=False
    )
    seen = []
    for step in range(4):
        net.use = step not in (1, 2)
        ddp(models.data(rank, step)).square().mean().backward()
        bundle, slot = wire.home("b.weight")
        m = bundle.view(bundle.momentum(wire.was_skipped()), slot)
        seen.append((m.clone(), wire.residual("b.weight")))
    wire.close()
    return seen


def test_an_unused_parameter_keeps_momentum_and_residual(ranks):
    for first, second, third, fourth in ranks.run(2, partly_used):
        assert float(first[0].norm()) > 0
        for one, other in ((first, second), (second, third)):
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
        assert not torch.equal(third[0], fourth[0])
