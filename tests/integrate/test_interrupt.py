"""Ctrl-C in the middle of a backward pass: the other ranks hear of it at once, and of whom."""

import gc
import threading
import time

import pytest
import torch

from tests.integrate import models
from tests.integrate.fsdp import models as sharded_models

SAYS = {
    "the first bucket": "KeyboardInterrupt",
    "the exchange of the last bucket": "KeyboardInterrupt",
    "fsdp": "KeyboardInterrupt",
    "a hook of the user, then close": "its backward pass did not finish",
    "a hook of the user, then dropped": "its backward pass did not finish",
}


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted(rank, way):
    """Return the error, its seconds, True if the thread has ended, and what threads printed."""
    printed = []
    threading.excepthook = lambda args: printed.append(repr(args.exc_value))
    try:
        return (*train_until(rank, way), printed)
    finally:
        threading.excepthook = threading.__excepthook__


def train_until(rank, way):
    if way == "fsdp":
        net, wire = sharded_models.wrapped(sharded_models.mesh(replicas=2))
        thread = None
        sharded_models.train(net, 2)
    else:
        net, wire = models.wrapped()
        models.train(net, rank, 2)
        thread = wire.engine._thread._thread
    if rank == 1:
        prepare(way, net, wire)
    said, began = "", time.monotonic()
    try:
        if way == "fsdp":
            sharded_models.train(net, 1, start=2)
        else:
            models.train(net, rank, 1, start=2)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    if rank == 1 and "dropped" in way:
        del net, wire
        gc.collect()  # DDP is in a cycle
    else:
        wire.close()
    if thread is not None:
        thread.join(10)
    return said, seconds, thread is None or not thread.is_alive()


def prepare(way, net, wire):
    """Let the next backward pass of this rank be interrupted."""
    if way == "fsdp":
        wire.agree = interrupt
    elif way == "the first bucket":
        submit = wire.engine._submit

        def submitting(arrival, *more):
            submit(arrival, *more)
            if arrival[0].index() == 0:
                raise KeyboardInterrupt

        wire.engine._submit = submitting
    elif way == "the exchange of the last bucket":
        replace, main = wire.replace, threading.main_thread()

        def replacing(*args):
            if threading.current_thread() is main:
                raise KeyboardInterrupt
            replace(*args)

        wire.replace = replacing
    else:
        first = net.module.a.weight  # the last that has a gradient
        if "dropped" in way:
            # Buckets wait in the thread when the model goes.
            go_on = threading.Event()
            wire.engine._thread.submit(go_on.wait)
            threading.Timer(1, go_on.set).start()
        first.register_hook(interrupt)


@pytest.mark.parametrize("way", SAYS)
def test_the_others_hear_of_it_at_once(ranks, way):
    other, own = ranks.run(2, interrupted, way)
    for _, seconds, ended, printed in (other, own):
        assert seconds < 15
        assert ended
        assert not printed
    assert own[0].startswith("KeyboardInterrupt")
    assert f"Rank 1 has stopped: {SAYS[way]}." in other[0]


def test_a_backward_pass_that_ended_leaves_the_communicator(ranks):
    assert ranks.run(2, reused) == [True, True]


def reused(rank):
    """Two wires one after the other, the first of them dropped after a whole step."""
    groups = []
    for _ in range(2):
        ddp, wire = models.wrapped()
        models.train(ddp, rank, 1)
        groups.append(wire.group.process_group)
        del ddp, wire
        gc.collect()
        torch.distributed.barrier()
    return groups[0] is groups[1]
