"""FSDP2: 2 replicas x 2 shards. Equal to dense hybrid sharding, the law, replicas bit-equal."""

import gc
import warnings
import weakref

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import gradwire
from gradwire.errors import AttachError, ConfigError, DriftError, ExchangeError
from tests.cluster.test_law import violation
from tests.integrate import sharded_models as models

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def by_column(parameter):
    """Where columns can be cut evenly they are."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % 2 == 0 else Shard(0)


PLACEMENTS = {"sgd": None, "adamw": by_column}


def same_shard(results):
    """The results of the replicas, shard by shard."""
    return [results[0::2], results[1::2]]


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


def check_law(results):
    for replicas in same_shard(results):
        for parts in zip(*(rows for rows, _, _ in replicas), strict=True):
            us, updates, kept = zip(*parts, strict=True)
            assert torch.equal(*updates)
            assert violation(us, updates[0], kept) <= 8
            assert all(float(part.norm()) > 0 for part in (*us, updates[0], *kept))
        assert torch.equal(replicas[0][1], replicas[1][1]), "replicas differ"
    for _, _, stats in results:
        assert stats["bytes_sent"] < stats["bytes_dense"] / 4
        assert stats["steps"] == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_the_law_with_every_precision(ranks, policy):
    check_law(ranks.run(4, ledger, {}, policy))


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
    check_law(ranks.run(4, ledger, fields))


def started(rank):
    net, wire = models.wrapped(seed=rank // 2)
    wire.close()
    return models.flat(net), models.flat(models.sharded(models.model(), models.mesh()["shard"]))


def test_attach_gives_all_replicas_the_parameters_of_the_first(ranks):
    results = ranks.run(4, started)
    for replicas in same_shard(results):
        assert torch.equal(replicas[0][0], replicas[1][0])
        assert torch.equal(replicas[0][0], replicas[0][1])


MICRO = {
    "all-reduce off": lambda net, last: net.set_requires_all_reduce(last),
    "not the last": lambda net, last: net.set_is_last_backward(last),
    "gradient sync off": lambda net, last: net.set_requires_gradient_sync(last),
}


def accumulate(net, optimizer, how, steps):
    """Three micro-batches a step; the gradient's norm after the second and after the third."""
    for step in range(steps):
        optimizer.zero_grad()
        norms = []
        for micro in range(3):
            MICRO[how](net, micro == 2)
            models.loss(net, models.data(10 * step + micro)).backward()
            got = [p.grad.to_local().norm() for p in net.parameters() if p.grad is not None]
            norms.append(float(sum(got)))
        yield norms[1:]
        optimizer.step()


def micro_native(rank, how):
    axes = models.mesh()
    ours, wire = models.wrapped(axes, density=1.0)
    theirs = models.sharded(models.model(), axes)
    norms = []
    for net in (theirs, ours):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        norms = list(accumulate(net, optimizer, how, 3))
    steps = wire.stats().steps
    wire.close()
    return models.flat(ours), models.flat(theirs), steps, norms


@pytest.mark.parametrize("how", MICRO)
def test_micro_batches_equal_native_hybrid_sharding(ranks, how):
    for ours, theirs, steps, norms in ranks.run(4, micro_native, how):
        # The mean of sums and the sum of means are rounded differently.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        assert steps == 3
        for before, last in norms:
            assert before == 0, "a micro-batch before the last delivered something"
            assert last > 0


def micro_ledger(rank, how):
    net, wire = models.wrapped()
    seen = models.spied(wire)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows, old = [], models.joined(models.residuals(net, wire))
    for _ in accumulate(net, optimizer, how, 4):
        u = models.joined(seen) + old
        update = models.joined(models.gradients(net))
        old = models.joined(models.residuals(net, wire))
        rows.append((u, update, old))
        seen.clear()
    stats = wire.stats()
    wire.close()
    return rows, models.flat(net), stats.asdict()


@pytest.mark.parametrize("how", ["all-reduce off", "gradient sync off"])
def test_the_law_over_micro_batches(ranks, how):
    check_law(ranks.run(4, micro_ledger, how))


def micro_momentum(rank, how):
    net, wire = models.wrapped(momentum=0.9)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        for _ in accumulate(net, optimizer, how, 1):
            pass
    except ConfigError as error:
        return str(error)
    finally:
        wire.close()
    return "went on"


def test_momentum_wants_micro_batches_added_up_first(ranks):
    assert set(ranks.run(4, micro_momentum, "gradient sync off")) == {"went on"}
    for message in ranks.run(4, micro_momentum, "all-reduce off"):
        assert "use set_requires_gradient_sync(False) until the last one" in message


def spoiled(rank, how, micro):
    """Step 1 is spoiled in one shard of one replica; nobody takes it."""
    net, wire = models.wrapped()
    switch = {"on": False}

    def change(unit, flat):
        if switch["on"] and rank == 3 and unit.name == "blocks.1":
            flat[7] = float(how)

    seen = models.spied(wire, change)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    total = out = 0
    bad = []
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2 if micro else 1):
            switch["on"] = step == 1 and part == 0
            net.set_requires_all_reduce(not micro or part == 1)
            models.loss(net, models.data(10 * step + part)).backward()
        update = models.joined(models.gradients(net))
        bad.append(not bool(torch.isfinite(update).all()))
        total = total + models.joined(seen)
        seen.clear()
        if step != 1:
            optimizer.step()
            out = out + update
    kept = models.joined(models.residuals(net, wire))
    stats = wire.stats()
    wire.close()
    return total, out, kept, bad, stats.skipped, models.flat(net)


@pytest.mark.parametrize(("how", "micro"), [("inf", False), ("nan", False), ("inf", True)])
def test_a_shard_that_is_not_finite_stops_the_step_on_all_of_them(ranks, how, micro):
    results = ranks.run(4, spoiled, how, micro)
    for _, _, _, bad, skipped, _ in results:
        assert bad == [False, True, False, False]
        assert skipped == 1
    for replicas in same_shard(results):
        totals, outs, kept, _, _, params = zip(*replicas, strict=True)
        assert torch.equal(*params)
        error = (sum(totals) - sum(kept)) / 2 - outs[0]
        assert float(error.abs().max()) < 1e-5, "something was lost"


def scaled(rank):
    """Steps 1 and 4 overflow in one shard of one replica: the scaler sees it everywhere."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    net, wire = models.wrapped(scaler=scaler)
    switch = {"on": False}

    def change(unit, flat):
        if switch["on"] and rank == 2 and unit.name == "blocks.0":
            flat[3] = float("inf")

    seen = models.spied(wire, change)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    total = out = 0
    scales = []
    for step in range(7):
        switch["on"] = step in (1, 4)
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        scaler.scale(models.loss(net, models.data(step))).backward()
        total = total + models.joined(seen) / scales[-1]
        seen.clear()
        scaler.step(optimizer)
        if not switch["on"]:
            out = out + models.joined(models.gradients(net))
        scaler.update()
    kept = models.joined(models.residuals(net, wire))
    skipped = wire.stats().skipped
    wire.close()
    return total, out, kept, scales, skipped, models.flat(net)


def test_a_scaler_skips_on_every_rank(ranks):
    results = ranks.run(4, scaled)
    for _, _, _, scales, skipped, _ in results:
        assert scales == [1024, 1024, 512, 512, 1024, 512, 512]
        assert skipped == 2
    for replicas in same_shard(results):
        totals, outs, kept, _, _, params = zip(*replicas, strict=True)
        assert torch.equal(*params)
        error = (sum(totals) - sum(kept)) / 2 - outs[0]
        assert float(error.abs().max()) < 1e-5


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
    for replicas in same_shard(results):
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


class Sometimes(models.Net):
    """Uses its second block only where it is told to."""

    use = True

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, x):
        x = self.blocks[0](self.first(x))
        if self.use:
            x = self.blocks[1](x)
        return self.last(x)


def sometimes(rank):
    axes = models.mesh()
    torch.manual_seed(0)
    net = models.sharded(Sometimes(), axes["shard"])
    group = axes["replicate"].get_group()
    wire = gradwire.attach(net, replicate_group=group, density=0.02, dense_below=0)
    seen = models.spied(wire)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out = {}
    for step in range(6):
        # The block's step 1 is skipped, but it only comes back in step 4; then it is left out.
        net.use = step in (0, 1, 4)
        optimizer.zero_grad()
        models.loss(net, models.data(step)).backward()
        if step == 1:
            wire.skip_step()
            continue
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                out[name] = out.get(name, 0) + parameter.grad.to_local()
        optimizer.step()
    kept = models.joined(models.residuals(net, wire))
    wire.close()
    return models.joined(seen), models.joined(out), kept, wire.steps


def test_a_unit_that_is_left_out_keeps_its_books(ranks):
    for replicas in same_shard(ranks.run(4, sometimes)):
        came, out, kept, steps = zip(*replicas, strict=True)
        error = (sum(came) - sum(kept)) / 2 - out[0]
        assert float(error.abs().max()) < 1e-5
        assert steps == (6, 6)


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


def unfinished(rank):
    """Step 1 stops after the first unit has delivered; the units begin again."""
    net, wire = models.wrapped()
    if not hasattr(net, "reset_iter_state"):
        wire.close()
        return None
    stop = {"on": False}

    def change(unit, flat):
        if stop["on"] and unit.name == "blocks.0":
            raise KeyboardInterrupt

    seen = models.spied(wire, change)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out, warned = 0, []
    for step in range(4):
        optimizer.zero_grad()
        stop["on"] = step == 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                models.loss(net, models.data(step)).backward()
            except KeyboardInterrupt:
                net.reset_iter_state()
                continue
        warned += [str(w.message) for w in caught if "did not finish" in str(w.message)]
        out = out + models.joined(models.gradients(net))
        optimizer.step()
    kept = models.joined(models.residuals(net, wire))
    wire.close()
    return models.joined(seen), out, kept, warned


def test_a_backward_pass_that_did_not_finish_is_put_back(ranks):
    results = ranks.run(4, unfinished)
    if results[0] is None:
        pytest.skip("this torch cannot go on after a backward pass that failed")
    for replicas in same_shard(results):
        came, out, kept, warned = zip(*replicas, strict=True)
        error = (sum(came) - sum(kept)) / 2 - out[0]
        assert float(error.abs().max()) < 1e-5
        assert [len(w) for w in warned] == [1, 1]


class Partly(models.Net):
    """Uses only one parameter of its blocks."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            block.forward = lambda x, block=block: block.gain * x
            x = block(x)
        return self.last(x)


def not_supported(rank, what):
    axes = models.mesh()
    net = models.sharded(Partly() if what == "partly" else models.Net(), axes["shard"])
    wire = gradwire.attach(net, replicate_group=axes["replicate"], density=0.02)
    hook = wire.engine.hook
    if what == "twice":
        wire.engine.hook = lambda unit, flat: (hook(unit, flat), hook(unit, flat))
    try:
        models.train(net, 1)
    except AttachError as error:
        return str(error)
    finally:
        wire.close()
    return "went on"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("twice", "blocks.1 was reduced twice in one backward pass"),
        ("partly", "blocks.1 handed over 1 entries of torch.float32, expected 721 of"),
    ],
)
def test_what_a_hook_cannot_serve_is_refused_in_the_backward_pass(ranks, what, message):
    assert all(message in m for m in ranks.run(4, not_supported, what))
