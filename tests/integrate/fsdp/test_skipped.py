"""FSDP2 and steps that do not happen, on one shard, one unit or half of a backward pass."""

import warnings

import pytest
import torch

import gradwire
from gradwire.errors import AttachError
from tests.integrate.fsdp import models


def spoiled(rank, how, micro):
    """Step 1 is spoiled in one shard of one replica; nobody takes it."""
    net, wire = models.wrapped()
    switch = {"on": False}

    def change(unit, flat):
        if switch["on"] and rank == 3 and unit.name == "blocks.1":
            flat[7] = float(how)

    seen = models.spied(wire, change)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    total = out = 0
    bad = []
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2 if micro else 1):
            switch["on"] = step == 1 and part == 0
            net.set_requires_all_reduce(not micro or part == 1)
            models.loss(net, models.data(10 * step + part)).backward()
        update = models.joined(models.gradients(net))
        bad.append(not bool(torch.isfinite(update).all()))
        total = total + models.joined(seen)
        seen.clear()
        if step != 1:
            optimizer.step()
            out = out + update
    kept = models.joined(models.residuals(net, wire))
    stats = wire.stats()
    wire.close()
    return total, out, kept, bad, stats.skipped, models.flat(net)


@pytest.mark.parametrize(("how", "micro"), [("inf", False), ("nan", False), ("inf", True)])
def test_a_shard_that_is_not_finite_stops_the_step_on_all_of_them(ranks, how, micro):
    results = ranks.run(4, spoiled, how, micro)
    for _, _, _, bad, skipped, _ in results:
        assert bad == [False, True, False, False]
        assert skipped == 1
    for replicas in models.same_shard(results):
        totals, outs, kept, _, _, params = zip(*replicas, strict=True)
        assert torch.equal(*params)
        error = (sum(totals) - sum(kept)) / 2 - outs[0]
        assert float(error.abs().max()) < 1e-5, "something was lost"


def scaled(rank):
    """Steps 1 and 4 overflow in one shard of one replica: the scaler sees it everywhere."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    net, wire = models.wrapped(scaler=scaler)
    switch = {"on": False}

    def change(unit, flat):
        if switch["on"] and rank == 2 and unit.name == "blocks.0":
            flat[3] = float("inf")

    seen = models.spied(wire, change)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    total = out = 0
    scales = []
    for step in range(7):
        switch["on"] = step in (1, 4)
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        scaler.scale(models.loss(net, models.data(step))).backward()
        total = total + models.joined(seen) / scales[-1]
        seen.clear()
        scaler.step(optimizer)
        if not switch["on"]:
            out = out + models.joined(models.gradients(net))
        scaler.update()
    kept = models.joined(models.residuals(net, wire))
    skipped = wire.stats().skipped
    wire.close()
    return total, out, kept, scales, skipped, models.flat(net)


def test_a_scaler_skips_on_every_rank(ranks):
    results = ranks.run(4, scaled)
    for _, _, _, scales, skipped, _ in results:
        assert scales == [1024, 1024, 512, 512, 1024, 512, 512]
        assert skipped == 2
    for replicas in models.same_shard(results):
        totals, outs, kept, _, _, params = zip(*replicas, strict=True)
        assert torch.equal(*params)
        error = (sum(totals) - sum(kept)) / 2 - outs[0]
        assert float(error.abs().max()) < 1e-5


class Sometimes(models.Net):
    """Uses its second block only where it is told to."""

    use = True

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        if self.use:
            x = self.blocks[1](x)
        return self.last(x)


def sometimes(rank):
    axes = models.mesh()
    torch.manual_seed(0)
    net = models.sharded(Sometimes(), axes["shard"])
    group = axes["replicate"].get_group()
    wire = gradwire.attach(net, replicate_group=group, density=0.02, dense_below=0)
    seen = models.spied(wire)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out = {}
    for step in range(6):
        # The block's step 1 is skipped, but it only comes back in step 4; then it is left out.
        net.use = step in (0, 1, 4)
        optimizer.zero_grad()
        models.loss(net, models.data(step)).backward()
        if step == 1:
            wire.skip_step()
            continue
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                out[name] = out.get(name, 0) + parameter.grad.to_local()
        optimizer.step()
    kept = models.joined(models.residuals(net, wire))
    wire.close()
    return models.joined(seen), models.joined(out), kept, wire.steps


def test_a_unit_that_is_left_out_keeps_its_books(ranks):
    for replicas in models.same_shard(ranks.run(4, sometimes)):
        came, out, kept, steps = zip(*replicas, strict=True)
        error = (sum(came) - sum(kept)) / 2 - out[0]
        assert float(error.abs().max()) < 1e-5
        assert steps == (6, 6)


def unfinished(rank):
    """Step 1 stops after the first unit has delivered; the units begin again."""
    net, wire = models.wrapped()
    if not hasattr(net, "reset_iter_state"):
        wire.close()
        return None
    stop = {"on": False}

    def change(unit, flat):
        if stop["on"] and unit.name == "blocks.0":
            raise KeyboardInterrupt

    seen = models.spied(wire, change)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out, warned = 0, []
    for step in range(4):
        optimizer.zero_grad()
        stop["on"] = step == 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                models.loss(net, models.data(step)).backward()
            except KeyboardInterrupt:
                net.reset_iter_state()
                continue
        warned += [str(w.message) for w in caught if "did not finish" in str(w.message)]
        out = out + models.joined(models.gradients(net))
        optimizer.step()
    kept = models.joined(models.residuals(net, wire))
    wire.close()
    return models.joined(seen), out, kept, warned


def test_a_backward_pass_that_did_not_finish_is_put_back(ranks):
    results = ranks.run(4, unfinished)
    if results[0] is None:
        pytest.skip("this torch cannot go on after a backward pass that failed")
    for replicas in models.same_shard(results):
        came, out, kept, warned = zip(*replicas, strict=True)
        error = (sum(came) - sum(kept)) / 2 - out[0]
        assert float(error.abs().max()) < 1e-5
        assert [len(w) for w in warned] == [1, 1]


class Partly(models.Net):
    """Uses only one parameter of its blocks."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            block.forward = lambda x, block=block: block.gain * x
            x = block(x)
        return self.last(x)


def not_supported(rank, what):
    axes = models.mesh()
    net = models.sharded(Partly() if what == "partly" else models.Net(), axes["shard"])
    wire = gradwire.attach(net, replicate_group=axes["replicate"], density=0.02)
    hook = wire.engine.hook
    if what == "twice":
        wire.engine.hook = lambda unit, flat: (hook(unit, flat), hook(unit, flat))
    try:
        models.train(net, 1)
    except AttachError as error:
        return str(error)
    finally:
        wire.close()
    return "went on"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("twice", "blocks.1 was reduced twice in one backward pass"),
        ("partly", "blocks.1 handed over 1 entries of torch.float32, expected 721 of"),
    ],
)
def test_what_a_hook_cannot_serve_is_refused_in_the_backward_pass(ranks, what, message):
    assert all(message in m for m in ranks.run(4, not_supported, what))
