"""A step that does not happen: what it delivered comes back, and nothing non-finite gets in."""

import torch
import torch.distributed as dist

from tests.integrate import models


class Ledger:
    """Adds up what came in and what came out, to compare them at the end."""

    def __init__(self, ddp, wire):
        self.ddp, self.wire = ddp, wire
        self.net = models.model()
        self.came_in = {n: torch.zeros(p.shape) for n, p in self.net.named_parameters()}
        self.went_out = {n: torch.zeros(p.shape) for n, p in self.net.named_parameters()}

    def gradient(self, rank, step, poison=None):
        """Add this rank's own gradient; entries that are poisoned do not count."""
        self.net.load_state_dict(self.ddp.module.state_dict())
        self.net.zero_grad()
        self.net(models.data(rank, step)).square().mean().backward()
        for name, parameter in self.net.named_parameters():
            gradient = parameter.grad.clone()
            if name == poison:
                gradient.view(-1)[3] = 0
            self.came_in[name] += gradient

    def update(self, scale=1.0):
        for name, parameter in self.ddp.module.named_parameters():
            self.went_out[name] += parameter.grad / scale

    def error(self):
        worst = 0.0
        for name, total in self.came_in.items():
            kept = total - self.wire.residual(name)
            dist.all_reduce(kept)
            difference = kept / dist.get_world_size() - self.went_out[name]
            worst = max(worst, float(difference.abs().max()))
        return worst


def poison(ddp, name, switch):
    """While switch["on"], the fourth entry of that parameter's gradient is infinite."""

    def hook(gradient):
        if switch["on"]:
            gradient = gradient.clone()
            gradient.view(-1)[3] = float("inf")
        return gradient

    ddp.module.get_parameter(name).register_hook(hook)


def scaled(rank, name):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    ddp, wire = models.wrapped(scaler=scaler)
    switch = {"on": False}
    poison(ddp, name, switch)
    ledger = Ledger(ddp, wire)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    scales = []
    for step in range(9):
        switch["on"] = step in (0, 4, 5) and rank == 1
        ledger.gradient(rank, step, name if switch["on"] else None)
        optimizer.zero_grad()
        scale = scaler.get_scale()
        scaler.scale(ddp(models.data(rank, step)).square().mean()).backward()
        before = models.flat(ddp)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if step in (0, 4, 5):
            assert torch.equal(before, models.flat(ddp)), "the scaler took a poisoned step"
        else:
            # step() has unscaled the gradients in place
            ledger.update()
        assert scale > 0
    error, stats = ledger.error(), wire.stats()
    wire.close()
    return models.flat(ddp).numpy().tobytes(), error, stats.asdict(), scales


def test_grad_scaler_overflow_and_growth_lose_nothing(ranks):
    for name in ("c.weight", "a.weight"):
        results = ranks.run(2, scaled, name)
        assert len({r[0] for r in results}) == 1
        for _, error, stats, scales in results:
            assert error < 1e-5
            assert stats["skipped"] == 3
            assert len(set(scales)) > 2, "the scale never changed: the test shows nothing"
            assert 0 < stats["bytes_sent"] < stats["bytes_dense"]


def scaled_elsewhere(rank):
    """The infinite gradient is in a parameter that the wire does not see."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp, wire = models.wrapped(scaler=scaler)
    extra = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*ddp.parameters(), extra], lr=0.05)
    ledger = Ledger(ddp, wire)
    for step in range(5):
        ledger.gradient(rank, step)
        optimizer.zero_grad()
        loss = ddp(models.data(rank, step)).square().mean()
        loss = loss + (extra * (float("inf") if step == 2 else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            ledger.update()
    error, skipped = ledger.error(), wire.stats().skipped
    wire.close()
    return error, skipped


def test_overflow_outside_the_model_is_noticed(ranks):
    for error, skipped in ranks.run(2, scaled_elsewhere):
        assert error < 1e-5
        assert skipped == 1


def by_user(rank, flush):
    ddp, wire = models.wrapped()
    ledger = Ledger(ddp, wire)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(6):
        ledger.gradient(rank, step)
        optimizer.zero_grad()
        if flush and step == 3:
            wire.flush()
        ddp(models.data(rank, step)).square().mean().backward()
        if step == 3:
            wire.skip_step()
            continue
        ledger.update()
        optimizer.step()
    error, skipped = ledger.error(), wire.stats().skipped
    wire.close()
    return error, skipped


def test_skip_step(ranks):
    for flush in (False, True):
        for error, skipped in ranks.run(2, by_user, flush):
            assert error < 1e-5
            assert skipped == 1


def poisoned(rank):
    ddp, wire = models.wrapped(bundle_mb=0.02)
    switch = {"on": rank == 1}
    poison(ddp, "b.weight", switch)
    ddp(models.data(rank, 0)).square().mean().backward()
    grads = {n: bool(torch.isfinite(p.grad).any()) for n, p in ddp.module.named_parameters()}
    residuals = [bool(torch.isfinite(wire.residual(n)).all()) for n in grads]
    bundles = wire.state_dict()["bundles"]
    wire.close()
    return grads, residuals, bundles


def test_one_infinite_entry_makes_its_bundle_nan_on_every_rank(ranks):
    results = ranks.run(2, poisoned)
    for grads, residuals, bundles in results:
        bad = next(b for b in bundles if "b.weight" in b)
        assert len(bundles) > 1
        assert {n for n, finite in grads.items() if not finite} == set(bad)
        assert all(residuals)


def scale_set_by_hand(rank, reload):
    """A loop that sets the scale itself: lower after a step that was taken, higher after one that
    was skipped. What becomes of the steps is known from what the scaler found alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp, wire = models.wrapped(scaler=scaler)
    switch = {"on": False}
    poison(ddp, "b.weight", switch)
    ledger = Ledger(ddp, wire)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(8):
        switch["on"] = step in (2, 5) and rank == 1
        ledger.gradient(rank, step, "b.weight" if switch["on"] else None)
        optimizer.zero_grad()
        scaler.scale(ddp(models.data(rank, step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update({1: 256.0, 2: 2048.0, 4: 512.0, 5: 512.0, 6: 16.0}.get(step))
        if step not in (2, 5):
            ledger.update()
        if step in reload:
            # The state says what became of its last step, whatever the scale is by now.
            wire.load_state_dict(wire.state_dict())
    error, skipped = ledger.error(), wire.stats().skipped
    wire.close()
    return error, skipped


def test_a_scale_that_the_user_sets_tells_nothing(ranks):
    for reload in ((), (1, 2, 4, 5)):
        for error, skipped in ranks.run(2, scale_set_by_hand, reload):
            assert error < 1e-5
            assert skipped == 2


def saved_before(rank, poisoned):
    """A state of an older gradwire says only the scale that its last step had."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ddp, wire = models.wrapped(scaler=scaler)
    # Where the wire does not see it: of a bundle that is not finite a state says so.
    extra = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*ddp.parameters(), extra], lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        loss = ddp(models.data(rank, step)).square().mean()
        loss = loss + (extra * (float("inf") if poisoned and step == 1 else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    state = wire.state_dict()
    residual = wire.residual("a.weight")
    del state["skipped"]
    wire.load_state_dict(state)
    same = torch.equal(residual, wire.residual("a.weight"))
    wire.close()
    return same, wire.stats().skipped


def test_an_older_state_is_read(ranks):
    for poisoned in (False, True):
        for same, skipped in ranks.run(2, saved_before, poisoned):
            assert same
            assert skipped == poisoned
