import pytest
import torch
from torch import nn

from gradwire.workbench.simulate.batched_passes import BatchedPasses
from gradwire.workbench.simulate.filters import filter_gradients_torch
from gradwire.workbench.simulate.graph_passes import GraphPasses, copy_per_worker
from tests.workbench.simulate.test_graph_passes import simulation

WORKERS = 3
NEAR = 5e-3
"""A ReLU that flips by rounding is worth 5e-4."""


def batched(many, batch, dtype=torch.float32):
    return BatchedPasses(many.model, WORKERS, many.options.task.loss, batch, dtype)


def difference(a, b):
    return float((a - b).norm() / b.norm())


def exact(many, batch):
    """Gradients in fp64."""
    model = many.model.double()
    found = []
    for images, labels in zip(*batch, strict=True):
        loss = many.options.task.loss(model, [images.double(), labels])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(found)


def test_gradients_and_statistics_are_those_of_each_worker():
    one, many = simulation(), simulation()
    passes = batched(many, many.batches(0, 0))
    for step in range(2):
        batch = many.batches(0, step)
        passes(batch)
        _, losses = one._gradients_in_turn(0, step)
        torch.testing.assert_close(passes.losses.mean(), losses.mean())
        assert difference(passes.gradients, exact(simulation(), batch)) < NEAR
    for a, b in zip(one.model.buffers(), many.model.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_it_follows_the_weights_of_the_model():
    many = simulation()
    batch = many.batches(0, 0)
    passes = batched(many, batch)
    passes(batch)
    before = passes.gradients.clone()
    with torch.no_grad():
        for parameter in many.model.parameters():
            parameter.mul_(1.5)
    passes(batch)
    assert difference(passes.gradients, before) > 0.1
    fresh = simulation()
    fresh.model.load_state_dict(many.model.state_dict())
    assert difference(passes.gradients, exact(fresh, batch)) < NEAR


def test_halves_are_near():
    many = simulation()
    batch = many.batches(0, 0)
    passes = batched(many, batch, torch.bfloat16)
    passes(batch)
    assert passes.gradients.dtype == torch.float32
    assert 1e-4 < difference(passes.gradients, exact(simulation(), batch)) < 0.3


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(4, 4, 3, groups=2, bias=False), nn.Conv2d(4, 4, 3), nn.LSTM(4, 4), nn.LayerNorm(4)],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_are_refused_by_name(layer):
    with pytest.raises(TypeError, match=type(layer).__name__):
        BatchedPasses(nn.Sequential(layer), 2, lambda model, batch: model(batch[0]).mean(), [])


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(3, 16, 1), (16, 16, 1), (16, 24, 2)])
def test_filters_of_each_worker(inputs, outputs, stride):
    x, slope = torch.randn(6, inputs, 8, 8), torch.randn(6, outputs, 8 // stride, 8 // stride)
    found = filter_gradients_torch(x, slope, 2, 3, stride, 1)
    for worker in range(2):
        part = slice(3 * worker, 3 * worker + 3)
        like = torch.nn.grad.conv2d_weight(
            x[part], (outputs, inputs, 3, 3), slope[part], stride, padding=1
        )
        torch.testing.assert_close(found[worker], like, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_on_the_gpu():
    many = simulation(device="cuda")
    batch = many.batches(0, 0)
    passes = batched(many, batch)
    loss = many.options.task.loss
    like = GraphPasses(copy_per_worker(simulation(device="cuda").model, WORKERS), loss, batch)
    for step in range(2):
        passes(many.batches(0, step))
        like(many.batches(0, step))
        assert difference(passes.gradients, like.gradients) < 0.1
        torch.testing.assert_close(passes.losses.mean(), like.losses.mean(), rtol=1e-3, atol=1e-3)
    again = passes.gradients.clone()
    passes(many.batches(0, 1))
    assert torch.equal(again, passes.gradients)
