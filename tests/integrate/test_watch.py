"""Replicas that drift apart are found, named, and nobody hangs."""

import time

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import AttachError, DriftError
from gradwire.ranks.group import FIELDS, NAME
from gradwire.state.drift import Watch
from tests.integrate import models


def flip(tensor, place):
    """The lowest bit of one entry."""
    with torch.no_grad():
        tensor.view(-1).view(torch.int32)[place] ^= 1


def drifting(rank, odd, names, every, at):
    """Trains; on `odd` ranks a bit of each of `names` flips after step `at`. Steps, error."""
    net = models.model()
    net.c.bias.requires_grad_(False)
    ddp, wire = models.wrapped(net=net, watch=every)
    optimizer = models.train(ddp, rank, at)
    if rank in odd:
        for name in names:
            flip(ddp.module.get_parameter(name), rank + 1)
    steps, begin = at, time.monotonic()
    try:
        while steps < at + 8:
            models.train(ddp, rank, 1, start=steps, optimizer=optimizer)
            steps += 1
    except DriftError as error:
        return steps, str(error), time.monotonic() - begin
    finally:
        wire.close()
    return steps, "", 0.0


@pytest.mark.parametrize(
    ("world", "odd", "names", "message"),
    [
        (2, [1], ["b.weight"], "rank 1 differs from rank 0 in 'b.weight', the first of 1 par"),
        (2, [0], ["b.bias", "a.bias"], "rank 1 differs from rank 0 in 'a.bias', the first of 2"),
        (4, [0], ["a.weight"], "rank 0 differs from rank 1 in 'a.weight'"),
        (4, [1, 3], ["c.weight"], "ranks 1, 3 differ from rank 0 in 'c.weight'"),
        (2, [1], ["c.bias"], "rank 1 differs from rank 0 in 'c.bias'"),
    ],
)
def test_a_flipped_bit_is_found_and_named_on_every_rank(ranks, world, odd, names, message):
    results = ranks.run(world, drifting, odd, names, 3, 4)
    assert [steps for steps, _, _ in results] == [6] * world, "looks come after 0, 3, 6 steps"
    for _, error, seconds in results:
        assert error.startswith("replicas differ after 6 steps: ")
        assert message in error
        assert seconds < 20


def test_it_looks_before_the_first_step(ranks):
    """A checkpoint that one rank did not load."""
    for steps, error, _ in ranks.run(2, drifting, [1], ["a.weight"], 100, 0):
        assert steps == 0
        assert "replicas differ after 0 steps: rank 1 differs" in error


def steady(rank, every, dtype):
    ddp, wire = models.wrapped(dtype=dtype, watch=every)
    looks, check = [], wire.watch.check

    def counted(*args):
        looks.append(args[-1])
        check(*args)

    wire.watch.check = counted
    models.train(ddp, rank, 40, dtype=dtype)
    sent = wire.stats().bytes_sent
    wire.close()
    plain, bare = models.wrapped(dtype=dtype)
    models.train(plain, rank, 40, dtype=dtype)
    extra = sent - bare.stats().bytes_sent
    bare.close()
    return looks, extra, torch.equal(models.flat(ddp), models.flat(plain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_false_alarm_and_no_other_training(ranks, dtype):
    for looks, extra, equal in ranks.run(2, steady, 3, dtype):
        assert looks == list(range(0, 40, 3))
        assert extra == (NAME + 8 * FIELDS) * len(looks)
        assert equal


def own_loop(rank):
    net = models.model()
    state = gradwire.State(model=net, density=0.01, dense_below=0, watch=2)
    try:
        for step in range(6):
            net(models.data(rank, step)).square().mean().backward()
            gradwire.average({n: p.grad for n, p in net.named_parameters()}, state)
            with torch.no_grad():
                for p in net.parameters():
                    # A common mistake: a learning rate of one's own.
                    p -= p.grad * (0.1 + rank * (step == 2))
                    p.grad = None
    except DriftError as error:
        return step, str(error)
    return step, ""


def test_a_loop_of_ones_own(ranks):
    for step, error in ranks.run(2, own_loop):
        assert step == 4
        assert "after 4 steps: rank 1 differs from rank 0 in 'a.weight', the first of" in error


def by_hook(rank):
    net = models.model()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.01)
    state = gradwire.State(model=ddp, density=0.01, dense_below=0, watch=2)
    ddp.register_comm_hook(state, gradwire.ddp_hook)
    optimizer = models.train(ddp, rank, 2)
    if rank:
        flip(net.b.bias, 5)
    try:
        models.train(ddp, rank, 1, start=2, optimizer=optimizer)
    except DriftError as error:
        return str(error)
    finally:
        state.close()
    return ""


def test_a_state_that_knows_its_model(ranks):
    assert all("rank 1 differs from rank 0 in 'b.bias'" in e for e in ranks.run(2, by_hook))


def ignoring(rank):
    net = models.model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["a.bias"])
    ddp, wire = models.wrapped(net=net, watch=1)
    flip(net.a.bias, rank)
    models.train(ddp, rank, 1)
    wire.close()
    return True


def test_what_ddp_ignores_may_differ(ranks):
    assert ranks.run(2, ignoring) == [True, True]


def one_fails(rank, released):
    ddp, wire = models.wrapped(watch=2, timeout=60.0)
    optimizer = models.train(ddp, rank, 2)
    if rank == 1:
        wire.watch._digests = lambda device: 1 / 0
    begin = time.monotonic()
    try:
        models.train(ddp, rank, 1, start=2, optimizer=optimizer)
    except (ZeroDivisionError, RuntimeError) as error:
        seconds = time.monotonic() - begin
        if rank == 1:
            # Its connections stay open: only what gradwire does releases the peer.
            models.wait_for(released, 6)
        released.touch()
        return type(error).__name__, seconds
    finally:
        wire.close()
    return "went on", 0.0


def test_a_rank_that_cannot_look_releases_its_peers(ranks, tmp_path):
    (first, seconds), (second, _) = ranks.run(2, one_fails, tmp_path / "released")
    assert (first, second) == ("ExchangeError", "ZeroDivisionError")
    assert seconds < 5


def lopsided(rank):
    ddp, wire = models.wrapped(watch=1)
    if rank:
        ddp.module.extra = nn.Parameter(torch.zeros(3), requires_grad=False)
    try:
        models.train(ddp, rank, 1)
    except DriftError as error:
        return str(error)
    finally:
        wire.close()
    return ""


def test_another_number_of_parameters(ranks):
    for error in ranks.run(2, lopsided):
        assert error.startswith("replicas differ: rank 1 has 7 parameters, rank 0 has 6.")


def out_of_step(rank):
    ddp, wire = models.wrapped(watch=2)
    optimizer = models.train(ddp, rank, 2)
    wire.steps += rank
    try:
        models.train(ddp, rank, 1, start=2, optimizer=optimizer)
    except RuntimeError as error:
        return str(error)
    finally:
        wire.close()
    return ""


def test_only_one_rank_looks(ranks):
    for said in ranks.run(2, out_of_step):
        assert "rank 1 is in exchange at step 4, rank 0 is in watch at step 2" in said


def joined(rank):
    ddp, wire = models.wrapped(watch=1)
    try:
        with Join([ddp]):
            models.train(ddp, rank, 2)
    except AttachError as error:
        return str(error)
    finally:
        wire.close()
    return ""


def test_join_is_refused(ranks):
    assert all("watch does not work inside Join" in m for m in ranks.run(2, joined))


def test_the_model_is_not_kept_alive():
    net = models.model()
    watch = Watch(net, 1)
    del net
    assert watch._model() is None
