"""shared: evaluate what all ranks share, and go on with the rank's own weights, bit by bit."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.errors import StateError
from gradwire.ranks.virtual import VirtualRanks
from tests.integrate import models


class Worker:
    def __init__(self, rank, group, dtype=torch.float32):
        torch.manual_seed(0)
        self.rank, self.dtype, self.taken = rank, dtype, 0
        self.model = nn.Sequential(models.model(), nn.BatchNorm1d(5)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        fields = {"every": 3, "density": 0.1, "dense_below": 0, "keep_unsent": True}
        self.local = gradwire.local_steps(self.model, self.optimizer, group=group, **fields)

    def train(self, steps):
        for _ in range(steps):
            self.model(models.data(self.rank, self.taken, self.dtype)).float().pow(
                3
            ).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.local.step()
            self.taken += 1
        return self

    def all(self):
        return [t.detach().clone() for t in self.model.state_dict().values()]

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]


def crew(size, **fields):
    ranks = VirtualRanks(size)
    made = ranks.run(lambda r: Worker(r, ranks.groups[r], **fields))
    return made, lambda work: ranks.run(lambda r: work(made[r]))


def same(one, two):
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [3, 4], ids=["after an exchange", "between exchanges"])
def test_all_ranks_see_the_same_weights_and_get_their_own_back(steps, dtype):
    workers, run = crew(3, dtype=dtype)
    run(lambda w: w.train(steps))
    own = [w.all() for w in workers]
    assert not same(workers[0].weights(), workers[1].weights())
    seen = []
    for w in workers:
        with w.local.shared():
            seen.append(w.weights())
            wanted = [x.to(dtype) for x in w.local.shared_weights().values()]
            assert same(seen[-1], wanted)
            # Running statistics change in a forward pass, and come back too.
            w.model(models.data(w.rank, 50, dtype))
    assert same(seen[0], seen[1])
    assert same(seen[0], seen[2])
    assert all(same(w.all(), o) for w, o in zip(workers, own, strict=True))


def test_training_goes_on_as_if_nothing_had_been():
    plain, run_plain = crew(2)
    run_plain(lambda w: w.train(8))
    workers, run = crew(2)
    run(lambda w: w.train(4))
    for w in workers:
        with w.local.shared():
            pass
    run(lambda w: w.train(4))
    assert same(plain[0].all(), workers[0].all())
    assert same(plain[1].all(), workers[1].all())


def test_an_exception_puts_the_weights_back():
    (worker, _), run = crew(2)
    run(lambda w: w.train(4))
    own = worker.all()

    def evaluate():
        with worker.local.shared():
            worker.model[0].a.weight.data.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert same(worker.all(), own)
    assert not worker.local.is_shared


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda local: local.step(), "step"),
        (lambda local: local.exchange(), "exchange"),
        (lambda local: local.state_dict(), "state_dict"),
        (lambda local: local.shared().__enter__(), "shared"),
    ],
    ids=["step", "exchange", "state_dict", "shared"],
)
def test_inside_nothing_is_exchanged_or_saved(call, name):
    (worker,), run = crew(1)
    run(lambda w: w.train(4))
    own = worker.all()
    with (
        worker.local.shared(),
        pytest.raises(StateError, match=rf"^{name} inside shared\(\): ") as e,
    ):
        call(worker.local)
    assert "\n" not in str(e.value)
    assert same(worker.all(), own)
    assert worker.local.inner_steps == 4


def test_inside_nothing_is_loaded():
    (worker,), run = crew(1)
    run(lambda w: w.train(4))
    state = worker.local.state_dict()
    with worker.local.shared(), pytest.raises(StateError, match=r"^load inside shared\(\)"):
        worker.local.load_state_dict(state)
