"""local_steps of Accelerate: the loop stays as it is, parts are saved and resumed."""

import pytest
import torch
from torch import nn

from tests.integrate import trainers

FIELDS = {"every": 3, "method": "topk", "density": 0.3, "dense_below": 0, "keep_unsent": True}


@pytest.fixture(autouse=True)
def _imported(ranks):
    trainers.import_on(ranks, "accelerate")


class Net(nn.Module):
    """A shared matrix has two names in a state."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Run:
    """A prepared model, and a loop as users write it: two micro-batches per step."""

    def __init__(self, rank, **fields):
        from accelerate import Accelerator

        from gradwire.integrate.accelerate import local_steps

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        torch.manual_seed(rank)
        net = Net()
        adam = torch.optim.AdamW(net.parameters(), lr=0.01)
        self.model, self.optimizer = self.accelerator.prepare(net, adam)
        self.local = local_steps(self.accelerator, self.model, self.optimizer, **(FIELDS | fields))
        self.rank, self.taken = rank, 0

    def train(self, steps):
        for _ in range(2 * steps):
            torch.manual_seed(100 * self.taken + self.rank)
            with self.accelerator.accumulate(self.model):
                loss = (self.model(torch.randn(4, 20)) - 1).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.taken += 1
        return self.flat

    @property
    def flat(self):
        return torch.cat([p.detach().reshape(-1).clone() for p in self.model.parameters()])

    @property
    def shared(self):
        return torch.cat([x.reshape(-1) for x in self.local.shared_weights().values()])


def goes_on(rank, folder):
    with trainers.launched(rank):
        whole = Run(rank)
        start = whole.flat
        own = whole.train(4)
        shared = whole.shared
        whole.accelerator.save_state(folder)
        rest = whole.train(4)
        counted = whole.local.inner_steps, whole.local.stats().steps
        whole.local.close()
        again = Run(rank)
        again.train(1)
        again.accelerator.load_state(folder)
        again.taken = 8
        loaded = again.flat
        resumed = again.train(4)
        again.local.close()
        return start, own, shared, rest, counted, loaded, resumed


def test_trained_saved_and_resumed(ranks, tmp_path):
    results = ranks.run(2, goes_on, str(tmp_path))
    for start, own, shared, rest, counted, loaded, resumed in results:
        assert torch.equal(start, results[0][0]), "ranks start from rank 0's weights"
        assert torch.equal(shared, results[0][2])
        assert not torch.equal(own, shared)
        assert counted == (8, 2)
        assert torch.equal(loaded, own)
        assert torch.equal(resumed, rest)
    assert not torch.equal(results[0][1], results[1][1]), "each rank trains on its own"
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "model.safetensors")
    shared = results[0][2]
    parts = [saved[name].reshape(-1) for name in ("first.weight", "first.bias", "second.bias")]
    assert torch.equal(torch.cat(parts), shared)


def refuses(rank):
    from accelerate import Accelerator

    from gradwire.integrate.accelerate import attach, local_steps

    with trainers.launched(rank):
        accelerator = Accelerator(cpu=True)
        net = nn.Linear(20, 20)
        bare = torch.optim.SGD(net.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(net, bare)
        texts = [
            trainers.refusal(local_steps, accelerator, model, bare),
            trainers.refusal(local_steps, accelerator, net, optimizer),
            trainers.refusal(local_steps, accelerator, model, optimizer, every=0),
        ]
        local_steps(accelerator, model, optimizer, every=2).close()
        texts.append(trainers.refusal(attach, accelerator, model))
        return texts


def test_wrong_objects_are_refused(ranks):
    for bare, net, every, twice in ranks.run(2, refuses):
        assert "this SGD is not prepared: call model, optimizer = accelerator.prepare" in bare
        assert "Linear is not prepared" in net
        assert "every" in every
        assert "has a communication hook already" in twice
