"""What may be recommended in front of which optimiser, and the order of what loses little."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.errors import ConfigError
from gradwire.plan.accuracy import with_optimizer
from gradwire.plan.predict import Prediction, Way
from gradwire.plan.recommend import loss_rank, recommend
from gradwire.plan.workload import by_count, by_module, by_shapes

GPT = {"workers": 8, "step_seconds": 0.2, "gpu": "h100"}
LINKS = ("10mbit", "1gbit", "10gbit", "100gbit", "3tbit")


def best(model="gpt-124m", **asked):
    return gradwire.plan(model, **(GPT | asked)).recommendation


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("optimizer", ["", "adamw", "Adam", "muon"])
def test_top_k_is_never_recommended_before_adam(link, optimizer):
    found = best(link=link, optimizer=optimizer)
    assert found.recipe or not found.compresses
    assert "43 % above the loss of dense AdamW (docs/adam.md)" in found.reason or (
        optimizer == "muon" and not found.compresses
    )
    asked = gradwire.plan(
        "gpt-124m", methods=["topk", "gaussiank"], link=link, optimizer=optimizer, **GPT
    ).recommendation
    assert not asked.compresses


def test_a_transformer_gets_a_recipe_and_the_lines_that_use_it():
    found = best(link="10gbit")
    assert found.recipe == "muon"
    assert found.fields["recipe"] == "muon"
    assert "optimizer = gradwire.optim.muon(model, lr=...)" in found.code
    assert any(line.startswith("local = gradwire.local_steps(model, opt") for line in found.code)
    assert "Of its step" in found.reason
    assert best(link="10mbit").recipe == "muon-wan", "where the shorter rounds are far slower"
    fast = best(link="3tbit")
    assert (fast.compresses, fast.recipe, fast.fields["method"]) == (False, "", "dense")


def test_sgd_with_batch_norm_gets_the_recipe_that_keeps_dense_accuracy():
    asked = {"workers": 64, "link": "20mbit", "gpu": "h100"}
    found = best("resnet50", **asked, step_seconds=0.01)
    assert found.prediction.way.density < 0.01
    recipes = gradwire.plan("resnet50", recipe="plain-union", step_seconds=0.2, **asked)
    assert recipes.recommendation.fields["recipe"] == "plain-union"
    assert "no momentum, 15 times the learning rate" in recipes.recommendation.reason
    # VGG-16 has no batch norm, and Adam no such recipe.
    assert by_shapes([[8, 3, 3, 3], [8], [8], [8, 8, 3, 3], [8], [8]], "n", 1.0).has_batch_norm
    assert not by_shapes([[8, 3, 3, 3], [8], [8, 8, 3, 3], [8]], "n", 1.0).has_batch_norm
    assert best("resnet50", optimizer="adamw", link="10mbit").recipe == ""


def test_a_recipe_that_is_asked_for_is_the_only_candidate():
    found = gradwire.plan("resnet50", recipe="muon", workers=4, link="10mbit", gpu="h100")
    assert found.recommendation.recipe == "muon"
    assert {p.way.recipe for p in found.predictions if not p.way.sends_all} == {"", "muon"}
    with pytest.raises(ConfigError, match=r"unknown recipe 'moun'\. Did you mean 'muon'"):
        best(recipe="moun")
    with pytest.raises(ConfigError, match=r"unknown optimizer 'adamm'\. Did you mean 'adamw'"):
        best(optimizer="adamm")


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4)
        self.attention = nn.MultiheadAttention(8, 2)


@pytest.mark.parametrize(
    ("load", "usual"),
    [
        (by_module(Attends(), 1.0), "adamw"),
        (by_module(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), 1.0), "adamw"),
        (by_module(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(4, 9)), 1.0), "sgd"),
        (by_module(nn.Sequential(nn.Embedding(9, 4), nn.LSTM(4, 9)), 1.0), ""),
        (by_count(7_000_000_000, 1.0), "adamw"),
        (by_count(7_000_000, 1.0), ""),
    ],
)
def test_the_usual_optimiser_of_a_network(load, usual):
    assert load.optimizer == usual
    chosen = with_optimizer(load, "")
    assert (chosen.optimizer, chosen.is_assumed) == (usual or "sgd", True)
    assert with_optimizer(load, "sgd").optimizer == "sgd"


def test_an_assumed_optimiser_is_said():
    def notes(**asked):
        return " ".join(gradwire.plan(**(GPT | asked)).notes)

    assert "AdamW is assumed" in notes(model="7B")
    assert "SGD is assumed; top-k must not stand in front of Adam" in notes(params=10**6)
    assert "assumed" not in notes(model="7B", optimizer="adamw")


def prediction(way, seconds):
    return Prediction(way, seconds, 0.1, 0, 0, seconds - 0.1, 0, 0, 1.0, 1, 25.0)


def test_a_better_exchange_comes_before_finer_values():
    """What is rounded away stays in the residual; what gtopk does not choose is not delivered."""
    union = prediction(Way("topk", "union", "bf16", "packed", 0.01), 1.02)
    coarse = prediction(Way("topk", "union", "int8", "packed", 0.01), 1.01)
    gtopk = prediction(Way("topk", "gtopk", "fp32", "int32", 0.01), 1.0)
    thin = prediction(Way("topk", "union", "fp32", "int32", 0.001), 1.0)
    order = sorted([thin, gtopk, coarse, union], key=loss_rank)
    assert order == [union, coarse, gtopk, thin]
    dense = prediction(Way("ddp", ""), 2.0)
    load = with_optimizer(by_count(10**6, 0.1), "sgd")
    found = recommend(load, [gtopk, coarse, union, thin, dense], lambda p, rate: p.seconds, 0.001)
    assert found.prediction is union


@pytest.mark.parametrize(("ratio", "chosen"), [(1.2, "muon"), (1.3, "muon-wan")])
def test_short_rounds_are_taken_while_they_cost_at_most_a_quarter(ratio, chosen):
    short = prediction(Way("topk", "allgather", "sign", "auto", 0.5, "muon", 5), ratio)
    long = prediction(Way("topk", "allgather", "sign", "auto", 1 / 6, "muon-wan", 30), 1.0)
    dense = prediction(Way("bf16-hook", ""), 9.0)
    load = with_optimizer(by_module(torch.nn.Embedding(99, 9), 0.1), "adamw")
    found = recommend(load, [short, long, dense], lambda p, rate: p.seconds, 0.001)
    assert found.recipe == chosen
