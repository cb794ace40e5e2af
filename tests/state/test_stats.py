"""The numbers users see."""

import json
import time
import warnings

import pytest
import torch

import gradwire
from gradwire.stages import STAGES, Clock, stage, timed_by
from tests.integrate import models


def test_stats_are_plain_json():
    cluster = gradwire.VirtualCluster(2, density=0.1)
    for _ in range(3):
        cluster.average([torch.randn(1000), torch.randn(1000)])
    stats = json.loads(json.dumps(cluster.stats().asdict()))
    assert stats["steps"] == 3
    assert stats["achieved_density"] == 0.1
    kept = float(cluster.residual(0).norm())
    assert stats["residual_norm"] == pytest.approx(kept)
    assert set(stats["seconds"]) == {"accumulate", "compress", "encode", "exchange", "decode"}
    assert all(s > 0 for s in stats["seconds"].values())
    assert stats["memory_bytes"] >= 4000


def test_rounding_of_values_in_decibels():
    g = [torch.randn(20000), torch.randn(20000)]
    errors = {}
    for values in ("fp32", "fp16", "bf16", "int8", "int4", "sign"):
        cluster = gradwire.VirtualCluster(2, density=0.1, values=values)
        cluster.average(g)
        errors[values] = cluster.stats().value_error_db
    assert errors.pop("fp32") is None
    assert list(errors.values()) == sorted(errors.values()), errors
    sent = gradwire.compress(g[0], density=0.1).values
    lost = (sent - sent.bfloat16().float()).square().sum() / sent.square().sum()
    assert errors["bf16"] == pytest.approx(float(10 * lost.log10()), abs=1e-3)


def test_rounding_by_exchanges_that_choose():
    """int8 costs them what it costs an all-gather, where a rank sends all that it delivers."""
    g = [torch.randn(20000), torch.randn(20000)]
    errors = []
    for fields in ({}, {"exchange": "hierarchical", "local": 1}):
        cluster = gradwire.VirtualCluster(2, density=0.1, values="int8", **fields)
        cluster.average(g)
        errors.append(cluster.stats().value_error_db)
    assert errors[0] == pytest.approx(errors[1], abs=1e-6)
    cluster = gradwire.VirtualCluster(2, exchange="sketched", ratio=5.0, density=0.01)
    cluster.average(g)
    assert cluster.stats().value_error_db is None


def looks(growth):
    cluster = gradwire.VirtualCluster(1, density=0.001)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(30):
            cluster.average([growth**step * torch.ones(2000)])
            cluster.stats()
    return [str(w.message) for w in caught if "residual" in str(w.message)]


def test_a_step_is_counted_when_the_next_one_begins():
    cluster = gradwire.VirtualCluster(2, density=0.01, values="bf16")
    bundle = None
    for step in range(2):
        cluster.average([torch.randn(1000) for _ in range(2)])
        (bundle,) = cluster._states[0].bundles
        assert int(bundle.tally.sent) == 10 * step
        assert bool(bundle.tally.energy[0] > 0) == (step > 0)
    stats = cluster.stats()
    assert stats.achieved_density == 0.01
    assert int(bundle.tally.sent) == 20


def test_a_growing_residual_is_warned_about_once():
    assert looks(0.9) == []
    (warning,) = looks(2.0)
    assert "the residual keeps growing: its norm went from" in warning
    assert "Raise density (now 0.001)" in warning


def test_profiler_ranges_are_named_after_the_stages():
    cluster = gradwire.VirtualCluster(1, density=0.1)
    cluster.average([torch.randn(1000)])
    with torch.profiler.profile() as profile:
        cluster._states[0].begin()
        cluster._states[0].process(cluster._states[0].bundles[0], [torch.randn(1000)])
    names = {event.key for event in profile.key_averages()}
    assert {"gradwire::accumulate", "gradwire::compress", "gradwire::decode"} <= names


def test_on_cuda_one_step_of_eight_is_timed_and_stands_for_all():
    clock = Clock(torch.device("cuda", 0))  # only told of steps, nothing runs
    weights = []
    for step in range(25):
        clock.begin_step(step)
        weights.append(clock.weight)
    assert weights == [1] * 8 + [8, *[0] * 7] * 2 + [8]
    assert clock.counted == 8 + 24
    clock.every = 1
    clock.begin_step(25)
    assert clock.weight == 1
    on_cpu = Clock(torch.device("cpu"))
    on_cpu.begin_step(25)
    assert on_cpu.weight == 1


def test_a_step_that_is_not_timed_adds_nothing():
    clock = Clock(torch.device("cpu"))
    for weight in (0, 1):
        clock.weight = weight
        with timed_by(clock, 0), stage("encode"):
            time.sleep(0.01)
        assert (clock.seconds()["encode"] > 0) == bool(weight)


def profiled(rank):
    ddp, wire = models.wrapped()
    models.train(ddp, rank, 1)
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=threads) as profile:
        models.train(ddp, rank, 1, start=1)
    wire.close()
    return {event.key for event in profile.key_averages()}


def test_every_stage_of_a_step_is_a_profiler_range(ranks):
    (names,) = ranks.run(1, profiled)
    assert {f"gradwire::{stage}" for stage in STAGES} <= names
