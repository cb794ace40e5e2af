"""Local steps: the mean step of a round, its bytes, Muon's products, and what is kept in memory."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import gradwire
from gradwire.optim.newton_schulz import orthogonalise
from gradwire.plan.machine import MACHINES
from gradwire.plan.memory import memory_bytes
from gradwire.plan.network import Network
from gradwire.plan.predict import Way, predict
from gradwire.plan.rounds import muon_seconds, newton_schulz_flops
from gradwire.plan.ways import recipe_ways
from gradwire.plan.workload import by_shapes
from gradwire.recipes import LOCAL_RECIPES

SHAPES = [[5000, 64], *[[512, 512]] * 8, [64]]
NETWORK = Network(4, 4, 1e7, latency=0.001)
H200 = MACHINES["h200"]


def way(name):
    return next(w for w in recipe_ways([*LOCAL_RECIPES, "plain-union", "dgc"]) if w.name == name)


def load(optimizer="adamw", seconds=0.1):
    return by_shapes(SHAPES, "small", seconds, optimizer)


@pytest.mark.parametrize("name", ["muon", "muon-wan", "muon/owner"])
def test_a_step_is_the_mean_of_a_whole_round(name):
    """The same exchange at every step costs `every` times as much."""
    found = predict(way(name), load("muon"), H200, NETWORK)
    at_once = predict(
        Way("topk", way(name).exchange, "sign", "auto", way(name).density),
        load("muon"), H200, NETWORK,
    )  # fmt: skip
    every = LOCAL_RECIPES[name.partition("/")[0]].fields["every"]
    assert found.compute == 0.1
    assert every * found.exchange == pytest.approx(at_once.exchange)
    assert every * found.bytes == at_once.bytes
    assert every * found.encode == pytest.approx(at_once.encode)
    assert found.hidden == 0, "nothing runs beside an exchange of weights"
    parts = found.compute + found.compress + found.encode + found.exchange + found.decode
    assert found.seconds == pytest.approx(parts)


@pytest.mark.parametrize(("name", "times"), [("muon", 51), ("muon-wan", 510)])
def test_bytes_are_as_much_fewer_as_the_recipe_says(name, times):
    dense = predict(Way("ddp", ""), load(), H200, NETWORK)
    assert dense.bytes / predict(way(name), load(), H200, NETWORK).bytes == pytest.approx(
        times, rel=0.01
    )


def test_bytes_are_those_that_a_wire_sends():
    cluster = gradwire.VirtualCluster(
        4, method="topk", density=0.5, values="sign", indices="auto", bundle_mb=25.0
    )
    cluster.average([torch.randn(20_000) for _ in range(4)])
    found = predict(way("muon"), by_shapes([[20_000]], "one", 1.0), H200, NETWORK)
    assert 5 * found.bytes == cluster.stats().bytes_sent


def test_an_owner_sends_as_much_with_many_workers():
    few, many = (
        predict(way("muon/owner"), load(), H200, Network(n, n, 1e9)).bytes for n in (8, 64)
    )
    assert many < 1.15 * few


def test_muons_flop_are_those_that_torch_counts():
    for shape in ((24, 24), (24, 96), (96, 24)):
        with FlopCounterMode(display=False) as counter:
            orthogonalise(torch.randn(1, *shape).bfloat16())
        assert newton_schulz_flops(shape) == counter.get_total_flops()
    assert newton_schulz_flops((5000, 64)) == newton_schulz_flops((64,)) == 0, "AdamW has these"


def test_muons_products_come_on_top_of_another_optimiser():
    spent = muon_seconds(SHAPES, H200)
    assert spent == pytest.approx(8 * newton_schulz_flops((512, 512)) / (0.4 * 989e12))
    adamw, muon = (
        predict(way("muon"), load(name), H200, NETWORK).seconds for name in ("adamw", "muon")
    )
    assert adamw - muon == pytest.approx(spent)


def held(state):
    """Bytes of fp32 that a State keeps per entry; the last one of a vector is spare."""
    entries = sum(b.size for b in state.bundles)
    kept = [b.u for b in state.bundles]
    for name in ("reference", "velocity"):
        kept += list(getattr(state, name, {}).values())
    return sum(t.nbytes for t in kept) / entries


def kept_by_ranks(rank, recipe, exchange):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64))
    if recipe in LOCAL_RECIPES:
        optimizer = gradwire.optim.muon(model, lr=0.01)
        state = gradwire.local_steps(model, optimizer, recipe=recipe, exchange=exchange)
        state.exchange()
    else:
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        state = gradwire.attach(ddp, recipe=recipe, warmup_steps=1)
        ddp(torch.randn(2, 64)).sum().backward()
    found = held(state)
    state.close()
    return found


@pytest.mark.parametrize("name", ["muon", "plain-union"])
def test_memory_is_what_a_worker_keeps(ranks, name):
    recipe, _, _ = name.partition("/")
    expected = memory_bytes(way(name), Network(2, 2, 1e9))
    for found in ranks.run(2, kept_by_ranks, recipe, way(name).exchange):
        assert found == pytest.approx(expected, rel=0.02)


def test_memory_of_other_ways():
    network = Network(4, 4, 1e9)
    ways = [
        Way("ddp", ""), Way("bf16-hook", ""), Way("powersgd-4", ""), Way("dense", "dense"),
        Way("dense", "dense-bf16"), Way("topk", "union", density=0.1), way("dgc"),
    ]  # fmt: skip
    assert [memory_bytes(w, network) for w in ways] == [0, 0, 4, 0, 4, 4, 8]
    assert memory_bytes(way("muon/owner"), network) == 12 + 4 / 4


def test_an_island_sends_every_entry_once_over_all_its_links():
    """2 nodes of 8: FSDP2 inside at every step, and between them what 2 ranks would send."""
    network = Network(16, 2, 1e8, latency=0.0, local_rate=1e15, local_latency=0.0)
    found = predict(replace(way("muon"), islands=True), load("muon"), H200, network)
    pair = predict(way("muon"), load("muon"), H200, Network(2, 2, 1e8, latency=0.0))
    assert found.exchange == pytest.approx(pair.exchange, rel=0.05)
    lonely = predict(way("muon"), load("muon"), H200, network)
    assert lonely.exchange > 7 * found.exchange, "16 workers, of which each sends everything"
    inside = predict(Way("fsdp-bf16", ""), load("muon"), H200, network.inner)
    dealt = 2 * 2 * load().entries / 8 * 7 / 8
    assert found.bytes == pytest.approx(inside.bytes + dealt + pair.bytes / 8, rel=0.02)
    assert 0.1 - found.compute == pytest.approx(7 / 8 * muon_seconds(SHAPES, H200))
    assert memory_bytes(replace(way("muon"), islands=True), network) == 12 / 8


def test_islands_are_recommended_where_nodes_have_several_gpus():
    asked = {"step_seconds": 0.3, "link": "10Gbps", "gpu": "h100", "inner_link": "nvlink4"}
    found = gradwire.plan("gpt-124m", workers=32, nodes=4, **asked).recommendation
    assert found.prediction.way.islands
    assert any('replicate_group=mesh["replicate"].get_group()' in line for line in found.code)
    assert not any(p.way.islands for p in gradwire.plan("gpt-124m", workers=4, **asked).predictions)
