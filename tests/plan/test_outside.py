"""PyTorch's own ways: what NCCL sends over a node's link, and what FSDP gathers."""

import pytest

from gradwire.plan.machine import CUDA, Machine
from gradwire.plan.network import Network
from gradwire.plan.predict import Way, predict
from gradwire.plan.workload import by_count

DEVICE = Machine("free", 1e30, 1e30, CUDA)
LOAD = by_count(96_000_000, 0.0)
"""96 million entries, 384 MB in fp32."""


def step(method, network, load=LOAD, exchange=""):
    return predict(Way(method, exchange), load, DEVICE, network, 8000.0)


def nodes(workers, count, **more):
    return Network(workers, count, 1e9, latency=0.0, local_rate=1e15, local_latency=0.0, **more)


@pytest.mark.parametrize(("workers", "count", "times"), [(16, 2, 1.0), (32, 4, 1.5), (4, 4, 1.5)])
def test_an_all_reduce_crosses_a_nodes_link_as_if_a_node_were_one_rank(workers, count, times):
    """2 (m - 1) / m of the vector for m nodes, and for m ranks without nodes."""
    network = nodes(workers, count)
    for method, itemsize in (("ddp", 4), ("bf16-hook", 2)):
        sent = times * itemsize * LOAD.entries
        assert step(method, network).exchange == pytest.approx(sent / 1e9)
    dense = step("dense", network, exchange="dense")
    assert dense.exchange == pytest.approx(step("ddp", network).exchange, rel=1e-3)


def test_between_nodes_few_rounds_wait_for_the_latency():
    network = Network(16, 2, 1e15, latency=1.0, local_rate=1e15, local_latency=0.001)
    # 2 of the 30 rounds cross.
    assert step("ddp", network).exchange == pytest.approx(2 + 28 * 0.001)
    assert step("ddp", Network(16, 16, 1e15, latency=1.0)).exchange == pytest.approx(30)


def test_the_bf16_hook_is_no_all_to_all():
    """Our dense-bf16 sends from each rank to each: 8 ranks share a node's link."""
    network = nodes(16, 2)
    hook, ours = step("bf16-hook", network), step("dense", network, exchange="dense-bf16")
    assert ours.exchange > 4 * hook.exchange
    assert hook.bytes == pytest.approx(ours.bytes, rel=1e-3)


def test_fsdp_sends_half_as_much_again_and_gathers_beside_the_forward_pass():
    network = nodes(4, 4)
    hook, fsdp = step("bf16-hook", network), step("fsdp-bf16", network)
    assert fsdp.bytes == pytest.approx(1.5 * hook.bytes)
    # A forward pass of 1 s hides the third of it that is gathered there, 0.144 s.
    idle, busy = (step("fsdp-bf16", network, by_count(96_000_000, s)) for s in (0.0, 3.0))
    assert idle.hidden == pytest.approx(0)
    assert busy.exposed == pytest.approx(2 / 3 * idle.exposed, rel=0.01)


def test_fsdp_inside_nodes_sends_only_shards_between_them():
    hybrid, hook = (step(name, nodes(16, 2)) for name in ("hsdp-bf16", "bf16-hook"))
    assert hybrid.exchange == pytest.approx(hook.exchange, rel=1e-3)
    inside = nodes(16, 2)
    slow = Network(16, 2, 1e9, 0.0, local_rate=1e9, local_latency=0.0)
    gathered = 3 * 2 * LOAD.entries * 7 / 8 / 1e9
    added = step("hsdp-bf16", slow).exchange - step("hsdp-bf16", inside).exchange
    assert added == pytest.approx(gathered)
