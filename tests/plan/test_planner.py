"""The recommendation, its bounds, and what cannot be planned."""

import json

import pytest
import torch

import gradwire
from gradwire.errors import ConfigError
from gradwire.plan.network import link_rate
from gradwire.plan.rate import parse_time
from gradwire.plan.ways import preference

TOPK = {"methods": ("topk",), "gpu": "v100"}


def test_the_example():
    found = gradwire.plan("resnet50", workers=16, link="1gbit", gpu="v100")
    said = json.loads(json.dumps(found.asdict()))
    chosen = said["recommendation"]
    assert {"method", "exchange", "encoding", "density", "reason", "bundle_mb"} <= chosen.keys()
    assert chosen["method"] == "topk"
    assert "against" in chosen["reason"]
    kinds = ("method", "exchange", "encoding", "density", "recipe")
    names = {tuple(p[kind] for kind in kinds) for p in said["predictions"]}
    assert len(names) == len(said["predictions"]) > 300
    fastest = min(said["predictions"], key=lambda p: p["seconds"])
    assert chosen["seconds"] <= 1.05 * fastest["seconds"]
    assert set(fastest["parts"]) == {
        "compute", "compress", "encode", "exchange", "decode", "hidden"
    }  # fmt: skip


def test_a_fast_link_is_not_worth_compressing_for_and_it_says_from_where_on():
    found = gradwire.plan("resnet50", workers=16, link="400gbit", **TOPK)
    chosen = found.recommendation
    assert not chosen.compresses
    assert chosen.fields["method"] == "dense"
    assert chosen.reason.startswith("do not compress")
    assert "Compressing would pay below" in chosen.reason
    sparse = [p for p in found.predictions if preference(p.way)]
    fastest = min(sparse, key=lambda p: p.seconds).way
    assert f"{fastest.name} at density {fastest.density:g}" in chosen.reason
    turn = 8 * chosen.changes_at / 0.956
    slower = gradwire.plan("resnet50", workers=16, link=0.9 * turn, **TOPK).recommendation
    faster = gradwire.plan("resnet50", workers=16, link=1.1 * turn, **TOPK).recommendation
    assert slower.compresses
    assert not faster.compresses


def test_density_bounds_the_choice_and_a_low_one_is_warned_of():
    slow = {"workers": 64, "link": "10mbit", **TOPK}
    free = gradwire.plan("resnet50", **slow).recommendation
    assert free.prediction.way.density == 0.001
    assert "may cost accuracy" in free.reason
    bounded = gradwire.plan("resnet50", min_density=0.01, **slow).recommendation
    assert bounded.prediction.way.density >= 0.01
    assert "may cost accuracy" not in bounded.reason
    fixed = gradwire.plan("resnet50", density=0.02, **slow)
    assert {p.way.density for p in fixed.predictions} == {1.0, 0.02}


def test_latency_makes_bundles_larger():
    # A step too short to hide five exchanges of 50 ms.
    asked = {"workers": 16, "link": "10gbit", "density": 0.001, "step_seconds": 0.1, **TOPK}
    near = gradwire.plan("vgg16", latency="10us", **asked)
    far = gradwire.plan("vgg16", latency="50ms", **asked)
    assert near.recommendation.prediction.bundle_mb < far.recommendation.prediction.bundle_mb


def test_what_is_recommended_can_be_attached():
    found = gradwire.plan("resnet50", workers=16, nodes=4, link="1gbit", **TOPK)
    for chosen in (found.recommendation.fields, {"method": "topk"}):
        gradwire.Config(**chosen)


def test_shapes_from_a_file_and_a_number_of_parameters(tmp_path):
    file = tmp_path / "shapes.pt"
    torch.save({"a": [1000, 300], "b": torch.zeros(7)}, file)
    more = {"workers": 4, "link": "1gbit", "step_seconds": 0.1, **TOPK}
    assert gradwire.plan(file, **more).load.sizes == (7, 300_000)
    torch.save([[10, 10], [5]], file)
    assert gradwire.plan(str(file), **more).load.entries == 105
    large = gradwire.plan(params=70_000_000_000, **more)
    assert large.load.entries == 70_000_000_000
    assert max(p.bundles for p in large.predictions) <= 64


def test_a_module_is_its_parameters():
    module = torch.nn.Sequential(torch.nn.Linear(30, 70), torch.nn.ReLU(), torch.nn.Linear(70, 5))
    module[2].bias.requires_grad_(False)
    more = {"workers": 4, "link": "1gbit", **TOPK}
    found = gradwire.plan(module, step_seconds=0.1, **more)
    assert found.load.shapes == ((5, 70), (70,), (70, 30)), "the last layer's first"
    assert found.asdict()["asked"]["model"] == "Sequential"
    with pytest.raises(ConfigError, match="Sequential: the time of a step is not known"):
        gradwire.plan(module, **more)
    with pytest.raises(ConfigError, match="Sequential: no parameters"):
        gradwire.plan(torch.nn.Sequential(), step_seconds=0.1, **more)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": "resnet5"}, "unknown model 'resnet5'. Did you mean 'resnet50'?"),
        ({"gpu": "v10"}, "unknown gpu 'v10'. Did you mean 'v100'?"),
        ({"link": "fast"}, "link must be a number and kbit, mbit or gbit, such as 100mbit"),
        ({"link": -1}, "link must be bits a second above 0"),
        ({"latency": "5"}, "latency must be a number and s, ms or us, such as 50us; got '5'"),
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
        ({"nodes": 3}, "16 workers cannot be spread over 3 nodes; use 2 or 4"),
        ({"model": "nowhere.pt"}, "nowhere.pt is not there"),
        ({"model": ""}, "give a model (a name, an nn.Module or a .pt of shapes) or params"),
        ({"params": 5}, "give a model (a name, an nn.Module or a .pt of shapes) or params"),
        ({"model": "", "params": 5}, "the time of a step is not known from shapes"),
        ({"model": "", "params": 0, "step_seconds": 1.0}, "params must be a whole number of at"),
        ({"step_seconds": -1.0}, "step_seconds must be 0 or more, got -1.0"),
        ({"density": 3.0}, "density must be in (0, 1], got 3.0"),
        ({"density": 0.001, "min_density": 0.1}, "density 0.001 is below min_density 0.1"),
        ({"methods": ["topp"]}, "unknown method 'topp'. Did you mean 'topk'?"),
        ({"methods": ["topk/unio"]}, "unknown exchange 'unio'. Did you mean 'union'?"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_planned_is_one_line(asked, words):
    given = {"model": "resnet50", "workers": 16, "link": "1gbit", "gpu": "v100", **asked}
    with pytest.raises(ConfigError) as error:
        gradwire.plan(given.pop("model"), **given)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_holds_no_shapes(tmp_path):
    file = tmp_path / "odd.pt"
    file.write_bytes(b"no pickle")
    with pytest.raises(ConfigError, match="of shapes: "):
        gradwire.plan(file, workers=2, gpu="v100", step_seconds=1.0)
    torch.save({"a": "text"}, file)
    with pytest.raises(ConfigError, match="neither a shape nor a tensor"):
        gradwire.plan(file, workers=2, gpu="v100", step_seconds=1.0)


def test_rates_and_times_as_written():
    assert link_rate("100gbit") == 0.956 * 100e9 / 8
    times = [parse_time(t) for t in ("50us", "5ms", "0.1s", 2)]
    assert times == pytest.approx([5e-5, 5e-3, 0.1, 2])
