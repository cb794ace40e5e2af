"""FSDP2: 2 replicas x 2 shards. Equal to dense hybrid sharding, the law, replicas bit-equal."""

import gc
import weakref

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.errors import DriftError, ExchangeError
from tests.integrate.fsdp import models

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def by_column(parameter):
    """Where columns can be cut evenly they are."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else Shard(0)


PLACEMENTS = {"sgd": None, "adamw": by_column}


def against_native(rank, name):
    axes = models.mesh()
    shard = {"shard_placement_fn": PLACEMENTS[name]}
    ours, wire = models.wrapped(axes, density=1.0, dense=("*.gain",), shard=shard)
    theirs = models.sharded(models.model(), axes, **shard)
    for net in (ours, theirs):
        models.train(net, 4, optimizer=OPTIMIZERS[name](net.parameters()))
    stats = wire.stats()
    wire.close()
    return models.flat(ours), models.flat(theirs), stats.dense, stats.residual_norm


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_density_one_is_bit_equal_to_native_hybrid_sharding(ranks, name):
    results = ranks.run(4, against_native, name)
    for ours, theirs, _, norm in results:
        assert torch.equal(ours, theirs)
        assert norm == 0
    # The second shard holds no entry of a gain, and a rule for it is none the less right.
    assert [set(dense) for _, _, dense, _ in results] == [{"schedule", "rule"}, {"schedule"}] * 2


POLICIES = {
    "fp32": (FP32, None),
    "bf16 compute, fp32 reduction": (FP32, MixedPrecisionPolicy(BF16, FP32)),
    "bf16 reduction": (FP32, MixedPrecisionPolicy(BF16, BF16)),
    "bf16 parameters": (BF16, None),
    "bf16 parameters, fp32 reduction": (BF16, MixedPrecisionPolicy(reduce_dtype=FP32)),
    "fp16 compute, fp32 reduction": (FP32, MixedPrecisionPolicy(FP16, FP32)),
}


def ledger(rank, fields, policy="fp32", seed=0):
    """What went in, what came out and what stayed, in each of four steps."""
    dtype, precision = POLICIES[policy]
    shard = {"mp_policy": precision} if precision else {}
    net, wire = models.wrapped(seed=seed + rank // 2, dtype=dtype, shard=shard, **fields)
    seen = models.spied(wire)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = []
    for step in range(4):
        seen.clear()
        old = models.joined(models.residuals(net, wire))
        models.train(net, 1, start=step, optimizer=optimizer, dtype=dtype)
        update = models.joined(models.gradients(net))
        new = models.joined(models.residuals(net, wire))
        rows.append((models.joined(seen) + old, update, new))
    stats = wire.stats()
    wire.close()
    return rows, models.flat(net), stats.asdict()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_law_with_every_precision(ranks, policy):
    models.check_law(ranks.run(4, ledger, {}, policy))


@pytest.mark.parametrize(
    "fields",
    [
        {"method": "randk"},
        {"method": "gaussiank"},
        {"exchange": "gtopk", "values": "int8"},
        {"bundle_mb": 0.001},
    ],
    ids=str,
)
def test_the_law_with_other_methods(ranks, fields):
    models.check_law(ranks.run(4, ledger, fields))


def started(rank):
    net, wire = models.wrapped(seed=rank // 2)
    wire.close()
    return models.flat(net), models.flat(models.sharded(models.model(), models.mesh()["shard"]))


def test_attach_gives_all_replicas_the_parameters_of_the_first(ranks):
    results = ranks.run(4, started)
    for replicas in models.same_shard(results):
        assert torch.equal(replicas[0][0], replicas[1][0])
        assert torch.equal(replicas[0][0], replicas[0][1])


class Checkpointed(models.Net):
    """Computes its blocks again in the backward pass."""

    reentrant = False

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


def three_steps(rank, kind, reentrant=False):
    axes = models.mesh()
    torch.manual_seed(0)
    net = models.sharded(kind(), axes["shard"])
    net.reentrant = reentrant
    wire = gradwire.attach(net, replicate_group=axes["replicate"], density=0.02, dense_below=0)
    models.train(net, 3)
    wire.close()
    return wire.steps, models.flat(net)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(ranks, reentrant):
    plain = ranks.run(4, three_steps, models.Net)
    again = ranks.run(4, three_steps, Checkpointed, reentrant)
    for (_, one), (steps, other) in zip(plain, again, strict=True):
        assert steps == 3
        assert torch.equal(one, other)


def dropped(rank):
    net, wire = models.wrapped()
    models.train(net, 1)
    wire.close()
    gone = [weakref.ref(net), weakref.ref(wire)]
    del net, wire
    gc.collect()
    return [ref() is None for ref in gone]


def test_nothing_keeps_the_model_alive(ranks):
    assert ranks.run(4, dropped) == [[True, True]] * 4


def controlled(rank):
    """flush, skip_step, detach, dense, attach again."""
    axes = models.mesh()
    net, wire = models.wrapped(axes)
    optimizer = models.train(net, 2)
    norms = [wire.stats().residual_norm]
    wire.flush()
    models.train(net, 1, start=2, optimizer=optimizer)
    norms.append(wire.stats().residual_norm)
    models.train(net, 1, start=3, optimizer=optimizer)
    norms.append(wire.stats().residual_norm)
    wire.skip_step()
    norms.append(wire.stats().residual_norm)
    wire.detach()
    models.train(net, 3, start=4, optimizer=optimizer)
    norms.append(wire.stats().residual_norm)
    theirs = models.sharded(models.model(5), axes)
    with torch.no_grad():
        for mine, other in zip(net.parameters(), theirs.parameters(), strict=True):
            other.to_local().copy_(mine.to_local())
    for model in (net, theirs):
        model.zero_grad()
        models.loss(model, models.data(9)).backward()
    equal = torch.equal(*(models.joined(models.gradients(m)) for m in (net, theirs)))
    again = gradwire.attach(net, replicate_group=axes["replicate"], density=0.05, dense_below=0)
    models.train(net, 2, start=10, optimizer=optimizer)
    steps = wire.stats().steps, again.stats().steps
    again.close()
    parameters = models.flat(net)
    try:
        models.train(net, 1, start=20, optimizer=optimizer)
    except ExchangeError as error:
        return norms, equal, steps, str(error), parameters
    raise AssertionError("a closed wire went on")


def test_flush_skip_detach_and_close(ranks):
    results = ranks.run(4, controlled)
    for norms, equal, steps, error, _ in results:
        before, flushed, after, skipped, detached = norms
        assert before > 0
        assert flushed == 0
        assert after > 0
        assert skipped > after, "what was delivered did not come back"
        assert detached == 0
        assert equal, "after detach it is not the dense all-reduce"
        assert steps == (5, 2)
        assert "the wire was closed" in error
    for replicas in models.same_shard(results):
        assert torch.equal(replicas[0][-1], replicas[1][-1])


def drifting(rank):
    net, wire = models.wrapped(watch=2)
    optimizer = models.train(net, 2)
    if rank == 3:
        with torch.no_grad():
            net.blocks[1].up.weight.to_local()[0, 0] += 1
    try:
        models.train(net, 2, start=2, optimizer=optimizer)
    except DriftError as error:
        return str(error)
    finally:
        wire.close()
    return "went on"


def test_drift_in_one_shard_is_an_error_on_every_rank(ranks):
    messages = ranks.run(4, drifting)
    for rank in (1, 3):
        assert "rank 1 differs from rank 0 in 'blocks.1.up.weight'" in messages[rank]
    for rank in (0, 2):
        assert "shard 1 of 2 failed" in messages[rank]
