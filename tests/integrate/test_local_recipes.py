"""Recipes of local steps: they say what they stand for, send what they promise, and can be bent."""

import warnings

import pytest
import torch
from torch import nn

import gradwire
from gradwire.errors import AttachError, ConfigError
from gradwire.optim import muon
from gradwire.ranks.virtual import VirtualRanks
from gradwire.recipes import LOCAL_RECIPES, RECIPES
from tests.integrate import models


def call(rank=0, groups=None, net=None, optimizer=None, **fields):
    net = models.model() if net is None else net
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    group = (groups or VirtualRanks(1).groups)[rank]
    return gradwire.local_steps(net, optimizer, group=group, **fields)


def test_a_recipe_is_its_fields():
    local = call(recipe="muon-wan")
    config = local.config
    assert (local.every, config.method, config.density) == (30, "topk", 1 / 6)
    assert (config.values, config.indices) == ("sign", "auto")
    assert (local.outer_lr, local.outer_momentum, local.keep_unsent) == (1.0, 0.5, True)


def test_rank_0_prints_what_it_stands_for(capsys):
    ranks = VirtualRanks(3)
    ranks.run(lambda rank: call(rank, ranks.groups, recipe="muon", density=0.25, decay=0.9))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "gradwire: recipe 'muon' stands for every=5, method='topk', density=0.25, values='sign', "
        "indices='auto', outer_lr=1, outer_momentum=0.5, keep_unsent=True, decay=0.9\n"
    )


def test_without_a_recipe_nothing_is_printed(capsys):
    assert call(every=3).config.method == "chunked"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        ({"every": 7}, {"every": 7, "keep_unsent": True}),
        ({"keep_unsent": False}, {"keep_unsent": False, "every": 5}),
        ({"outer_momentum": 0.9}, {"outer_momentum": 0.9, "outer_lr": 1.0}),
        ({"outer": "average"}, {"outer_momentum": 0.0, "outer_lr": 1.0}),
    ],
)
def test_what_is_named_beside_it_wins(named, seen):
    local = call(recipe="muon", **named)
    assert {name: getattr(local, name) for name in seen} == seen
    assert local.config.values == "sign"


def test_fields_of_the_config_win_too():
    config = call(recipe="muon", method="chunked/allgather", values="int4").config
    assert (config.method, config.exchange, config.values) == ("chunked", "allgather", "int4")
    assert config.density == 0.5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"recipe": "muan"}, "unknown recipe 'muan'. Did you mean 'muon'?"),
        ({"recipe": "dgc"}, "recipe 'dgc' is for gradwire.attach, not for local steps"),
        ({"recipe": "muon", "method": "dense"}, r"^recipe 'muon' \(.*values='sign'.*no effect on"),
        ({"recipe": "muon", "density": 1.0}, r"^recipe 'muon' \(.*density=1 sends all entries"),
        ({"recipe": "muon", "exchange": "union"}, r"^recipe 'muon' \(.*fp32 or bf16, not 'sign'"),
        ({"recipe": "muon", "every": 0}, "every must be a whole number of at least 1, got 0"),
        (
            {"recipe": "muon", "outer": "average", "outer_momentum": 0.5},
            "outer='average' has no momentum, got 0.5",
        ),
    ],
)
def test_a_contradiction_is_one_line(fields, words):
    with pytest.raises((ConfigError, AttachError), match=words) as error:
        call(**fields)
    assert "\n" not in str(error.value)


def test_gradients_have_other_recipes():
    with pytest.raises(ConfigError, match=r"recipe 'muon' is for gradwire.local_steps, not for"):
        gradwire.State(recipe="muon")
    assert not RECIPES.keys() & LOCAL_RECIPES.keys()


class Wide(nn.Module):
    """Enough entries for the heads of messages to be small."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(200, 200, bias=False)
        self.b = nn.Linear(200, 200, bias=False)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize(("recipe", "times"), [("muon", 51), ("muon-wan", 510)])
def test_bytes_are_those_that_the_recipe_promises(recipe, times):
    """Four workers; fp32 at every step would send so many times more."""
    ranks = VirtualRanks(4)

    def work(rank):
        torch.manual_seed(0)
        net = Wide()
        optimizer = muon(net, lr=0.01)
        local = call(rank, ranks.groups, net, optimizer, recipe=recipe)
        for step in range(2 * local.every):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(100 * step + rank)
            net(torch.randn(4, 200, generator=draw)).square().mean().backward()
            optimizer.step()
            local.step()
        return local.stats()

    stats = ranks.run(work)[1]
    assert stats.steps == 2
    assert stats.bytes_dense / stats.bytes_sent == pytest.approx(times, rel=0.01)
    assert f"{times} times" in LOCAL_RECIPES[recipe].summary


def test_a_recipe_for_muon_warns_of_adam_alone():
    net = models.model()
    with pytest.warns(
        UserWarning, match="^recipe 'muon' is for Muon inside, and with AdamW"
    ) as seen:
        call(net=net, optimizer=torch.optim.AdamW(net.parameters()), recipe="muon")
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(net=net, optimizer=muon(net, lr=0.01), recipe="muon")
