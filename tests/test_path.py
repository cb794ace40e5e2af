"""The path of one bundle: each stage does its part, and nothing that enters is lost."""

import pytest
import torch

from gradwire import path
from gradwire.accumulate import Bundle
from gradwire.accumulate.momentum import Correction
from gradwire.config import Config
from gradwire.kernels.side_stream import Target
from gradwire.ranks.virtual import VirtualRanks
from gradwire.state.choice import choose
from gradwire.types import Entries, Everything, Slot

SIZE, P = 640, 3
TAKEN = torch.tensor(False)


class Worker:
    """One rank's bundle, and the step it is in."""

    def __init__(self, group, dtype=torch.float32, **fields):
        self.config = Config(**{"density": 0.05, "dense_below": 0, **fields})
        self.group = group
        slot = Slot("w", (SIZE,), (1,), dtype, 0, SIZE)
        self.bundle = Bundle(
            [slot], torch.device("cpu"), rank=group.rank, index=0, dense=False,
            ranks=group.size, correction=self.config.correction,
        )  # fmt: skip

    def step(self, gradient, into=None, flush=False, scale=None):
        choice = choose(self.bundle, self.config, 0, self.group.size, flush)
        return path.Step(
            self.bundle, [(0, gradient)], choice, self.config, self.group, TAKEN,
            into or Target(SIZE, torch.device("cpu")), scale,
        )  # fmt: skip


def workers(**fields):
    ranks = VirtualRanks(P)
    return ranks, [Worker(group, **fields) for group in ranks.groups]


def gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(SIZE, generator=generator).to(dtype) for _ in range(P)]


def alone(**fields):
    return Worker(VirtualRanks(1).groups[0], **fields)


def test_average_runs_the_five_stages_in_order(monkeypatch):
    called = []
    for name in ("accumulate", "compress", "encode", "exchange", "decode"):
        stage = getattr(path, name)
        monkeypatch.setattr(path, name, lambda *a, n=name, s=stage: (called.append(n), s(*a))[1])
    path.average(alone().step(torch.randn(SIZE)))
    assert called == ["accumulate", "compress", "encode", "exchange", "decode"]


@pytest.mark.parametrize("exchange", ["allgather", "union", "gtopk", "dense", "dense-bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_enters_is_in_the_mean_or_in_a_residual(exchange, dtype):
    ranks, team = workers(method="topk", exchange=exchange, dtype=dtype)
    grads = gradients(dtype)

    def work(rank):
        into = Target(SIZE, torch.device("cpu"))
        path.average(team[rank].step(grads[rank], into))
        return into.vector[:SIZE]

    means = ranks.run(work)
    kept = sum(worker.bundle.residual(TAKEN) for worker in team)
    assert all(torch.equal(mean, means[0]) for mean in means)
    total = sum(g.float() for g in grads)
    torch.testing.assert_close(P * means[0].float() + kept, total, rtol=1e-5, atol=1e-5)
    assert means[0].dtype == dtype


def test_the_mean_goes_into_the_pieces_it_came_from():
    gradient = torch.randn(SIZE)
    before, worker = gradient.clone(), alone()
    pieces = [(0, gradient)]
    path.average(worker.step(gradient, Target(SIZE, torch.device("cpu"), pieces)))
    sent = worker.bundle.pending.delivered.sparse
    assert torch.equal(gradient, sent.dense())
    assert torch.equal(before, gradient + worker.bundle.residual(TAKEN))


def test_compress_chooses_nothing_where_everything_is_sent():
    worker = alone()
    step = worker.step(torch.randn(SIZE), flush=True)
    scan = path.accumulate(step)
    assert path.compress(step, scan) is None
    path.decode(step, None, path.exchange(step, path.encode(step, None, scan)))
    assert worker.bundle.pending.delivered == Everything()
    assert not worker.bundle.residual(TAKEN).any()


def test_an_exchange_that_chooses_gets_room_for_k_entries():
    step = alone(exchange="gs-sgd", options={"rows": 3}).step(torch.randn(SIZE))
    sparse = path.compress(step, path.accumulate(step))
    assert sparse.capacity == step.choice.k
    assert int(sparse.count) == 0


def test_a_scaled_gradient_is_kept_without_its_scale():
    scale, gradient, worker = torch.tensor(8.0), torch.randn(SIZE), alone()
    into = Target(SIZE, torch.device("cpu"))
    path.average(worker.step(8 * gradient, into, scale=scale))
    kept = worker.bundle.residual(TAKEN)
    torch.testing.assert_close(into.vector[:SIZE] / 8 + kept, gradient)
    assert torch.equal(into.vector[:SIZE] != 0, kept == 0)


def test_momentum_ends_where_something_was_delivered():
    worker = alone(momentum=0.9)
    path.average(worker.step(torch.randn(SIZE)))
    indices = worker.bundle.pending.delivered.sparse.indices.long()
    left = worker.bundle.momentum(TAKEN)
    assert not left[indices].any()
    assert int((left == 0).sum()) == len(indices)
    assert worker.bundle.correction == Correction(momentum=0.9)


def test_a_method_without_feedback_keeps_nothing():
    worker = alone(method="randk", options={"feedback": False})
    path.average(worker.step(torch.randn(SIZE)))
    assert isinstance(worker.bundle.pending.delivered, Entries)
    assert not worker.bundle.residual(TAKEN).any()


def test_a_gradient_that_is_not_finite_makes_the_mean_nan_and_stays_out():
    gradient, worker = torch.randn(SIZE), alone()
    gradient[5] = float("inf")
    into = Target(SIZE, torch.device("cpu"))
    path.average(worker.step(gradient, into))
    assert into.vector.isnan().all()
    assert not bool(worker.bundle.pending.ok)
    assert worker.bundle.residual(torch.tensor(True)).isfinite().all()


def test_rounding_of_the_mean_is_kept_by_every_rank():
    mean = torch.tensor([1.0 + 2**-10, 3.0])
    update, ok, rounding = path.to_gradient(mean, torch.tensor(True), torch.bfloat16, None)
    assert update.tolist() == [1.0, 3.0]
    assert bool(ok)
    assert rounding.tolist() == [2**-10, 0.0]
    update, ok, rounding = path.to_gradient(1e39 * mean, torch.tensor(True), torch.float16, None)
    assert not bool(ok)
    assert update.isnan().all()
