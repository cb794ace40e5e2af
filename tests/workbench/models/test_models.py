import functools
import math

import pytest
import torch
from torch import nn

from gradwire.errors import ConfigError
from gradwire.workbench import data
from gradwire.workbench.models import MODELS, TRAINABLE, build, model_spec
from gradwire.workbench.train.task import TASKS

COUNTS = {
    "fnn3": 199_210,
    "lenet5": 61_706,
    "resnet20": 269_722,
    "vgg16-cifar": 14_728_266,
    "lstm-ptb": 66_034_000,
    "lstm-an4": 27_569_568,
    "gpt-nano": 10_745_088,
    "gpt-micro": 32_448,
    "gpt-tiny": 393_888,
    "gpt-11m": 11_015_040,
    "gpt-40m": 39_987_840,
    "gpt-85m": 85_740_288,
    "gpt-124m": 123_980_544,
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    "inception-v4": 42_679_816,
}
IMAGES = [name for name in TRAINABLE if model_spec(name).task == "classify"]


load = functools.cache(data.load_dataset)


def small(name, **kw):
    """The network in the size that trains on the embedded data."""
    return build(name, **(dict(model_spec(name).embedded.size) | kw))


@pytest.mark.parametrize("name", COUNTS)
def test_has_the_published_number_of_parameters(name):
    with torch.device("meta"):
        count = sum(p.numel() for p in build(name).parameters())
    assert count == COUNTS[name] == model_spec(name).parameters
    assert model_spec(name).name == name


def test_every_model_has_a_published_number():
    assert set(MODELS) == set(COUNTS)


@pytest.mark.parametrize("name", IMAGES)
def test_takes_its_shape_and_gives_a_score_a_class(name):
    scores = small(name, classes=7)(torch.randn(2, *model_spec(name).shape))
    assert scores.shape == (2, 7)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet50", "inception-v4"])
def test_the_networks_of_table_2_fit_together(name):
    with torch.device("meta"):
        model = build(name, classes=7)
        assert model(torch.empty(2, *model_spec(name).shape)).shape == (2, 7)


@pytest.mark.parametrize("name", TRAINABLE)
def test_weights_come_from_the_seed(name):
    def weights(seed):
        torch.manual_seed(seed)
        return torch.cat([p.flatten() for p in small(name).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_parameter_gets_a_gradient(name):
    recipe = model_spec(name)
    examples = load(recipe.embedded.data, None, recipe.shape)
    model = small(name, **examples.network)
    batch = examples.training_batch(torch.arange(8), seed=0)
    TASKS[recipe.task].loss(model, batch).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("fnn3", (128, 0.01)),
        ("lenet5", (128, 0.01)),
        ("resnet20", (32, 0.1)),
        ("vgg16-cifar", (128, 0.1)),
        ("lstm-ptb", (20, 22)),
        ("lstm-an4", (4, 0.0002)),
    ],
)
def test_the_recipe_is_that_of_table_1(name, recipe):
    assert (model_spec(name).batch, model_spec(name).lr) == recipe


def test_lstm_ptb_weights_are_uniform():
    model = build("lstm-ptb", words=50)
    assert all(p.abs().max() <= 0.04 for p in model.parameters())
    assert model.lstm.weight_hh_l1.std().item() == pytest.approx(0.04 / math.sqrt(3), rel=0.02)


def test_gpt_does_not_look_ahead_and_knows_places():
    model = small("gpt-nano", words=9).eval()
    tokens = torch.randint(0, 9, (2, 12))
    scores = model(tokens)
    assert scores.shape == (2, 12, 9)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 9
    again = model(changed)
    torch.testing.assert_close(again[:, :7], scores[:, :7])
    assert not torch.allclose(again[:, 7:], scores[:, 7:])
    same = model(torch.full((1, 3), 4))
    assert not torch.allclose(same[:, 0], same[:, 1])


def test_gpt_branches_end_small():
    model = build("gpt-nano")
    block = model.blocks[0]
    assert block.widen.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for end in (block.project, block.attention.project):
        assert end.weight.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.02)


def test_lstm_an4_gates_are_xavier():
    model = build("lstm-an4")
    gate = model.lstms[1].weight_ih_l0[800:1600]
    assert gate.abs().max().item() == pytest.approx(math.sqrt(6 / 1600), rel=0.01)


def test_what_is_beyond_an_utterance_does_not_change_its_letters():
    model = small("lstm-an4").eval()
    sound = torch.randn(2, 161, 60)
    lengths = torch.tensor([60, 30])
    scores, times = model(sound, lengths)
    sound[1, :, 30:] = 7
    again, _ = model(sound, lengths)
    assert times.tolist() == [30, 15]
    assert torch.equal(scores[0], again[0])
    assert torch.equal(scores[1, :15], again[1, :15])
    alone, _ = model(sound[1:, :, :30], lengths[1:])
    torch.testing.assert_close(alone[0], scores[1, :15])


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
