import pytest
import torch

from gradwire.workbench.simulate.local_sgd import LocalSgdSimulation
from gradwire.workbench.simulate.local_simulation import LocalSimulation
from tests.workbench.simulate.test_simulation import load, options

RUN = {"workers": 3, "method": "topk/union", "density": 0.02, "weight_decay": 1e-3}


def simulation(every=2, keep=False, **more):
    run = options(**RUN | more)
    return LocalSgdSimulation(run, load(run), every, keep_unsent=keep)


@pytest.mark.parametrize("keep", [False, True])
def test_it_is_local_steps(keep):
    run = options(**RUN)
    local = {"every": 2, "outer": "average", "method": "topk/union", "density": 0.02}
    local |= {"values": "fp32", "indices": "int32", "keep_unsent": keep}
    slow, fast = LocalSimulation(run, load(run), 6, flush=True, **local), simulation(keep=keep)
    for step in range(6):
        if step == 5:
            fast.flush()
        slow.step(), fast.step()
        for a, b in zip(slow.models, fast.models, strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(row, fast.x) for row in fast.weights)


@pytest.mark.parametrize("keep", [False, True])
def test_nothing_is_lost(keep):
    """x less the mean residual is the mean of what all workers have found."""
    fast = simulation(keep=keep)
    for _ in range(3):
        before, start = fast.weights.clone(), fast._start.clone()
        kept = torch.stack([fast.cluster.residual(r) for r in range(3)]) if fast.steps else 0
        x = fast.x.clone()
        for _ in range(2):
            fast.every = 10**6
            fast.step()
        moved = start - fast.weights
        assert not torch.equal(before, fast.weights)
        fast._exchange()
        left = torch.stack([fast.cluster.residual(r) for r in range(3)])
        torch.testing.assert_close(fast.x - left.mean(0), x - (moved + kept).mean(0))


def test_with_keep_a_worker_goes_on_from_its_own_weights():
    fast = simulation(keep=True)
    for _ in range(4):
        fast.step()
    for rank, row in enumerate(fast.weights):
        assert torch.equal(row, fast.x - fast.cluster.residual(rank))
    assert not torch.equal(fast.weights[0], fast.weights[1])
    fast.flush()
    fast.step()
    assert all(torch.equal(row, fast.x) for row in fast.weights)


def test_the_score_is_of_x_with_the_mean_statistics():
    fast = simulation(model="resnet20", method="dense", every=1)
    fast.step()
    assert 0 <= fast.score() <= 1
    for mine, *theirs in zip(
        *(m.buffers() for m in (fast.scored_model, *fast.models)), strict=True
    ):
        torch.testing.assert_close(mine.double(), torch.stack(theirs).double().mean(0))
        assert not mine.is_floating_point() or not torch.equal(mine, theirs[0])
    assert torch.equal(next(fast.scored_model.parameters()).flatten(), fast.x[:432])
