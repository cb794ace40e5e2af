"""Backends are asked for what they can do: one named `nccl2` that wraps Gloo works like Gloo."""

import gc

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.ranks.distributed import enqueues
from tests.integrate import models

CPU = torch.device("cpu")
NAME = "nccl2"
"""The name that torch 2.15 gives its usual backend for GPUs."""

_kept = []
"""torch gives an object made in Python back while somebody holds it, its base otherwise."""


class Named(dist.ProcessGroupGloo):
    """Gloo under another name."""

    def name(self):
        return NAME


class Joining(Named):
    """Gloo that says of itself what only backends with a stream can."""

    supports_coalescing = True


def passed_on(name):
    def method(self, *args, **named):
        return getattr(self.gloo, name)(*args, **named)

    return method


class Written(dist.ProcessGroup):
    """A group written in Python; Gloo does the work."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return NAME

    def _get_backend(self, device):
        return self

    def _set_group_name(self, name):
        self.called = name

    @property
    def group_name(self):
        # torch asks the backend for it, and there is none.
        return self.called


for name in dir(dist.ProcessGroupGloo):
    known = callable(getattr(dist.ProcessGroup, name, None))
    if known and name not in vars(Written) and not name.startswith("__"):
        setattr(Written, name, passed_on(name))

KINDS = {"named": Named, "joining": Joining, "written": Written}


def within(rank, world, kind, folder, function, *args):
    """The function's result on a default group of that kind; None is Gloo itself."""

    def make(store, rank, size, timeout):
        _kept.append(KINDS[kind](store, rank, size, timeout))
        return _kept[-1]

    dist.barrier()  # a rank that still connects must not find the other one gone
    if kind is not None:
        dist.destroy_process_group()
        dist.Backend.register_backend(NAME, make, devices=["cpu"])
        dist.init_process_group(
            NAME, init_method=f"file://{folder}/{kind}", rank=rank, world_size=world
        )
    dist.barrier()
    try:
        return function(rank, *args)
    finally:
        gc.collect()


def trained(rank, folder):
    """Parameters and residuals of a training that is saved and resumed on the way."""
    ddp, wire = models.wrapped()
    assert not wire.group.on_stream
    state = gradwire.State(density=0.5)
    mean = [torch.arange(100.0) + rank]
    gradwire.average(mean, state)
    models.train(ddp, rank, 3)
    gradwire.save(wire, folder)
    weights = ddp.module.state_dict()
    wire.close()
    state.close()
    del wire
    net = models.model()
    net.load_state_dict(weights)
    ddp, wire = models.wrapped(net=net)
    gradwire.load(wire, folder)
    models.train(ddp, rank, 3, start=3)
    kept = [wire.residual(name).numpy().tobytes() for name, _ in net.named_parameters()]
    name = dist.get_backend()
    wire.close()
    return name, mean, models.flat(ddp).numpy().tobytes(), kept


@pytest.mark.parametrize("kind", ["named", "written"])
def test_what_is_named_like_nccl_trains_like_gloo(ranks, tmp_path, kind):
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    plain = ranks.run(2, within, 2, None, tmp_path, trained, str(tmp_path / "plain"))
    other = ranks.run(2, within, 2, kind, tmp_path, trained, str(tmp_path / "other"))
    for (first, *usual), (second, *same) in zip(plain, other, strict=True):
        assert (first, second) == ("gloo", NAME)
        assert torch.equal(torch.cat(usual[0]), torch.cat(same[0]))
        assert usual[1:] == same[1:]


def asked(rank):
    return enqueues(dist.group.WORLD, CPU)


@pytest.mark.parametrize(
    ("kind", "answer"), [(None, False), ("named", False), ("written", False), ("joining", True)]
)
def test_what_a_backend_can_do_is_no_matter_of_its_name(ranks, tmp_path, kind, answer):
    assert ranks.run(2, within, 2, kind, tmp_path, asked) == [answer] * 2
