"""FSDP2 on CUDA: 2 replicas x 2 shards of NCCL ranks that share one GPU, and no host sync."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy

import gradwire
from tests.integrate.fsdp import models
from tests.rank_pool import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = {
    "fp32": {},
    "fp32 reduction": {"mp_policy": MixedPrecisionPolicy(BF16, FP32)},
    "bf16 reduction": {"mp_policy": MixedPrecisionPolicy(BF16, BF16)},
}


@pytest.fixture(scope="module")
def nccl():
    pool = Ranks(4, backend="nccl", anew=True)
    yield pool
    pool.close()


def axes():
    torch.cuda.set_device(0)
    return models.mesh("cuda")


def steps(rank, policy, count):
    net, wire = models.wrapped(axes(), shard=POLICIES[policy])
    models.train(net, count)
    stats = wire.stats()
    wire.close()
    return models.flat(net).cpu(), stats.asdict()


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_are_bit_equal_after_100_steps(nccl, policy):
    results = nccl.run(4, steps, policy, 100)
    for (first, stats), (second, _) in models.same_shard(results):
        assert torch.isfinite(first).all()
        assert torch.equal(first, second)
        # Dense bf16 is half as many bytes to begin with.
        assert stats["bytes_sent"] < stats["bytes_dense"] / (
            5 if policy == "bf16 reduction" else 10
        )
        assert stats["steps"] == 100
        assert stats["residual_norm"] > 0


def against_native(rank, policy):
    both = axes()
    ours, wire = models.wrapped(both, density=1.0, shard=POLICIES[policy])
    theirs = models.sharded(models.model(device="cuda"), both, **POLICIES[policy])
    for net in (ours, theirs):
        models.train(net, 5)
    wire.close()
    return models.flat(ours).cpu(), models.flat(theirs).cpu()


@pytest.mark.parametrize("policy", ["fp32", "fp32 reduction"])
def test_density_one_equals_native_hybrid_sharding(nccl, policy):
    for ours, theirs in nccl.run(4, against_native, policy):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def ledger(rank, policy):
    net, wire = models.wrapped(axes(), shard=POLICIES[policy])
    seen = models.spied(wire)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = []
    for step in range(4):
        seen.clear()
        old = models.joined(models.residuals(net, wire))
        models.train(net, 1, start=step, optimizer=optimizer)
        torch.cuda.synchronize()
        update = models.joined(models.gradients(net))
        new = models.joined(models.residuals(net, wire))
        rows.append((models.joined(seen) + old, update, new))
    stats = wire.stats()
    wire.close()
    return rows, models.flat(net).cpu(), stats.asdict()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_law(nccl, policy):
    models.check_law(nccl.run(4, ledger, policy))


def spoiled(rank):
    """The second step has an infinite entry in one shard of one replica."""
    net, wire = models.wrapped(axes())
    switch = {"on": False}

    def change(unit, flat):
        if switch["on"] and rank == 3 and unit.name == "blocks.1":
            flat[7:8].fill_(float("inf"))

    models.spied(wire, change)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    bad = []
    for step in range(4):
        switch["on"] = step == 1
        optimizer.zero_grad()
        models.loss(net, models.data(step, "cuda")).backward()
        bad.append(not bool(torch.isfinite(models.joined(models.gradients(net))).all()))
        if not bad[-1]:
            optimizer.step()
    skipped = wire.stats().skipped
    wire.close()
    return bad, skipped, models.flat(net).cpu()


def test_a_shard_that_is_not_finite_stops_the_step_on_all_of_them(nccl):
    results = nccl.run(4, spoiled)
    for bad, skipped, _ in results:
        assert bad == [False, True, False, False]
        assert skipped == 1
    for replicas in models.same_shard(results):
        assert torch.equal(replicas[0][-1], replicas[1][-1])


def micro_batches(rank):
    both = axes()
    ours, wire = models.wrapped(both, density=1.0)
    theirs = models.sharded(models.model(device="cuda"), both)
    for net in (ours, theirs):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(3):
                net.set_requires_all_reduce(micro == 2)
                models.loss(net, models.data(10 * step + micro, "cuda")).backward()
            optimizer.step()
    taken = wire.steps
    wire.close()
    return models.flat(ours).cpu(), models.flat(theirs).cpu(), taken


def test_micro_batches_equal_native_hybrid_sharding(nccl):
    for ours, theirs, taken in nccl.run(4, micro_batches):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert taken == 3


def broken(rank, folder, resume):
    """10 steps, a checkpoint, 10 more; or the last 10 from the checkpoint, in a new model."""
    net, wire = models.wrapped(axes(), seed=7 if resume else 0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    models.train(net, 3 if resume else 10, optimizer=optimizer)
    state = {"model": net.state_dict(), "wire": wire}
    if resume:
        dcp.load(state, checkpoint_id=folder)
        net.load_state_dict(state["model"])
    else:
        dcp.save(state, checkpoint_id=folder)
    models.train(net, 10, start=10, optimizer=optimizer)
    wire.close()
    return models.flat(net).cpu()


def test_resumed_is_bit_equal(nccl, tmp_path):
    whole = nccl.run(4, broken, str(tmp_path), False)
    for one, other in zip(whole, nccl.run(4, broken, str(tmp_path), True), strict=True):
        assert torch.equal(one, other)


def no_sync(rank, fields):
    """Steps after the first few, with every host sync inside the hook an error."""
    net, wire = models.wrapped(axes(), **fields)
    optimizer = models.train(net, 3)
    hook, agree = wire.engine.hook, wire.engine._agree
    looked = []

    def strictly(call):
        def run(*args):
            torch.cuda.set_sync_debug_mode("error")
            try:
                call(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            looked.append(call.__name__)

        return run

    wire.engine.hook, wire.engine._agree = strictly(hook), strictly(agree)
    models.train(net, 3, start=3, optimizer=optimizer)
    torch.cuda.synchronize()
    wire.close()
    return sorted(looked)


@pytest.mark.parametrize("fields", [{}, {"method": "gaussiank"}, {"values": "bf16"}], ids=str)
def test_the_hook_never_waits_for_the_host(nccl, fields):
    for looked in nccl.run(4, no_sync, fields):
        assert looked == ["_agree"] * 3 + ["hook"] * 9


def late(rank, count):
    """A hook that is far behind the backward pass still reads the gradients it was given."""
    torch.cuda.set_device(0)
    net, wire = models.wrapped(axes(), shard=POLICIES["bf16 reduction"], density=1.0)
    hook = wire.engine.hook

    def slow(unit, flat):
        torch.cuda._sleep(20_000_000)
        hook(unit, flat)

    if count:
        wire.engine.hook = slow
    models.train(net, 6)
    wire.close()
    return models.flat(net).cpu()


def test_the_buffer_lives_as_long_as_the_hooks_stream_needs_it(nccl):
    for one, other in zip(nccl.run(4, late, 0), nccl.run(4, late, 1), strict=True):
        assert torch.equal(one, other)


def detached(rank):
    both = axes()
    net, wire = models.wrapped(both)
    optimizer = models.train(net, 2)
    wire.detach()
    models.train(net, 3, start=2, optimizer=optimizer)
    again = gradwire.attach(net, replicate_group=both["replicate"], density=0.05, dense_below=0)
    models.train(net, 2, start=5, optimizer=optimizer)
    again.close()
    return models.flat(net).cpu()


def test_detach_and_attach_again(nccl):
    for replicas in models.same_shard(nccl.run(4, detached)):
        assert torch.equal(*replicas)
