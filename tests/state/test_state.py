"""A State: what a rank remembers, and its side of a step."""

import pytest
import torch

import gradwire
from gradwire.errors import ConfigError, StateError
from gradwire.ranks.echo import EchoGroup
from gradwire.types import Slot

CPU = torch.device("cpu")


def opened(names=("a", "b"), size=640, **fields):
    state = gradwire.State(**{"density": 0.05, "dense_below": 0, "bundle_mb": 1e-6, **fields})
    slots = [Slot(name, (size,), (1,), torch.float32, 0, size) for name in names]
    state.open(slots, CPU, EchoGroup(1))
    return state


def step(state, seed=0):
    """One step of all bundles; the gradients, and what arrived, by name."""
    generator = torch.Generator().manual_seed(seed)
    state.begin()
    entered, arrived = {}, {}
    for bundle in state.bundles:
        for slot in bundle.slots:
            entered[slot.name] = torch.randn(slot.numel, generator=generator)
        update = state.process(bundle, [entered[slot.name] for slot in bundle.slots])
        arrived |= {s.name: update[s.offset : s.offset + s.numel] for s in bundle.slots}
    return entered, arrived


def test_before_the_first_step_there_is_nothing_to_ask():
    state = gradwire.State(density=0.05)
    assert not state.opened
    assert repr(state) == "State(topk/allgather, density 0.05, before its first step)"
    for ask in (state.stats, lambda: state.residual("a"), state.state_dict):
        with pytest.raises(StateError, match="after a step"):
            ask()
    with pytest.raises(StateError, match="there is no step to skip"):
        state.skip_step()


def test_a_parameter_has_one_home_and_an_unknown_one_none():
    state = opened()
    bundle, slot = state.home("b")
    assert slot.name == "b"
    assert slot in bundle.slots
    with pytest.raises(ConfigError, match="parameter 'c'"):
        state.home("c")


def test_a_step_keeps_what_it_does_not_send():
    state = opened()
    entered, arrived = step(state)
    for name in entered:
        assert torch.equal(entered[name], arrived[name] + state.residual(name))
        assert int(arrived[name].count_nonzero()) == 32
    assert state.stats().achieved_density == pytest.approx(0.05)


def test_a_skipped_step_is_put_back_whole():
    state = opened()
    entered, _ = step(state)
    state.skip_step()
    for name in entered:
        assert torch.equal(entered[name], state.residual(name))
    again, arrived = step(state, seed=1)
    for name in entered:
        assert torch.equal(entered[name] + again[name], arrived[name] + state.residual(name))
    assert state.stats().skipped == 1


def test_a_flush_sends_everything_once():
    state = opened()
    step(state)
    kept = {name: state.residual(name) for name in ("a", "b")}
    state.flush()
    entered, arrived = step(state, seed=1)
    for name in kept:
        assert torch.equal(arrived[name], entered[name] + kept[name])
        assert not state.residual(name).any()
    step(state, seed=2)
    assert state.residual("a").any()
    assert state.stats().dense == {"flush": 2}


def test_a_choice_is_made_again_only_when_density_or_flush_changes(monkeypatch):
    from gradwire.state import state as module

    asked = []
    real = module.choose
    monkeypatch.setattr(module, "choose", lambda *a: (asked.append(a[2]), real(*a))[1])
    state = opened(("a",), warmup=(0.25,), warmup_steps=2)
    for _ in range(4):
        step(state)
    state.flush()
    step(state)
    step(state)
    assert asked == [0, 2, 4, 5]


def test_switch_takes_residuals_along_into_other_bundles():
    state = opened()
    assert len(state.bundles) == 2
    step(state)
    state.begin()
    kept = {name: state.residual(name) for name in ("a", "b")}
    state.switch(gradwire.Config(density=0.5, dense_below=0, bundle_mb=25))
    assert len(state.bundles) == 1
    for name, residual in kept.items():
        assert torch.equal(state.residual(name), residual)
    assert state.choose(state.bundles[0]).k == 640


def test_a_microbatch_waits_for_the_step():
    state = opened(("a",))
    (bundle,) = state.bundles
    first, second = torch.randn(2, 640)
    state.begin()
    state.add_microbatch(bundle, [first])
    assert torch.equal(state.residual("a"), first)
    update = state.process(bundle, [second])[:640]
    torch.testing.assert_close(update + state.residual("a"), first + second)


def test_the_mean_takes_the_place_of_the_gradient():
    state = opened(("a",))
    (bundle,) = state.bundles
    gradient = torch.randn(640)
    before = gradient.clone()
    state.begin()
    state.replace(bundle, [(0, gradient)])
    assert torch.equal(before, gradient + state.residual("a"))


def test_what_an_unused_parameter_waits_for_stays():
    state = opened(bundle_mb=25)
    (bundle,) = state.bundles
    step(state)
    kept = state.residual("b")
    state.begin()
    gradients = [torch.randn(640), torch.zeros(640)]
    unused = [slot for slot in bundle.slots if slot.name == "b"]
    pieces = [(s.offset, g) for s, g in zip(bundle.slots, gradients, strict=True)]
    state.replace(bundle, pieces, unused)
    assert torch.equal(state.residual("b"), kept)
    assert not gradients[1].any()


def test_what_is_saved_goes_on_as_if_nothing_had_happened():
    whole, first = opened(momentum=0.9, values="bf16"), opened(momentum=0.9, values="bf16")
    for seed in range(3):
        step(whole, seed)
        step(first, seed)
    second = opened(momentum=0.9, values="bf16")
    second.load_state_dict(first.state_dict())
    _, wanted = step(whole, 9)
    _, found = step(second, 9)
    for name in wanted:
        assert torch.equal(wanted[name], found[name])
    assert second.steps == 4


def test_close_is_final_and_may_be_said_twice():
    state = opened()
    state.close()
    state.close()
    assert state.stopped
