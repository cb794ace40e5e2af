"""The memory format changes between DistributedDataParallel, attach and the steps."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.errors import GradwireError
from tests.integrate import models

STEPS = 5
FORMATS = {
    "never": None,
    "between DDP and attach": -1,
    "before the first step": 0,
    "before the second": 1,
    "before the third": 2,
    "and back": 1,
}


class Net(nn.Module):
    """Two convolutions, one of which may be left out, and a matrix."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.other = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 6, 3)
        self.last = nn.Linear(6 * 16, 4)

    def forward(self, x, both=True):
        h = self.first(x) + (self.other(x) if both else 0)
        return self.last(self.second(torch.relu(h)).flatten(1))


def to(ddp, memory_format):
    ddp.to(memory_format=memory_format)


def images(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 3, 8, 8, generator=generator)


def worst_error(rank, when, ddp, **fields):
    """The largest relative error of the law, seen from outside, and whether replicas are equal."""
    torch.manual_seed(0)
    net = Net()
    leaves_out = ddp.get("find_unused_parameters", False)
    place = FORMATS[when]
    module = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.002, **ddp)
    if place == -1:
        to(module, torch.channels_last)
    wire = models.gradwire.attach(module, density=0.05, dense_below=0, bundle_mb=0.003, **fields)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    worst = 0.0
    for step in range(STEPS):
        if place == step:
            to(module, torch.channels_last)
        if when == "and back" and step == 3:
            to(module, torch.contiguous_format)
        # Rank 0 leaves one out in some steps, everyone in the last but one.
        both = not leaves_out or not (step == 3 or (step % 2 and rank == 0))
        x = images(rank, step)
        local = copy.deepcopy(net)
        for p in local.parameters():
            p.grad = None
        local(x, both).square().mean().backward()
        old = {n: wire.residual(n) for n, _ in net.named_parameters()}
        optimizer.zero_grad()
        module(x, both).square().mean().backward()
        for (name, p), q in zip(net.named_parameters(), local.parameters(), strict=True):
            gradient = torch.zeros_like(p) if q.grad is None else q.grad
            pair = torch.stack([(gradient + old[name]).contiguous(), wire.residual(name)])
            dist.all_reduce(pair)
            update = torch.zeros_like(p) if p.grad is None else p.grad
            error = (pair[0] - dist.get_world_size() * update - pair[1]).norm()
            worst = max(worst, float(error / pair[0].norm().clamp(min=1e-9)))
        optimizer.step()
    wire.close()
    return worst, models.flat(module).numpy().tobytes()


DDP = [{}, {"find_unused_parameters": True}, {"static_graph": True}]
CASES = [(when, kw) for kw in DDP for when in FORMATS]
# With views of the bucket a later change parts the gradients from it, in plain DDP too.
CASES += [(when, {"gradient_as_bucket_view": True}) for when in list(FORMATS)[:4]]


def every(rank, cases, fields):
    return [worst_error(rank, *case, **fields) for case in cases]


@pytest.mark.parametrize("fields", [{}, {"method": "dense"}], ids=str)
def test_the_law_holds_in_every_memory_format(ranks, fields):
    for case, one, other in zip(CASES, *ranks.run(2, every, CASES, fields), strict=True):
        assert one[0] < 1e-5, case
        assert one[1] == other[1], case


def moved(rank):
    """What waits for a parameter before and after its strides change, and the training after."""
    torch.manual_seed(0)
    net = Net()
    module, wire = models.wrapped(net=net, momentum=0.9, density=0.05)
    for step in range(2):
        module(images(rank, step)).square().mean().backward()
    bundle, _ = wire.home("second.weight")
    seen = []
    for stride in (None, (72, 1, 24, 8), (72, 9, 3, 1)):
        if stride:
            wire.reorder("second.weight", stride)
        skipped = wire.was_skipped()
        _, slot = wire.home("second.weight")
        seen.append(
            (slot.stride, bundle.view(bundle.momentum(skipped), slot), wire.residual(slot.name))
        )
    module(images(rank, 2)).square().mean().backward()
    wire.close()
    return seen


def test_what_waits_moves_along(ranks):
    for seen in ranks.run(2, moved):
        assert [stride for stride, _, _ in seen] == [(72, 9, 3, 1), (72, 1, 24, 8), (72, 9, 3, 1)]
        for which in (1, 2):
            assert seen[0][which].count_nonzero() > 400
            assert all(torch.equal(seen[0][which], other[which]) for other in seen)


def changed(rank, what):
    """What is said of a model that was changed after attach."""
    net = Net()
    ddp = {"gradient_as_bucket_view": what == "views"}
    module, wire = models.wrapped(net=net, ddp=ddp)
    try:
        for step in range(4):
            if step == 2 and what == "views":
                module.to(memory_format=torch.channels_last)
            if step == 2 and what == "one rank" and rank == 1:
                module.to(memory_format=torch.channels_last)
            for p in net.parameters():
                p.grad = None
            module(images(rank, step)).square().mean().backward()
    except RuntimeError as error:
        return step, str(error)
    finally:
        wire.close()
    return step, "nothing"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        # The order of DDP's new buckets is that in which gradients arrived in the first step.
        ("views", r"DDP's bucket does not hold the gradient of '(second|other)\.weight'"),
        ("one rank", "has order"),
    ],
)
def test_what_cannot_be_followed_is_refused(ranks, what, words):
    for step, said in ranks.run(2, changed, what):
        assert step == 2, said
        assert re.search(words, said), said


def dense_error(rank, ddp, alone, built):
    """The largest error of the dense average after `detach`, over changes of the memory format.

    built: the format in which DDP builds its buckets.
    """
    other = {torch.channels_last, torch.contiguous_format}.difference({built}).pop()
    torch.manual_seed(0)
    net = Net().to(memory_format=built)
    module = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.002, **ddp)
    wire = models.gradwire.attach(module, density=0.05, dense_below=0)
    wire.detach()
    worst = 0.0
    for step in range(7):
        if step in (3, 5) and (rank == 0 or not alone):
            to(module, other if step == 3 else built)
        module.zero_grad()
        twin = copy.deepcopy(net)
        module(images(rank, step)).square().mean().backward()
        twin(images(rank, step)).square().mean().backward()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            mean = q.grad.contiguous()
            dist.all_reduce(mean)
            worst = max(worst, float((mean / 2 - p.grad).abs().max()) if step else 0.0)
    return worst, wire.stopped


@pytest.mark.parametrize("alone", [False, True], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("built", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("ddp", DDP[:2], ids=str)
def test_after_detach_the_average_is_in_the_order_in_which_ddp_reads(ranks, ddp, alone, built):
    for worst, stopped in ranks.run(2, dense_error, ddp, alone, built):
        assert stopped
        assert worst < 1e-6


def converted(rank, back):
    """What is said after a change of dtype, and whether the parameters have moved."""
    module, wire = models.wrapped()
    models.train(module, rank, 2)
    module.to(torch.bfloat16)
    if back:
        module.to(torch.float32)
    before = models.flat(module)
    try:
        models.train(module, rank, 1, start=2, dtype=torch.float32 if back else torch.bfloat16)
    except (RuntimeError, GradwireError) as error:
        return str(error), torch.equal(before, models.flat(module))
    finally:
        wire.close()
    return "nothing", False


@pytest.mark.parametrize("back", [False, True])
def test_a_model_that_ddp_has_lost_is_refused(ranks, back):
    for said, same in ranks.run(2, converted, back):
        assert "converted to another dtype or device after DistributedDataParallel" in said
        assert same
