"""The numbers as other tools read them."""

import dataclasses
import re
import sys
import types

import pytest
import torch

import gradwire
from gradwire.errors import ConfigError
from gradwire.observe import METRICS, TensorBoard, WandB, prometheus, scalars
from gradwire.state.stats import Stats


def stats(**fields):
    usual = {"dense": {"small": 3, "flush": 1}, "seconds": {"compress": 0.25}, "skipped": 2}
    return Stats(7, 4, 1000, 4_000_000_000_000, 0.01, 1.5, **{**usual, **fields})


def test_names_are_pinned():
    assert scalars(stats(value_error_db=-40.0, leaked=0.125)) == {
        "gradwire/steps": 7.0,
        "gradwire/world_size": 4.0,
        "gradwire/bytes_sent": 1000.0,
        "gradwire/bytes_dense": 4e12,
        "gradwire/achieved_density": 0.01,
        "gradwire/residual_norm": 1.5,
        "gradwire/value_error_db": -40.0,
        "gradwire/leaked": 0.125,
        "gradwire/skipped": 2.0,
        "gradwire/clipped": 0.0,
        "gradwire/length_exchanges": 0.0,
        "gradwire/bundles": 0.0,
        "gradwire/memory_bytes": 0.0,
        "gradwire/dense/small": 3.0,
        "gradwire/dense/flush": 1.0,
        "gradwire/seconds/compress": 0.25,
    }


def test_every_field_is_there_and_none_is_left_out():
    assert list(METRICS) == [field.name for field in dataclasses.fields(Stats)]
    cluster = gradwire.VirtualCluster(2, density=0.1)
    cluster.average([torch.randn(1000), torch.randn(1000)])
    found = scalars(cluster.stats())
    assert all(type(value) is float for value in found.values())
    assert "gradwire/value_error_db" not in found
    assert "gradwire/seconds/exchange" in found


def test_prometheus_text():
    text = prometheus(stats())
    assert text.endswith('gradwire_seconds_total{stage="compress"} 0.25\n')
    assert (
        "# HELP gradwire_dense_total Times that a bundle was sent whole, by reason.\n"
        "# TYPE gradwire_dense_total counter\n"
        'gradwire_dense_total{reason="small"} 3\n'
        'gradwire_dense_total{reason="flush"} 1\n'
    ) in text
    assert "# TYPE gradwire_residual_norm gauge\ngradwire_residual_norm 1.5\n" in text
    assert "gradwire_bytes_dense_total 4000000000000\n" in text
    assert "leaked" not in text
    sample = r'[a-z_]+(\{[a-z_]+="[^"\n]*"\})? (NaN|[+-]Inf|-?[0-9.e+-]+)'
    for line in text.splitlines():
        assert re.fullmatch(sample, line) or re.match(
            "# (HELP|TYPE) gradwire_[a-z_]+ [a-zA-Z]", line
        )
    names = re.findall("^# TYPE (.*) ", text, re.M)
    assert len(names) == len(set(names)) == 13


def test_prometheus_numbers_and_labels():
    for value, text in ((float("inf"), "+Inf"), (-float("inf"), "-Inf"), (float("nan"), "NaN")):
        odd = dataclasses.replace(stats(), residual_norm=value)
        assert f"gradwire_residual_norm {text}\n" in prometheus(odd)
    text = prometheus(stats(), rank=3, run='a "b"\n\\c')
    assert r'gradwire_steps_total{rank="3",run="a \"b\"\n\\c"} 7' in text
    assert r'gradwire_dense_total{rank="3",run="a \"b\"\n\\c",reason="small"} 3' in text
    for name, message in (
        ("größe", "must be a-z"), ("__x", "must be a-z"), ("a b", "must be a-z"),
        ("stage", "gradwire's own"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"label '{name}' .*{message}"):
            prometheus(stats(), **{name: "1"})


def test_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoard(tmp_path)
    for step in (1, 2):
        logger.log({"gradwire/steps": float(step), "loss": 0.5}, step)
    logger.close()
    found = events.EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) == {"gradwire/steps", "loss"}
    assert [(e.step, e.value) for e in found.Scalars("gradwire/steps")] == [(1, 1.0), (2, 2.0)]


def test_weights_and_biases(monkeypatch):
    calls = []
    run = types.SimpleNamespace(
        log=lambda data, step: calls.append((data, step)), finish=lambda: calls.append("finish")
    )
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: calls.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    logger = WandB(project="p", mode="offline")
    logger.log({"a": 1.0}, 5)
    logger.close()
    assert calls == [{"project": "p", "mode": "offline"}, ({"a": 1.0}, 5), "finish"]


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="WandB needs the package 'wandb': pip install wandb"):
        WandB()
    with pytest.raises(ConfigError, match="TensorBoard needs the package 'tensorboard': pip"):
        TensorBoard(tmp_path)
