import math

import pytest
import torch
from torch import nn

from gradwire.errors import ConfigError
from gradwire.models import MODELS, build, spec

COUNTS = {"fnn3": 199_210, "lenet5": 61_706, "resnet20": 269_722}


@pytest.mark.parametrize("name", MODELS)
def test_has_the_published_number_of_parameters(name):
    count = sum(p.numel() for p in build(name).parameters())
    assert count == COUNTS[name] == spec(name).parameters


@pytest.mark.parametrize("name", MODELS)
def test_takes_its_shape_and_gives_a_score_a_class(name):
    model = build(name, classes=7)
    scores = model(torch.randn(2, *spec(name).shape))
    assert scores.shape == (2, 7)
    assert spec(name).name == name


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_from_the_seed(name):
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in build(name).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name):
    model = build(name)
    model(torch.randn(4, *spec(name).shape)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_fnn3_weights_are_xavier():
    first = build("fnn3")[1]
    bound = math.sqrt(6 / (784 + 200))
    assert first.weight.abs().max() <= bound
    assert first.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert first.bias.abs().max() == 0


def test_resnet20_convolutions_are_kaiming_and_its_linear_layer_xavier():
    model = build("resnet20")
    convolution = [m for m in model.modules() if isinstance(m, nn.Conv2d)][-1]
    assert convolution.weight.std().item() == pytest.approx(math.sqrt(2 / (64 * 9)), rel=0.02)
    assert model.linear.weight.abs().max() <= math.sqrt(6 / (64 + 10))


def test_resnet20_has_20_layers():
    layers = [m for m in build("resnet20").modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 20


def test_unknown_model_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown model 'lenet'. Did you mean 'lenet5'\?"):
        build("lenet")
