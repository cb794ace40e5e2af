"""method="auto": dense at first, then the planner's choice, the same on every rank."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import ConfigError
from gradwire.plan import auto
from tests.integrate import models

STEPS = auto.SKIPPED + auto.MEASURED


def wrapped(link, **fields):
    """A wire that believes in links of `link` bytes a second: rank 0's is what counts."""
    auto.measure_link = lambda *_: (link, 1e-5)
    fields = {"dense_below": 0, "bundle_mb": 0.02, **fields}
    ddp = DistributedDataParallel(models.model(), bucket_cap_mb=0.01)
    return ddp, gradwire.attach(ddp, method="auto", **fields)


def chosen(rank, link, fields):
    ddp, wire = wrapped(link if rank == 0 else 1e12, **fields)
    before = wire.config.method
    optimizer = models.train(ddp, rank, STEPS)
    still = wire.config.method, wire.reason
    models.train(ddp, rank, 3, start=STEPS, optimizer=optimizer)
    stats = wire.stats()
    wire.close()
    weights = models.flat(ddp).numpy().tobytes()
    return before, still, wire.config, wire.reason, stats, weights


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, {"method": "topk", "density": 0.01}),
        ({"density": 0.05}, {"method": "topk", "density": 0.05}),
        ({"min_density": 0.001, "exchange": "gtopk"}, {"exchange": "gtopk", "density": 0.001}),
        ({"values": "bf16"}, {"values": "bf16", "indices": "int32"}),
        ({"momentum": 0.9, "clip": 1.0}, {"momentum": 0.9, "clip": 1.0, "method": "topk"}),
    ],
)
def test_on_a_slow_link_it_compresses_after_a_few_steps(ranks, fields, wanted):
    results = ranks.run(2, chosen, 1e4, fields)
    assert len({r[-1] for r in results}) == 1
    assert len({(str(r[2]), r[3]) for r in results}) == 1
    for before, still, config, reason, stats, _ in results:
        assert before == "dense"
        assert still == ("dense", "")
        assert {k: getattr(config, k) for k in wanted} == wanted
        assert reason.startswith("measured: ")
        assert "per step against" in reason
        assert stats.dense == {"method": STEPS * stats.bundles}
        assert stats.residual_norm > 0
        assert stats.bytes_sent < stats.bytes_dense


def test_on_a_fast_link_it_stays_dense_and_says_so(ranks):
    for _, _, config, reason, stats, _ in ranks.run(2, chosen, 1e12, {"bundle_mb": 25.0}):
        assert config.method == "dense"
        assert "do not compress" in reason
        assert stats.achieved_density == 1


def chosen_before(rank, kind):
    """What auto chooses on a slow link, where attach sees the optimiser."""
    auto.measure_link = lambda *_: (1e4, 1e-5)
    ddp = DistributedDataParallel(models.model(), bucket_cap_mb=0.01)
    optimizer = getattr(torch.optim, kind)(ddp.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fields = {"dense_below": 0, "bundle_mb": 0.02}
        wire = gradwire.attach(ddp, method="auto", optimizer=optimizer, **fields)
    models.train(ddp, rank, STEPS + 1, optimizer=optimizer)
    wire.close()
    return wire.config.method, wire.reason


def test_before_adam_everything_is_sent_on_a_slow_link_too(ranks):
    for method, reason in ranks.run(2, chosen_before, "AdamW"):
        assert method == "dense"
        assert "Top-k in front of AdamW is not recommended" in reason
    assert {method for method, _ in ranks.run(2, chosen_before, "SGD")} == {"topk"}


def law(rank):
    """The sum of gradients is what the updates and the residuals hold, across the switch."""
    ddp, wire = wrapped(1e4, bundle_mb=25.0, density=0.01)
    given = torch.zeros_like(models.flat(ddp))
    taken = torch.zeros_like(given)
    for step in range(STEPS + 4):
        ddp.zero_grad()
        own = models.model()
        own.load_state_dict(ddp.module.state_dict())
        own(models.data(rank, step)).square().mean().backward()
        given += torch.cat([p.grad.reshape(-1) for p in own.parameters()])
        ddp(models.data(rank, step)).square().mean().backward()
        taken += torch.cat([p.grad.reshape(-1) for p in ddp.parameters()])
        if step == STEPS:
            wire.skip_step()
            taken -= torch.cat([p.grad.reshape(-1) for p in ddp.parameters()])
    names = [name for name, _ in ddp.module.named_parameters()]
    kept = torch.cat([wire.residual(name).reshape(-1) for name in names])
    bundles = len(wire.bundles)
    wire.close()
    return given, taken, kept, bundles


def test_the_law_holds_across_the_switch(ranks):
    results = ranks.run(2, law)
    given = sum(r[0] for r in results) / 2
    kept = sum(r[2] for r in results) / 2
    assert kept.norm() > 0
    for _, taken, _, _ in results:
        torch.testing.assert_close(taken + kept, given, rtol=1e-4, atol=1e-5)


def switched(rank):
    ddp, wire = models.wrapped(density=0.01, momentum=0.9)
    models.train(ddp, rank, 3)
    wire.begin()
    kept = {name: wire.residual(name) for name, _ in ddp.module.named_parameters()}
    gone = [b.momentum(wire.was_skipped()).norm() for b in wire.bundles]
    bundles = len(wire.bundles)
    wire.switch(dataclasses.replace(wire.config, bundle_mb=25.0))
    same = all(torch.equal(wire.residual(name), old) for name, old in kept.items())
    now = [b.momentum(wire.was_skipped()).norm() for b in wire.bundles]
    wire.close()
    norms = [float(torch.stack(n).norm()) for n in (gone, now)]
    return same, sum(float(old.norm()) for old in kept.values()), norms, bundles, len(wire.bundles)


def test_residuals_and_momentum_go_along_into_other_bundles(ranks):
    same, norm, (before, after), old, new = ranks.run(1, switched)[0]
    assert (same, norm > 0, old > new) == (True, True, True)
    assert before == pytest.approx(after) != 0


def resumed(rank, folder):
    ddp, wire = wrapped(1e4)
    optimizer = models.train(ddp, rank, STEPS + 2)
    gradwire.save(wire, folder)
    weights = {k: v.clone() for k, v in ddp.module.state_dict().items()}
    momentum = copy.deepcopy(optimizer.state_dict())
    models.train(ddp, rank, 3, start=STEPS + 2, optimizer=optimizer)
    wire.close()
    # The link is fast now: without the saved choice the resumed run would stay dense.
    again, second = wrapped(1e12)
    again.module.load_state_dict(weights)
    gradwire.load(second, folder)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(momentum)
    models.train(again, rank, 3, start=STEPS + 2, optimizer=optimizer)
    second.close()
    same = torch.equal(models.flat(ddp), models.flat(again))
    return same, wire.config == second.config, second.reason


def test_a_resumed_run_keeps_the_choice_and_is_bit_equal(ranks, tmp_path):
    for same, config, reason in ranks.run(2, resumed, str(tmp_path)):
        assert config
        assert reason
        assert same


def differing(rank):
    try:
        wrapped(1e4, density=0.01 if rank else 0.02)
    except ConfigError as error:
        return str(error)
    raise AssertionError("ranks with other bounds were accepted")


def test_ranks_that_differ_in_bounds_are_told(ranks):
    for message in ranks.run(2, differing):
        assert "ranks differ in bounds of method='auto'" in message


def test_dense_is_no_bound():
    with pytest.raises(ConfigError, match="leave out exchange='dense-bf16'"):
        auto.split_bounds({"method": "auto", "exchange": "dense-bf16"})


@pytest.mark.parametrize("name", ["density", "min_density"])
def test_a_bound_that_is_none_is_refused_at_once(name):
    with pytest.raises(ConfigError, match=rf"{name} must be in \(0, 1\], got 2"):
        auto.split_bounds({"method": "auto", name: 2})


def test_where_there_is_no_auto_the_error_says_what_to_do():
    with pytest.raises(ConfigError, match="ask `gradwire plan`"):
        gradwire.Config(method="auto")
