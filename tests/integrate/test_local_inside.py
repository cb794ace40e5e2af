"""Inside local steps: several optimisers, schedulers, accumulation, a scaler, bf16, compile."""

import math

import pytest
import torch

import gradwire
from gradwire.errors import StateError
from gradwire.optim import muon
from gradwire.ranks.virtual import VirtualRanks
from tests.integrate import models

FIELDS = {"every": 3, "density": 0.1, "dense_below": 0}


def pair(model):
    """Muon for a matrix, AdamW for the rest, as torch.optim.Muon needs."""
    rest = [p for name, p in model.named_parameters() if name != "b.weight"]
    return [torch.optim.Muon([model.b.weight], lr=0.01), torch.optim.AdamW(rest, lr=0.01)]


def one(model):
    return [muon(model, lr=0.01)]


class Worker:
    """A rank with several optimisers, a scheduler for each, and the batches of a step in parts."""

    def __init__(self, rank, group=None, make=pair, dtype=torch.float32, parts=1, **fields):
        self.rank, self.dtype, self.parts, self.taken = rank, dtype, parts, 0
        self.model = models.model(rank, dtype)
        self.optimizers = make(self.model)
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            for optimizer in self.optimizers
        ]
        inside = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.local = gradwire.local_steps(self.model, inside, group=group, **(FIELDS | fields))

    def loss(self):
        x = models.data(self.rank, self.taken, self.dtype)
        return [
            self.model(part).float().square().mean() / self.parts for part in x.chunk(self.parts)
        ]

    def train(self, steps):
        for _ in range(steps):
            for loss in self.loss():
                loss.backward()
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            self.local.step()
            self.taken += 1
        return self

    @property
    def flat(self):
        return models.flat(self.model)

    @property
    def residual(self):
        names = [name for name, _ in self.model.named_parameters()]
        return torch.cat([self.local.residual(name).reshape(-1) for name in names])


def crew(size, **fields):
    ranks = VirtualRanks(size)
    made = ranks.run(lambda r: Worker(r, ranks.groups[r], **fields))
    return made, lambda work: ranks.run(lambda r: work(made[r]))


def shared(worker):
    return torch.cat([x.reshape(-1) for x in worker.local.shared_weights().values()])


@pytest.mark.parametrize("make", [pair, one])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_lost(make, dtype):
    """With any optimisers inside: differences and residuals are P updates and new residuals."""
    fields = {"outer": "average", "values": "sign", "density": 0.5, "dtype": dtype, "every": 100}
    workers, run = crew(3, make=make, **fields)
    for _ in range(3):
        x, start = shared(workers[0]), workers[0].flat
        kept = sum(w.residual.double() for w in workers)
        run(lambda w: w.train(3))
        moved = sum((start - w.flat).double() for w in workers)
        run(lambda w: w.local.exchange())
        update = (x - shared(workers[0])).double()
        left = sum(w.residual.double() for w in workers)
        torch.testing.assert_close(moved + kept, 3 * update + left, atol=3e-6, rtol=0)
        assert update.count_nonzero() > 0
        assert torch.equal(workers[0].flat, workers[2].flat)


def test_each_optimiser_trains_its_own_parameters():
    workers, run = crew(1, method="dense", values="fp32", indices="int32", outer="average")
    plain = models.model(0)
    optimizers = pair(plain)
    for step in range(3):
        plain(models.data(0, step)).square().mean().backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
            optimizer.step()
            optimizer.zero_grad()
    run(lambda w: w.train(3))
    torch.testing.assert_close(workers[0].flat, models.flat(plain))


def test_a_step_in_parts_is_one_inner_step():
    """Four micro-batches and one step of the optimiser are what the whole batch is."""
    whole, run_whole = crew(2, make=one)
    parts, run_parts = crew(2, make=one, parts=4)
    run_whole(lambda w: w.train(4))
    run_parts(lambda w: w.train(4))
    assert [w.local.inner_steps for w in parts] == [4, 4]
    # Rounded in another order, which moves the least entry that is sent.
    assert (parts[0].flat - whole[0].flat).norm() < 0.02 * whole[0].flat.norm()


def whole(rank, steps, make):
    return Worker(rank, make=make).train(steps).flat.numpy().tobytes()


def broken(rank, steps, stop, folder, make):
    worker = Worker(rank, make=make).train(stop)
    gradwire.save(worker.local, folder)
    rates = [scheduler.state_dict() for scheduler in worker.schedulers]
    taken = worker.taken
    worker = Worker(rank + 9, make=make)
    gradwire.load(worker.local, folder)
    for scheduler, rate in zip(worker.schedulers, rates, strict=True):
        scheduler.load_state_dict(rate)
    worker.rank, worker.taken = rank, taken
    return worker.train(steps - stop).flat.numpy().tobytes()


@pytest.mark.parametrize("make", [pair, one])
def test_resumed_is_bit_equal(ranks, tmp_path, make):
    assert ranks.run(2, whole, 8, make) == ranks.run(2, broken, 8, 4, str(tmp_path), make)


def test_a_state_of_other_optimisers_is_refused():
    (two,), run = crew(1)
    run(lambda w: w.train(2))
    (single,), _ = crew(1, make=one)
    with pytest.raises(StateError, match=r"^the state is of 2 optimisers, here are 1$"):
        single.local.load_state_dict(two.local.state_dict())
    state = two.local.state_dict()
    state["local"]["optimizer"].reverse()
    state["local"]["optimizer_kind"].reverse()
    with pytest.raises(StateError, match="is of the optimiser 'AdamW', this is Muon"):
        two.local.load_state_dict(state)


def test_a_step_that_the_scaler_skips_counts():
    workers, run = crew(2, make=one, every=4)
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0) for _ in workers]

    def train(w):
        moved = []
        for step in range(4):
            scaler, before = scalers[w.rank], w.flat
            factor = math.inf if (w.rank, step) == (1, 2) else 1.0
            w.taken = step
            scaler.scale(w.loss()[0] * factor).backward()
            scaler.step(w.optimizers[0])
            scaler.update()
            w.optimizers[0].zero_grad()
            moved.append(not torch.equal(before, w.flat))
            w.local.step()
        return moved

    assert run(train) == [[True] * 4, [True, True, False, True]]
    assert torch.equal(workers[0].flat, workers[1].flat)
    assert workers[1].local.stats().steps == 1


def test_a_compiled_model_is_its_plain_one(ranks, tmp_path):
    assert ranks.run(1, compiled, str(tmp_path)) == [True]


def compiled(rank, folder):
    """Names, buffers and checkpoints are those of the model inside."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(models.model(), torch.nn.BatchNorm1d(5))
    model = torch.compile(plain, backend="eager")
    optimizer = muon(model, lr=0.01)
    local = gradwire.local_steps(model, optimizer, **FIELDS)
    for step in range(4):
        model(models.data(0, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
    gradwire.save(local, folder)
    again = torch.nn.Sequential(models.model(3), torch.nn.BatchNorm1d(5))
    other = gradwire.local_steps(again, muon(again, lr=0.01), **FIELDS)
    gradwire.load(other, folder)
    assert other.inner_steps == 4
    values = zip(plain.state_dict().values(), again.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in values)
