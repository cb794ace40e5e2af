"""A residual that forgets: what is forgotten is declared, counted, and exact to the bit."""

import pytest
import torch

import gradwire
from gradwire.errors import ConfigError
from gradwire.ranks.virtual import VirtualRanks
from tests.integrate import models
from tests.law.cases import violation

P, SIZE = 3, 700
KINDS = {
    "topk fp32": {"method": "topk"},
    "topk sign": {"method": "topk", "values": "sign", "indices": "auto"},
    "chunked int4": {"method": "chunked", "values": "int4"},
    "union bf16": {"method": "topk", "exchange": "union", "values": "bf16"},
}


def gradients(step, dtype=torch.float32):
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(SIZE, generator=draw).to(dtype) for _ in range(P)]


def residuals(cluster):
    return [cluster.residual(rank) for rank in range(P)]


@pytest.mark.parametrize("decay", [0.9, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_law_with_what_is_forgotten(kind, dtype, decay):
    """Sum of gradients and residuals = P updates + sum of new residuals + what was forgotten.

    Forgotten is old - new of the residual that an exchange without decay leaves.
    """
    fields = {"density": 0.1, "dense_below": 0} | KINDS[kind]
    cluster = gradwire.VirtualCluster(P, decay=decay, **fields)
    kept = [torch.zeros(SIZE) for _ in range(P)]
    taken = whole = 0.0
    for step in range(4):
        u = [g.float() + r for g, r in zip(gradients(step, dtype), kept, strict=True)]
        update = cluster.average(gradients(step, dtype))
        old = _without_decay(u, update, dtype, fields)
        kept = residuals(cluster)
        for before, after in zip(old, kept, strict=True):
            assert torch.equal(after, before * decay)
        forgotten = [b.double() - a.double() for b, a in zip(old, kept, strict=True)]
        left = [(r.double() + f) for r, f in zip(kept, forgotten, strict=True)]
        assert violation(u, update, left) <= 4
        taken += float(forgotten[0].square().sum())
        whole += float(u[0].double().square().sum())
    assert taken > 0
    # The numbers are those of rank 0.
    assert cluster.stats().forgotten == pytest.approx(taken / whole, rel=1e-5)


def _without_decay(u, update, dtype, fields):
    """Residuals after one exchange of u that nothing decays, which sends the same update."""
    plain = gradwire.VirtualCluster(P, **fields)
    if dtype == torch.float32:
        assert torch.equal(plain.average(u), update)
        return residuals(plain)
    # u is no bf16 gradient. The mean is rounded to bf16, and every rank keeps the rounding.
    mean = plain.average(u)
    assert torch.equal(mean.to(dtype), update)
    return [r + (mean - update.float()) for r in residuals(plain)]


def test_nothing_is_forgotten_by_default():
    cluster = gradwire.VirtualCluster(P, density=0.1)
    cluster.average(gradients(0))
    assert cluster.config.decay == 1
    assert cluster.stats().forgotten is None


def test_a_skipped_step_forgets_nothing():
    cluster = gradwire.VirtualCluster(P, density=0.1, decay=0.5)
    cluster.average(gradients(0))
    before, share = residuals(cluster), cluster.stats().forgotten
    cluster.average(gradients(1))
    cluster.skip_step()
    for r, g, now in zip(before, gradients(1), residuals(cluster), strict=True):
        assert torch.equal(now, r + g)
    assert cluster.stats().forgotten == share > 0


def test_a_flush_comes_before_forgetting():
    cluster = gradwire.VirtualCluster(P, density=0.1, decay=0.5)
    cluster.average(gradients(0))
    kept = residuals(cluster)
    cluster.flush()
    update = cluster.average(gradients(1))
    mean = torch.stack([g + r for g, r in zip(gradients(1), kept, strict=True)]).mean(0)
    torch.testing.assert_close(update, mean)
    assert not any(r.any() for r in residuals(cluster))


@pytest.mark.parametrize("decay", [0, -0.1, 1.1, float("nan"), "0.9", True])
def test_a_decay_outside_its_range_is_one_line(decay):
    with pytest.raises(ConfigError, match=r"decay must be in \(0, 1\], got ") as error:
        gradwire.Config(decay=decay)
    assert "\n" not in str(error.value)


class Worker:
    def __init__(self, rank, group, **fields):
        self.rank, self.taken = rank, 0
        self.model = models.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        fields = {"every": 100, "density": 0.1, "dense_below": 0, "outer": "average"} | fields
        self.local = gradwire.local_steps(self.model, self.optimizer, group=group, **fields)

    def train(self, steps=2):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(models.data(self.rank, self.taken)).square().mean().backward()
            self.optimizer.step()
            self.local.step()
            self.taken += 1

    @property
    def flat(self):
        return models.flat(self.model)

    @property
    def residual(self):
        names = [name for name, _ in self.model.named_parameters()]
        return torch.cat([self.local.residual(name).reshape(-1) for name in names])


@pytest.mark.parametrize("keep", [False, True], ids=["", "keep_unsent"])
def test_local_steps_forget_too(keep):
    """In every round; what is forgotten follows from the residuals alone."""
    ranks = VirtualRanks(P)
    fields = {"decay": 0.75, "keep_unsent": keep, "method": "topk", "values": "fp32"}
    workers = ranks.run(lambda r: Worker(r, ranks.groups[r], **fields))
    before, previous = [w.flat for w in workers], 0.0
    for _ in range(3):
        x = torch.cat([v.reshape(-1) for v in workers[0].local.shared_weights().values()])
        kept = [w.residual for w in workers]
        ranks.run(lambda r: workers[r].train())
        moved = [b - w.flat for b, w in zip(before, workers, strict=True)]
        ranks.run(lambda r: workers[r].local.exchange())
        now = torch.cat([v.reshape(-1) for v in workers[0].local.shared_weights().values()])
        # r is 0.75 of what an exchange left, so a third of r was forgotten.
        forgotten = sum(w.residual.double() for w in workers) / 3
        came = sum((m + r).double() for m, r in zip(moved, kept, strict=True))
        left = sum(w.residual.double() for w in workers) + forgotten
        update = (x - now).double()
        torch.testing.assert_close(came, P * update + left, atol=3e-6, rtol=0)
        assert update.count_nonzero() > 0
        before = [w.flat for w in workers]
        assert torch.equal(before[0], now - workers[0].residual if keep else now)
        share = workers[0].local.stats().forgotten
        assert 0 < share < 0.25**2
        assert share != previous
        previous = share


def resumed(rank, folder, stop):
    """Residuals and weights after four rounds; with `stop`, of a run that was loaded after two."""
    worker = Worker(rank, None, decay=0.5, every=2)
    worker.train(4)
    if stop:
        gradwire.save(worker.local, folder)
        worker = Worker(rank, None, decay=0.5, every=2)
        gradwire.load(worker.local, folder)
        worker.taken = 4
    worker.train(4)
    return worker.flat.numpy().tobytes(), worker.residual.numpy().tobytes()


def test_a_saved_residual_decays_once(ranks, tmp_path):
    assert ranks.run(2, resumed, str(tmp_path), False) == ranks.run(2, resumed, str(tmp_path), True)
