"""follow_lr: a gradient that waits counts with the learning rate of its own step."""

import pytest
import torch

import gradwire
from gradwire.errors import ConfigError, StateError

SIZE, RANKS = 400, 3
RATES = [0.01, 0.02, 0.04, 0.4, 0.3, 0.05, 0.001]


def gradients(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(SIZE, generator=generator) for _ in range(RANKS)]


def cluster(exchange="allgather", **fields):
    return gradwire.VirtualCluster(RANKS, method="topk", exchange=exchange, density=0.05, **fields)


def off(wires, follow=True, skip=()):
    """How far weights and what waits together are from where dense SGD is."""
    moved, wanted = torch.zeros(SIZE), torch.zeros(SIZE)
    for step, lr in enumerate(RATES):
        if follow:
            wires.follow_lr(lr)
        update = wires.average(gradients(step))
        wanted += lr * torch.stack(gradients(step)).mean(0)
        if step in skip:
            wires.skip_step()
        else:
            moved += lr * update
    kept = torch.stack([wires.residual(rank) for rank in range(RANKS)]).mean(0)
    return float((moved + RATES[-1] * kept - wanted).abs().max())


@pytest.mark.parametrize("exchange", ["allgather", "union", "dense", "gtopk", "oktopk"])
def test_in_units_of_the_weights_nothing_is_lost(exchange):
    assert off(cluster(exchange)) < 1e-6
    assert off(cluster(exchange), follow=False) > 0.01


def test_a_step_that_was_skipped_keeps_its_worth():
    assert off(cluster(), skip=(2, 4)) < 1e-6


@pytest.mark.parametrize(("lr", "worth"), [(0.4, 0.25), (0, 1)])
def test_the_residual_is_in_units_of_the_last_rate_above_zero(lr, worth):
    wires = cluster()
    wires.follow_lr(0.1)
    wires.average(gradients(0))
    before = wires.residual(0)
    wires.follow_lr(lr)
    torch.testing.assert_close(wires.residual(0), worth * before)
    wires.follow_lr(0.2)
    torch.testing.assert_close(wires.residual(0), before / 2)


def test_momentum_is_in_units_of_gradients():
    wires = cluster(momentum=0.5, masking=False)
    wires.follow_lr(0.1)
    ones = [torch.ones(SIZE)] * RANKS
    sent = wires.average(ones) != 0
    wires.follow_lr(0.2)
    update = wires.average(ones)
    new = (update != 0) & ~sent
    assert new.any()
    # Half of the 1 that waited, and 0.5 * 1 + 1 of momentum.
    assert set(update[new].tolist()) == {2.0}


def test_a_saved_state_goes_on():
    wires, other = cluster(), cluster()
    for step, lr in enumerate(RATES[:4]):
        wires.follow_lr(lr)
        wires.average(gradients(step))
    wires.follow_lr(RATES[4])
    other.load_state_dict(wires.state_dict())
    for step, lr in enumerate(RATES[4:], start=4):
        wires.follow_lr(lr)
        other.follow_lr(lr)
        assert torch.equal(wires.average(gradients(step)), other.average(gradients(step)))


def test_a_state_with_another_worth_is_refused():
    wires = cluster()
    wires.average(gradients(0))
    for worth in ([0.1], [0.1, float("nan")], "0.1"):
        saved = wires.state_dict()
        saved["workers"][1]["worth"] = worth
        with pytest.raises(StateError, match="a rate and a factor"):
            wires.load_state_dict(saved)


@pytest.mark.parametrize("lr", [-0.1, float("nan"), float("inf"), None, "fast"])
def test_what_is_no_learning_rate_is_named(lr):
    with pytest.raises(ConfigError, match="learning rate"):
        cluster().follow_lr(lr)


@pytest.mark.parametrize("lr", [1e-300, 1e-19, 1e19, 1e300])
def test_a_rate_whose_units_fp32_cannot_hold_is_refused(lr):
    wires, other = cluster(), cluster()
    for each in (wires, other):
        each.follow_lr(0.1)
        each.average(gradients(0))
    with pytest.raises(ConfigError, match=r"must be 0, or from 1.1e-19 to 9.2e\+18, got 1e"):
        wires.follow_lr(lr)
    for each in (wires, other):
        each.follow_lr(0.2)
    assert torch.equal(wires.average(gradients(1)), other.average(gradients(1)))


def test_a_residual_too_large_for_a_new_rate_stops_one_step():
    wires = cluster()
    wires.follow_lr(2.0**60)
    wires.average([2.0**40 * g for g in gradients(0)])
    before = wires.residual(1)
    wires.follow_lr(2.0**-2)
    assert wires.average(gradients(1)).isnan().all()
    assert torch.equal(wires.residual(1), before + gradients(1)[1])
    assert wires.stats().skipped == 1
    wires.follow_lr(2.0**-3)
    update = wires.average(gradients(2))
    u = [2 * (before + gradients(1)[1]) + gradients(2)[1], update + wires.residual(1)]
    sent = update != 0
    assert torch.equal(u[0][~sent], u[1][~sent])
    assert update.isfinite().all()


def test_a_residual_that_a_new_rate_just_leaves_room_for():
    wires = cluster()
    wires.follow_lr(2.0**50)
    wires.average(gradients(0))
    before = wires.residual(0)
    wires.follow_lr(2.0**-40)
    update = wires.average(gradients(1))
    assert update.isfinite().all()
    kept = wires.residual(0)
    assert torch.equal(kept[update == 0], (before * 2.0**90 + gradients(1)[0])[update == 0])


def test_a_residual_in_units_of_a_falling_rate_does_not_grow(recwarn):
    wires = cluster()
    for step in range(12):
        wires.follow_lr(0.5**step)
        wires.average(gradients(step))
        norm = wires.stats().residual_norm
    assert norm == pytest.approx(float(wires.residual(0).norm()))
    assert norm > 1000
    assert not [w for w in recwarn if "keeps growing" in str(w.message)]
