"""What attach refuses, what it says, and how it lets go."""

import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import AttachError, ConfigError, ExchangeError
from tests.integrate import models


def test_a_model_that_is_not_ddp():
    with pytest.raises(
        AttachError, match="needs a DistributedDataParallel model, got Linear: wrap"
    ):
        gradwire.attach(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got str"):
        gradwire.attach("model")


def refused(rank, what):
    if what == "sparse embedding":
        net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    elif what == "float64":
        net = nn.Linear(4, 2).double()
    elif what == "optimizer in backward":
        from torch.distributed.optim import _apply_optimizer_in_backward

        net = nn.Linear(4, 2)
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    else:
        net = nn.Linear(4, 2)
    ddp = DistributedDataParallel(net)
    if what == "mixed precision":
        ddp.mixed_precision = object()
    if what == "another hook":
        ddp.register_comm_hook(None, lambda state, bucket: None)
    wires = []
    try:
        wires.append(gradwire.attach(ddp))
        if what == "twice":
            wires.append(gradwire.attach(ddp))
    except AttachError as error:
        return str(error)
    finally:
        for wire in wires:
            wire.close()
    return "attached"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "attached"),
        ("sparse embedding", "0: sparse embedding gradients; use sparse=False"),
        ("float64", "weight is torch.float64"),
        ("optimizer in backward", "weight: its optimizer runs in the backward pass"),
        ("mixed precision", "DDP's mixed_precision reduces gradients"),
        ("another hook", "has a communication hook already"),
        ("twice", "attached already: call wire.detach()"),
    ],
)
def test_what_cannot_work_is_refused_by_name(ranks, what, message):
    assert message in ranks.run(1, refused, what)[0]


def differing(rank, what):
    net = nn.Linear(40, 40)
    ddp = DistributedDataParallel(net)
    if what == "parameters" and rank == 1:
        ddp.module.bias.requires_grad_(False)
    fields = {"density": 0.01}
    if what == "density" and rank == 1:
        fields["density"] = 0.02
    if what == "method" and rank == 1:
        fields["method"] = "randk"
    if what == "options":
        fields |= {"exchange": "gs-sgd", "ratio": 5.0 + rank}
    try:
        gradwire.attach(ddp, **fields).close()
    except ConfigError as error:
        return str(error)
    return "attached"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("density", "ranks differ in density: rank 1 has 0.02, rank 0 has 0.01"),
        ("method", "ranks differ in method: rank 1 has 'randk', rank 0 has 'topk'"),
        (
            "options",
            "ranks differ in options: rank 1 has {'ratio': 6.0}, rank 0 has {'ratio': 5.0}",
        ),
        ("parameters", "rank 1 has 1 parameters, rank 0 has 2"),
    ],
)
def test_ranks_that_differ_all_get_the_same_error(ranks, what, message):
    begin = time.monotonic()
    assert all(message in m for m in ranks.run(2, differing, what))
    assert time.monotonic() - begin < 20


def one_flushes(rank):
    ddp, wire = models.wrapped(density=0.01)
    models.train(ddp, rank, 2)
    if rank == 1:
        wire.flush()
    try:
        models.train(ddp, rank, 1)
    except ExchangeError as error:
        return str(error)
    except RuntimeError as error:
        return f"RuntimeError {error}"
    finally:
        wire.close()
    return "went on"


def test_a_rank_out_of_step_is_an_error_on_every_rank(ranks):
    for message in ranks.run(2, one_flushes):
        assert "rank 1 has flush 1, rank 0 has 0" in message
        assert "step 3, bundle" in message


def one_dies(rank, released):
    ddp, wire = models.wrapped(density=0.01, timeout=30.0)
    models.train(ddp, rank, 2)
    if rank == 1:
        # What a crash inside the path looks like: its peers must not wait for the timeout.
        def broken(*_args):
            raise ValueError("a bug on rank 1")

        wire.replace = broken
    begin = time.monotonic()
    try:
        models.train(ddp, rank, 1)
    except RuntimeError as error:
        seconds = time.monotonic() - begin
        if rank == 1:
            # Its connections stay open: only what gradwire does releases the peer.
            models.wait_for(released, 12)
        released.touch()
        return str(error), seconds
    finally:
        wire.close()
    return "went on", 0.0


def test_a_rank_that_fails_releases_its_peers(ranks, tmp_path):
    (first, seconds), (second, _) = ranks.run(2, one_dies, tmp_path / "released")
    assert "rank 1" in second
    assert "a bug on rank 1" in second
    assert "rank 0, step 3, bundle 0" in first
    assert seconds < 8


def flushed(rank):
    ddp, wire = models.wrapped()
    optimizer = models.train(ddp, rank, 3)
    before = wire.stats().residual_norm
    wire.flush()
    models.train(ddp, rank, 1, start=3, optimizer=optimizer)
    during = wire.stats()
    models.train(ddp, rank, 1, start=4, optimizer=optimizer)
    after = wire.stats().residual_norm
    wire.close()
    return before, during.residual_norm, after, during.dense


def test_flush_sends_everything_once(ranks):
    for before, during, after, dense in ranks.run(2, flushed):
        assert before > 0
        assert during == 0
        assert after > 0
        assert dense["flush"] > 0


class Drift(nn.Module):
    """Its gradient is the data, whatever its weights are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2000))

    def forward(self, x):
        return (self.weight * x).sum()


def warmed_up(rank, compressed):
    torch.manual_seed(rank)
    ddp = DistributedDataParallel(Drift())
    wire = gradwire.attach(ddp, density=0.01) if compressed else None
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 8)
    for step in range(8):
        if wire is not None:
            wire.follow_lr(schedule.get_last_lr()[0])
            if step == 7:
                wire.flush()
        optimizer.zero_grad()
        ddp(torch.randn(2000)).backward()
        optimizer.step()
        schedule.step()
    if wire is not None:
        wire.close()
    return ddp.module.weight.detach()


def test_what_waits_in_a_warm_up_counts_with_the_rate_of_its_own_step(ranks):
    ours, theirs = (ranks.run(2, warmed_up, compressed)[0] for compressed in (True, False))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def let_go(rank, skip):
    ddp, wire = models.wrapped()
    optimizer = models.train(ddp, rank, 3)
    wire.detach()
    models.train(ddp, rank, 1, start=3, optimizer=optimizer)
    if skip:
        wire.skip_step()
    models.train(ddp, rank, 1, start=4, optimizer=optimizer)
    kept = wire.stats().residual_norm
    steps = wire.stats().steps
    models.train(ddp, rank, 2, start=5, optimizer=optimizer)
    assert wire.stats().steps == steps, "still attached"
    dense = DistributedDataParallel(models.model())
    dense.module.load_state_dict(ddp.module.state_dict())
    for module in (ddp, dense):
        module.zero_grad()
        module(models.data(rank, 9)).square().mean().backward()
    equal = all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(ddp.parameters(), dense.parameters(), strict=True)
    )
    again = gradwire.attach(ddp, density=0.05, dense_below=0)
    models.train(ddp, rank, 2, start=7, optimizer=optimizer)
    stats = again.stats()
    again.close()
    return kept, steps, equal, stats.steps, models.flat(ddp).numpy().tobytes()


@pytest.mark.parametrize("skip", [False, True])
def test_detach_flushes_then_is_dense_then_attaches_again(ranks, skip):
    results = ranks.run(2, let_go, skip)
    assert len({r[-1] for r in results}) == 1
    for kept, steps, equal, again, _ in results:
        assert kept == 0
        assert steps == (5 if skip else 4), "a flush that was skipped is sent again"
        assert equal, "after detach the all-reduce is not DDP's own"
        assert again == 2


def loaded_on_the_way(rank, folder):
    """What is kept after a load between `detach` and the step in which the wire leaves."""
    ddp, wire = models.wrapped()
    optimizer = models.train(ddp, rank, 3)
    gradwire.save(wire, folder)
    wire.detach()
    models.train(ddp, rank, 1, start=3, optimizer=optimizer)
    gradwire.load(wire, folder)
    kept = [wire.stats().residual_norm]
    models.train(ddp, rank, 1, start=3, optimizer=optimizer)
    kept.append(wire.stats().residual_norm)
    models.train(ddp, rank, 1, start=4, optimizer=optimizer)
    gradwire.load(wire, folder)
    return kept, wire.stopped, wire.state_dict()["flush"]


def test_what_is_loaded_while_a_wire_leaves_is_sent_too(ranks, tmp_path):
    for (loaded, sent), stopped, flushes in ranks.run(2, loaded_on_the_way, str(tmp_path)):
        assert loaded > 0
        assert sent == 0, "it is gone with the wire"
        assert stopped
        assert not flushes, "a wire that has left sends nothing, and saves what it has loaded"


def rules(rank):
    fields = {"dense_below": 600, "bundle_mb": 0.002, "warmup": (0.2,), "warmup_steps": 2}
    ddp, wire = models.wrapped(dense=("*.bias",), **fields)
    models.train(ddp, rank, 4)
    biases = [float(wire.residual(n).norm()) for n in ("a.bias", "b.bias", "c.bias")]
    weight = float(wire.residual("b.weight").norm())
    stats = wire.stats()
    wire.close()
    try:
        models.wrapped(dense=("*.offset",))
    except ConfigError as error:
        return biases, weight, stats.dense, str(error)
    raise AssertionError("a rule that matches nothing was accepted")


def test_rules_keep_parameters_dense_and_the_stats_say_why(ranks):
    for biases, weight, dense, error in ranks.run(2, rules):
        assert biases == [0, 0, 0]
        assert weight > 0
        assert set(dense) == {"rule", "small"}
        assert "dense='*.offset' matches no parameter" in error


def chosen_dense(rank):
    ddp, wire = models.wrapped(density=0.3, dense_steps=1, dense_below=0)
    models.train(ddp, rank, 3)
    stats = wire.stats()
    wire.close()
    return stats.dense, stats.residual_norm, dist.get_world_size()


def test_dense_where_the_exchange_would_cost_more(ranks):
    """An all-gather at density >= 1/P sends more than a ring all-reduce."""
    four, two = ranks.run(4, chosen_dense)[0], ranks.run(2, chosen_dense)[0]
    assert set(four[0]) == {"schedule", "bytes"}
    assert four[1] == 0
    assert set(two[0]) == {"schedule"}
    assert two[1] > 0


def test_density_one_equals_ddp(ranks):
    for ours, theirs in ranks.run(2, against_ddp):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def against_ddp(rank):
    ddp, wire = models.wrapped(density=1.0)
    plain = DistributedDataParallel(models.model())
    models.train(ddp, rank, 5)
    models.train(plain, rank, 5)
    wire.close()
    return models.flat(ddp), models.flat(plain)


def test_the_handle_says_what_it_is_and_takes(ranks):
    text, memory = ranks.run(1, described)[0]
    assert "Wire(topk/allgather, density 0.01, 13,100 entries" in text
    assert "MB of residuals, rank 0 of 1" in text
    assert memory >= 13100 * 4


def described(rank):
    _, wire = models.wrapped()
    wire.close()
    return repr(wire), wire.memory_bytes


class Sometimes(torch.nn.Module):
    """A layer that is not always used."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(31, 31)
        self.b = torch.nn.Linear(31, 31)

    def forward(self, x, both):
        return self.b(self.a(x)) if both else self.a(x)


def detached_while_unused(rank, uses):
    """What is kept for b after each step that follows detach, and whether anything was said."""
    torch.manual_seed(0)
    ddp, wire = models.wrapped(net=Sometimes(), ddp={"find_unused_parameters": True})
    kept, said = [], []
    for step, both in enumerate([True, True, *uses]):
        if step == 2:
            wire.detach()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            ddp(models.data(rank, step), both).square().mean().backward()
        kept.append(float(wire.residual("b.weight").norm()))
        said += [str(w.message) for w in seen if "detach" in str(w.message)]
    wire.close()
    return kept[1:], said


def test_detach_waits_for_parameters_that_are_not_used(ranks):
    for kept, said in ranks.run(2, detached_while_unused, [False, False, True, True]):
        assert kept[0] > 0
        assert kept[1] == kept[2] == kept[0], "it waits where it is"
        assert kept[3] == 0, "the first step that uses it sends it"
        assert not said


def test_detach_says_what_it_drops_in_the_end(ranks):
    for _, said in ranks.run(2, detached_while_unused, [False] * 13):
        assert len(said) == 1
        assert "no rank has used b.weight, b.bias" in said[0] or "b.bias, b.weight" in said[0]
