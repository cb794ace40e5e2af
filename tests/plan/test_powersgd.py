"""PowerSGD as PyTorch's hook does it: what is sent, and that it is predicted, not recommended."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.plan.network import Network
from gradwire.plan.powersgd import powersgd_legs, powersgd_rank, split_shapes
from gradwire.workbench.models import build


def entries_sent(rank, low):
    """What the hook itself counts on two ranks, in one step after its start."""
    model = build("lenet5")
    ddp = DistributedDataParallel(model, bucket_cap_mb=100)
    state = hook.PowerSGDState(None, low, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, hook.powerSGD_hook)
    for _ in range(3):
        ddp(torch.randn(2, 1, 28, 28)).sum().backward()
    dist.barrier()
    return int(state.total_numel_after_compression)


@pytest.mark.parametrize("low", [1, 4])
def test_entries_are_those_that_the_hook_sends(ranks, low):
    counted = ranks.run(2, entries_sent, low)
    shapes = [p.shape for p in build("lenet5").parameters()]
    plain, left, right, matrices = split_shapes(shapes, low)
    assert counted == [plain + left + right] * 2
    assert matrices > 0


def test_three_all_reduces():
    # 400 x 100 as 400 and 100 entries of rank 1; 7 entries, and 3 x 2 that would save nothing.
    shapes = [(400, 100), (7,), (3, 2)]
    assert split_shapes(shapes, 1) == (13, 400, 100, 1)
    found = powersgd_legs(shapes, 1, Network(4, 4, 1e9))
    assert [leg.rounds for leg in found] == [6, 6, 6]
    assert [leg.bytes for leg in found] == [6 * 13, 6 * 400, 6 * 100]
    assert powersgd_legs(shapes, 1, Network(1, 1, 1e9)) == []


def test_ranks_by_name():
    assert [powersgd_rank(name) for name in ("powersgd-4", "topk", "dense")] == [4, 0, 0]


def test_a_plan_shows_it_beside_the_others_and_never_recommends_it():
    found = gradwire.plan("resnet50", workers=4, link="1gbit", gpu="h200", step_seconds=0.05)
    low = {p.way.name: p for p in found.predictions if p.way.method.startswith("powersgd")}
    assert set(low) == {"powersgd-1", "powersgd-4"}
    assert low["powersgd-1"].bytes < low["powersgd-4"].bytes
    only = gradwire.plan("resnet50", workers=4, link="1gbit", gpu="h200", methods=["powersgd-4"])
    assert [p.way.name for p in only.predictions if not p.way.sends_all] == ["powersgd-4"]
    assert not only.recommendation.compresses


def test_a_number_of_parameters_has_no_matrices():
    found = gradwire.plan(params=10**6, workers=4, step_seconds=0.1, gpu="h200")
    assert not [p for p in found.predictions if p.way.method.startswith("powersgd")]
