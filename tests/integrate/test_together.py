"""What all ranks have to do together, done by one of them: everyone hears who was where."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireError
from tests.integrate import models

OPERATIONS = {
    "save": lambda wire, folder: gradwire.save(wire, folder),
    "save elsewhere": lambda wire, folder: gradwire.save(wire, folder / "new"),
    "load": lambda wire, folder: gradwire.load(wire, folder),
    "flush": lambda wire, folder: wire.flush(),
    "skip_step": lambda wire, folder: wire.skip_step(),
    "detach": lambda wire, folder: wire.detach(),
    "follow_lr": lambda wire, folder: wire.follow_lr(0.25),
}
SAYS = {
    "save": "rank 1 is in exchange at step 3, rank 0 is in save at step 2",
    "save elsewhere": "rank 1 is in exchange at step 3, rank 0 is in save at step 2",
    "load": "rank 1 is in exchange at step 3, rank 0 is in load",
    "flush": "exchange: rank 1 has flush 0, rank 0 has 1",
    "skip_step": "exchange: rank 1 has skipped 0, rank 0 has 1",
    "detach": "exchange: rank 1 has flush 0, rank 0 has 1",
    "follow_lr": "exchange: rank 1 has learning_rate 0.0, rank 0 has 0.25",
}


def one_sided(rank, folder, what):
    """What a rank hears, the files there are afterwards, and whether the old checkpoint loads."""
    ddp, wire = models.wrapped()
    optimizer = models.train(ddp, rank, 2)
    gradwire.save(wire, folder)
    before = {file.name for file in folder.iterdir()}
    kept = wire.state_dict()
    said = ""
    try:
        if rank == 0:
            OPERATIONS[what](wire, folder)
        models.train(ddp, rank, 1, start=2, optimizer=optimizer)
    except RuntimeError as error:
        said = str(error)
    wire.close()
    files = {file.name for file in folder.iterdir()}
    torch.distributed.barrier()
    _, other = models.wrapped()
    gradwire.load(other, folder)
    loaded = other.state_dict()
    same = all(torch.equal(loaded["residual"][n], kept["residual"][n]) for n in kept["residual"])
    other.close()
    return said, files == before, same


@pytest.mark.parametrize("what", OPERATIONS)
def test_done_by_one_rank_only(ranks, tmp_path, what):
    for said, unchanged, same in ranks.run(3, one_sided, tmp_path, what):
        assert SAYS[what] in said
        assert "All ranks must run the same steps and call save, load, flush" in said
        assert unchanged
        assert same


def all_but_one(rank, folder):
    """As above, with the one that does not save a step whose number ends a byte."""
    ddp, wire = models.wrapped()
    optimizer = models.train(ddp, rank, 2)
    wire.steps = 255
    gradwire.save(wire, folder)
    said = ""
    try:
        if rank == 0:
            models.train(ddp, rank, 1, start=2, optimizer=optimizer)
        else:
            gradwire.save(wire, folder)
    except RuntimeError as error:
        said = str(error)
    wire.close()
    torch.distributed.barrier()
    _, other = models.wrapped()
    gradwire.load(other, folder)
    steps = other.steps
    other.close()
    return said, steps


def test_one_rank_does_not_save(ranks, tmp_path):
    for said, steps in ranks.run(3, all_but_one, tmp_path):
        assert "rank 1 is in save at step 255, rank 0 is in exchange at step 256" in said
        assert steps == 255


def local(rank, what, folder):
    net = models.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wire = gradwire.local_steps(net, optimizer, every=2, density=0.05, dense_below=0)
    said = ""
    try:
        for step in range(4):
            net(models.data(rank, step)).square().mean().backward()
            optimizer.step()
            wire.step()
            if step == 2 and rank == 0:
                wire.exchange() if what == "exchange" else gradwire.save(wire, folder)
    except GradwireError as error:
        said = str(error)
    wire.close()
    return said


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("exchange", "local_steps: rank 1 has inner_steps 4, rank 0 has 3"),
        ("save", "rank 1 is in local_steps at step 1, rank 0 is in save at step 1"),
    ],
)
def test_local_steps(ranks, tmp_path, what, words):
    assert all(words in said for said in ranks.run(2, local, what, tmp_path))


def told_differently(rank, what):
    """What attach says where ranks are told different things."""
    net = models.model()
    kw, ddp = {}, {}
    if what == "scaler" and rank == 1:
        kw["scaler"] = torch.amp.GradScaler("cpu")
    if what == "optimizer":
        kw["scaler"] = torch.amp.GradScaler("cpu")
        if rank == 1:
            kw["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.1)
    if what == "unused":
        ddp["find_unused_parameters"] = rank == 1
    if what == "order" and rank == 1:
        # DDP itself compares strides when it is made, and not later.
        module = DistributedDataParallel(nn.Conv2d(3, 4, 3))
        module.to(memory_format=torch.channels_last)
    elif what == "order":
        module = DistributedDataParallel(nn.Conv2d(3, 4, 3))
    else:
        module = DistributedDataParallel(net, **ddp)
    try:
        gradwire.attach(module, density=0.01, dense_below=0, **kw)
    except GradwireError as error:
        return str(error)
    return "attached"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("scaler", "scaler"),
        ("optimizer", "optimizer"),
        ("unused", "unused parameters (find_unused_parameters, static_graph)"),
        ("order", "parameters"),
    ],
)
def test_attach_compares_what_it_is_told(ranks, what, words):
    for said in ranks.run(2, told_differently, what):
        assert words in said
        assert "rank 1" in said


def sharing(rank):
    """A disabled scaler is none: ranks that write it down and ranks that do not may meet."""
    net = models.model()
    kw = {"scaler": torch.amp.GradScaler("cpu", enabled=False)} if rank else {}
    _, wire = models.wrapped(net=copy.deepcopy(net), **kw)
    wire.close()
    return True


def test_a_disabled_scaler_is_none(ranks):
    assert ranks.run(2, sharing) == [True, True]


def while_measuring(rank, folder):
    """The step in which method="auto" asks all ranks begins with another collective."""
    ddp, wire = models.wrapped(method="auto", density=0.05, dense_below=1024)
    optimizer = models.train(ddp, rank, 7)
    said = ""
    try:
        if rank == 0:
            gradwire.save(wire, folder)
        models.train(ddp, rank, 1, start=7, optimizer=optimizer)
    except RuntimeError as error:
        said = str(error)
    wire.close()
    return said, list(folder.iterdir())


def test_one_rank_saves_where_auto_decides(ranks, tmp_path):
    for said, files in ranks.run(3, while_measuring, tmp_path):
        assert "rank 1 is in auto at step 8, rank 0 is in save at step 7" in said
        assert not files
