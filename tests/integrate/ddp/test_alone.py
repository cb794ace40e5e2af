"""A DDP model that averages nothing: neither gradients nor buffers."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.integrate.ddp.alone import leave_alone
from tests.integrate import trainers


def trained(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    ddp = DistributedDataParallel(net)
    own = leave_alone(ddp)
    leave_alone(ddp)  # a second time changes nothing
    torch.manual_seed(rank)
    for _ in range(2):
        ddp(torch.randn(5, 6)).square().mean().backward()
    taken = DistributedDataParallel(nn.Linear(2, 2))
    gradwire.attach(taken, density=0.5)
    refused = trainers.refusal(leave_alone, taken)
    return own is net, net[0].weight.grad.clone(), net[1].running_mean.clone(), refused


def test_gradients_and_buffers_stay_each_ranks_own(ranks):
    (same, gradient, mean, refused), other = ranks.run(2, trained)
    assert same
    assert not torch.equal(gradient, other[1])
    assert not torch.equal(mean, other[2])
    assert "use local steps or attach, not both" in refused
