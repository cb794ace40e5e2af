"""The step: what is hidden, what is not, and that bytes are those of a real wire."""

from dataclasses import replace

import pytest
import torch

import gradwire
from gradwire.exchange import EXCHANGES
from gradwire.plan.machine import CPU, CUDA, MACHINES, Machine, find_machine
from gradwire.plan.network import Network
from gradwire.plan.predict import Way, predict
from gradwire.plan.work import Work
from gradwire.plan.workload import by_count, by_shapes
from gradwire.workbench.models.workload import workload_by_name

FREE = Machine("free", 1e30, 1e30, replace(CUDA, bundle=0.0))
NETWORK = Network(4, 4, rate=1e6, latency=0.0)


def test_the_parts_add_up():
    load = by_count(50_000_000, 0.5)
    for way in (Way("dense", "dense"), Way("topk", "union", "bf16", "packed", 0.01)):
        p = predict(way, load, find_machine("v100"), NETWORK)
        parts = p.compute + p.compress + p.encode + p.exchange + p.decode - p.hidden
        assert p.seconds == pytest.approx(parts)
        assert p.compute <= p.seconds
        assert p.hidden >= 0


def test_one_bundle_hides_nothing_and_many_hide_all_but_the_last():
    """Backward is 2 of 3 s, 4 parts of 1 MB that each take 1.5 s / 4 on the network."""
    load = by_shapes([[250_000]] * 4, "four", 3.0)
    way = Way("dense", "dense")
    whole = predict(way, load, FREE, NETWORK, bundle_mb=4.1)
    assert whole.seconds == pytest.approx(3 + 6, rel=1e-3)
    # One after another: 1 s of forward pass, 0.5 s to the first bundle, 4 x 1.5 s.
    assert predict(way, load, FREE, NETWORK, 1.0).seconds == pytest.approx(7.5, rel=1e-3)
    fast = Network(4, 4, rate=1e8, latency=0.0)
    one, many = (predict(way, load, FREE, fast, mb) for mb in (4.1, 1.0))
    assert (one.bundles, many.bundles) == (1, 4)
    assert one.exposed == pytest.approx(0.06, rel=1e-2)
    assert many.exposed == pytest.approx(0.015, rel=2e-2)


def test_local_work_is_never_hidden():
    load = by_shapes([[250_000]] * 4, "four", 3.0)
    slow = Machine("slow", 1e6, 1.0)
    p = predict(Way("topk", "allgather", density=0.01), load, slow, Network(4, 4, 1e12, 0.0), 1.01)
    assert p.exposed == pytest.approx(p.compress + p.encode + p.decode, rel=1e-3)


def test_local_work_with_a_core_of_its_own_is_hidden_but_for_the_last_bundle():
    load = by_shapes([[250_000]] * 4, "four", 3.0)
    network, way = Network(4, 4, 1e12, 0.0), Way("topk", "allgather", density=0.01)
    own = Work(0.04, 0.0, 0.04)
    free, taken = (
        predict(way, load, replace(FREE, has_spare_core=beside), network, 1.0, own)
        for beside in (True, False)
    )
    assert (free.bundles, taken.bundles) == (4, 4)
    assert free.exposed == pytest.approx(0.02, rel=1e-2)
    assert taken.exposed == pytest.approx(0.08, rel=1e-3)


def test_a_density_that_sends_more_than_dense_is_sent_dense():
    load = by_count(1_000_000, 0.1)
    p = predict(Way("topk", "allgather", density=0.5), load, FREE, NETWORK)
    assert p.bytes == predict(Way("dense", "dense"), load, FREE, NETWORK).bytes


@pytest.mark.parametrize("exchange", [x for x in EXCHANGES if x != "hierarchical"])
def test_bytes_are_those_that_a_wire_sends(exchange):
    method = "dense" if exchange.startswith("dense") else "topk"
    cluster = gradwire.VirtualCluster(4, method=f"{method}/{exchange}", density=0.004)
    cluster.average([torch.randn(20_000) for _ in range(4)])
    way = Way(method, exchange, density=0.004)
    p = predict(way, by_shapes([[20_000]], "one", 1.0), FREE, NETWORK)
    assert p.bytes == cluster.stats().bytes_sent


def test_gloo_ranks_compare_before_they_send():
    load, way = by_count(1000, 1.0), Way("dense", "dense")
    gloo = Machine("cpu", 1e30, 1e30, CPU)
    latency = Network(4, 4, 1e30, 0.001)
    extra = predict(way, load, gloo, latency).exchange - predict(way, load, FREE, latency).exchange
    assert extra == pytest.approx(0.003)


def test_flop_and_bundles_of_a_named_network():
    """ResNet-50: 4.09 G multiplications an image; V100 6.8 TFLOP/s: the paper's 0.46 s."""
    load = workload_by_name("resnet50", MACHINES["v100"], None, None)
    assert load.entries == 25_557_032
    assert load.seconds == pytest.approx(0.460, rel=0.01)
    assert sum(load.weights) == pytest.approx(1)
    assert workload_by_name("resnet50", MACHINES["v100"], 64, None).seconds == pytest.approx(
        0.230, rel=0.01
    )
    vgg = workload_by_name("vgg16", MACHINES["v100"], None, 1.0)
    # The three linear layers hold nine tenths of the entries and come first, in no time.
    assert sum(vgg.sizes[:6]) > 0.89 * vgg.entries
    assert sum(vgg.weights[:6]) < 0.01


@pytest.mark.parametrize("name", ["lstm-ptb", "lstm-an4", "fnn3"])
def test_networks_that_take_words_or_sound_have_flop_too(name):
    assert workload_by_name(name, MACHINES["h200"], None, None).seconds > 0


def test_a_head_that_shares_its_weight_is_counted():
    """gpt-124m, 512 tokens: the head has 38.6 of the 123.6 million multiplications of a token."""
    flops = 1e12
    load = workload_by_name("gpt-124m", Machine("slow", 1e12, flops), 1, None)
    entries = 12 * 12 * 768**2 + 50_304 * 768
    assert load.seconds == pytest.approx(6 * 512 * entries / flops, rel=1e-6)
    assert load.optimizer == "adamw"
