"""Local steps: the law for differences of weights, equal replicas, resume, bad input."""

import runpy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import AttachError, ConfigError, DriftError, ExchangeError, StateError
from gradwire.integrate.local_steps import parts
from gradwire.ranks.virtual import VirtualRanks
from tests.integrate import models

FIELDS = {"every": 3, "density": 0.1, "dense_below": 0}


class Worker:
    """A rank that trains on its own data."""

    def __init__(self, rank, group=None, seed=0, dtype=torch.float32, **fields):
        self.rank, self.dtype, self.taken = rank, dtype, 0
        self.model = models.model(seed, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        fields = FIELDS | fields
        self.local = gradwire.local_steps(self.model, self.optimizer, group=group, **fields)

    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            x = models.data(self.rank, self.taken, self.dtype)
            self.model(x).float().square().mean().backward()
            self.optimizer.step()
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


@pytest.mark.parametrize(
    "fields",
    [{}, {"method": "topk", "values": "fp32"}, {"method": "dense", "values": "fp32"}],
    ids=["chunked int4", "topk", "dense"],
)
def test_nothing_is_lost(fields):
    """Sum of differences and residuals = P x update + sum of new residuals, in every round."""
    workers, run = crew(3, outer="average", **fields)
    for _ in range(4):
        before = workers[0].flat
        kept = sum(w.residual.double() for w in workers)
        run(lambda w: w.train(2))
        run(lambda w: w.optimizer.step())
        moved = sum((before - w.flat).double() for w in workers)
        run(lambda w: w.local.step())
        update = (before - workers[0].flat).double()
        left = sum(w.residual.double() for w in workers)
        torch.testing.assert_close(moved + kept, 3 * update + left, atol=3e-6, rtol=0)
        assert update.count_nonzero() > 0


@pytest.mark.parametrize(("seeds", "sent"), [((0, 0, 0), False), ((0, 1, 0), True)])
def test_weights_are_sent_at_the_start_where_ranks_differ(monkeypatch, seeds, sent):
    asked = []
    real = parts._from_first
    monkeypatch.setattr(parts, "_from_first", lambda *a: asked.append(1) or real(*a))
    group = VirtualRanks(3)
    made = group.run(lambda r: Worker(r, group.groups[r], seed=seeds[r]))
    assert bool(asked) is sent
    assert all(torch.equal(worker.flat, made[0].flat) for worker in made)


def test_every_step_of_sgd_and_everything_sent_is_data_parallel_sgd():
    plain = models.model()
    workers, run = crew(2, every=1, outer="average", method="dense", values="fp32")
    for worker in workers:
        worker.optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.1)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    run(lambda w: w.train(5))
    for step in range(5):
        sgd.zero_grad()
        losses = [plain(models.data(rank, step)).square().mean() for rank in range(2)]
        (sum(losses) / 2).backward()
        sgd.step()
    torch.testing.assert_close(workers[0].flat, models.flat(plain))


def test_the_outer_step_is_torchs_nesterov():
    diloco = {"outer_lr": 0.7, "outer_momentum": 0.9}
    workers, run = crew(2, method="dense", values="fp32", outer="nesterov", **diloco)
    x = [p.detach().clone() for p in workers[0].model.parameters()]
    sgd = torch.optim.SGD(x, lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(3):
        run(lambda w: w.train(2))
        run(lambda w: w.optimizer.step())
        ends = [[p.detach().clone() for p in w.model.parameters()] for w in workers]
        for start, *end in zip(x, *ends, strict=True):
            start.grad = start - sum(end) / 2
        sgd.step()
        run(lambda w: w.local.step())
        torch.testing.assert_close(workers[1].flat, torch.cat([p.reshape(-1) for p in x]))


def test_bf16_weights_keep_what_they_cannot_hold():
    """Steps of a tenth of what bf16 can tell from 1 add up in the fp32 reference."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    fields = {"method": "dense", "values": "fp32", "outer": "average", "outer_lr": 0.1, "every": 1}
    local = call(model, **fields)
    seen = []
    for _ in range(10):
        model.weight.data -= 2**-7
        local.step()
        seen.append(model.weight.unique().tolist())
    assert seen[0] == seen[1] == [1]
    assert seen[-1] == [1 - 2**-7]


def test_a_rank_that_is_not_finite_stops_the_round_for_all():
    workers, run = crew(2, outer="nesterov", method="topk", values="fp32")
    run(lambda w: w.train(3))
    before, kept = workers[0].flat, workers[0].residual
    run(lambda w: w.train(2))
    with torch.no_grad():
        workers[1].model.a.bias[0] = float("inf")
    moved = before - workers[0].flat
    run(lambda w: w.local.step())
    for worker in workers:
        assert torch.equal(worker.flat, before)
        assert worker.local.stats().skipped == 1
    torch.testing.assert_close(workers[0].residual, kept + moved)
    run(lambda w: w.train(3))
    assert not torch.equal(workers[0].flat, before)
    assert torch.equal(workers[0].flat, workers[1].flat)


def test_kept_weights_only_come_together():
    """With keep_unsent an exchange leaves the mean of all weights where it was."""
    workers, run = crew(3, outer="average", method="topk", values="fp32", keep_unsent=True)
    for _ in range(3):
        run(lambda w: w.train(2))
        run(lambda w: w.optimizer.step())
        before = [w.flat for w in workers]
        run(lambda w: w.local.step())
        mean = sum(w.flat.double() for w in workers) / 3
        torch.testing.assert_close(mean, sum(b.double() for b in before) / 3, atol=1e-6, rtol=0)
        shared = [
            torch.cat([*map(torch.flatten, w.local.shared_weights().values())]) for w in workers
        ]
        assert all(torch.equal(x, shared[0]) for x in shared)
        for worker, x, old in zip(workers, shared, before, strict=True):
            assert torch.equal(worker.flat, x - worker.residual)
            assert not torch.equal(worker.flat, old)
            assert worker.residual.count_nonzero() > 0
    run(lambda w: w.local.flush())
    run(lambda w: w.local.exchange())
    assert torch.equal(workers[0].flat, workers[2].flat)


def test_kept_weights_stay_when_another_rank_is_not_finite():
    workers, run = crew(2, method="topk", values="fp32", keep_unsent=True)
    run(lambda w: w.train(3))
    start = workers[1].flat
    run(lambda w: w.train(2))
    with torch.no_grad():
        workers[1].model.a.bias[0] = float("inf")
    moved = [w.flat for w in workers]
    run(lambda w: w.local.step())
    back = torch.where(moved[1].isfinite(), moved[1], start)
    torch.testing.assert_close(workers[0].flat, moved[0])
    torch.testing.assert_close(workers[1].flat, back)


def test_flush_sends_everything():
    workers, run = crew(2)
    run(lambda w: w.train(2))
    run(lambda w: w.local.flush())
    run(lambda w: w.train(1))
    assert not any(w.residual.any() for w in workers)
    assert workers[0].local.stats().dense == {"flush": 1}


def test_bytes_are_compared_with_every_step():
    workers, run = crew(4, density=0.05)
    run(lambda w: w.train(7))
    stats = workers[0].local.stats()
    entries = workers[0].flat.numel()
    assert (stats.steps, workers[0].local.inner_steps) == (2, 7)
    assert stats.bytes_dense == 7 * (2 * 3 * 4 * entries // 4)
    assert stats.bytes_dense > 100 * stats.bytes_sent > 0


def whole(rank, steps, fields):
    worker = Worker(rank, seed=rank, **fields).train(steps)
    return worker.flat.numpy().tobytes(), worker.local.stats().bytes_sent


def broken(rank, steps, stop, folder, fields):
    worker = Worker(rank, seed=rank, **fields).train(stop)
    gradwire.save(worker.local, folder)
    taken = worker.taken
    worker = Worker(rank, seed=9, **fields).train(2)  # what was there is replaced
    gradwire.load(worker.local, folder)
    worker.taken = taken
    worker.train(steps - stop)
    return worker.flat.numpy().tobytes(), worker.local.stats().bytes_sent


@pytest.mark.parametrize(("outer", "stop"), [("nesterov", 4), ("average", 3), ("kept", 4)])
def test_resumed_is_bit_equal_on_gloo(ranks, tmp_path, outer, stop):
    """Three steps are an exchange, and the fourth is between two."""
    kept = outer == "kept"
    fields = {"outer": "nesterov" if kept else outer, "watch": 1, "keep_unsent": kept}
    unbroken = ranks.run(2, whole, 9, fields)
    assert unbroken == ranks.run(2, broken, 9, stop, str(tmp_path), fields)
    assert (unbroken[0][0] == unbroken[1][0]) is not kept, "replicas"


def wander(worker, steps=6):
    """Random steps: the same bits in every process, which matrix products do not promise."""
    draw = torch.Generator().manual_seed(worker.rank)
    for _ in range(steps):
        for p in worker.model.parameters():
            p.data += torch.randn(p.shape, generator=draw)
        worker.local.step()
    return worker.flat.numpy().tobytes()


def wandered(rank):
    return wander(Worker(rank, seed=rank))


def test_virtual_workers_are_real_ones(ranks):
    _, run = crew(2)
    assert ranks.run(2, wandered) == run(wander)


def saved(rank, folder):
    worker = Worker(rank, outer="nesterov").train(4)
    gradwire.save(worker.local, folder)
    return worker.flat.numpy(), worker.residual.numpy()


def loaded(rank, folder):
    worker = Worker(rank, outer="nesterov")
    gradwire.load(worker.local, folder)
    flat, residual = worker.flat.numpy().copy(), worker.residual.numpy()
    end = worker.train(2).flat.numpy().tobytes()
    return flat, residual, worker.local.inner_steps, end


def test_another_number_of_ranks_starts_from_the_mean(ranks, tmp_path):
    """Also of the weights, which differ between exchanges."""
    before = ranks.run(3, saved, str(tmp_path))
    after = ranks.run(2, loaded, str(tmp_path))
    for rank in range(2):
        for what in (0, 1):
            mean = sum(torch.tensor(b[what]).double() for b in before) / 3
            torch.testing.assert_close(
                torch.tensor(after[rank][what]).double(), mean, atol=1e-7, rtol=1e-6
            )
        assert after[rank][2] == 6
    assert after[0][3] == after[1][3]


def scaled(rank):
    """Rank 1 meets an infinite gradient once: its GradScaler skips that inner step."""
    worker = Worker(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    skipped = 0
    for step in range(6):
        worker.optimizer.zero_grad()
        loss = worker.model(models.data(rank, step)).square().mean()
        if (rank, step) == (1, 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = worker.flat
        scaler.step(worker.optimizer)
        scaler.update()
        skipped += bool(torch.equal(before, worker.flat))
        worker.local.step()
    return worker.flat.numpy().tobytes(), skipped, worker.local.stats().steps


def test_a_step_that_the_scaler_skipped_counts(ranks):
    first, second = ranks.run(2, scaled)
    assert first[0] == second[0]
    assert (first[1:], second[1:]) == ((0, 2), (1, 2))


def mismatched(rank):
    """Ranks that were told different things, then ranks that do different things."""
    said = []
    try:
        Worker(rank, every=3 + rank)
    except ConfigError as error:
        said.append(str(error))
    dist.barrier()
    worker = Worker(rank, every=10).train(1 + rank)
    try:
        worker.local.exchange()
    except ExchangeError as error:
        said.append(str(error))
    return said


def test_ranks_that_differ_are_told_so(ranks):
    for said in ranks.run(2, mismatched):
        assert said[0] == "ranks differ in every: rank 1 has 4, rank 0 has 3. Give all the same."
        assert said[1].startswith("local_steps: rank 1 has inner_steps 2, rank 0 has 1.")


EXAMPLE = str(Path(__file__).parents[2] / "examples" / "local_steps.py")


def example(rank):
    return runpy.run_path(EXAMPLE)["train"](torch.device("cpu"), steps=40)


def test_the_example_sends_a_few_hundredths(ranks):
    assert min(ranks.run(2, example)) > 90


class Sharded(nn.Parameter):
    placements = ()


def call(model=None, optimizer=None, **fields):
    model = models.model() if model is None else model
    trained = model if isinstance(model, nn.Module) else models.model()
    if optimizer is None:
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    group = VirtualRanks(1).groups[0]
    return gradwire.local_steps(model, optimizer, **({"every": 3, "group": group} | fields))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"every": 2.5}, "every must be a whole number of at least 1, got 2.5"),
        ({"outer": "nestrov"}, "unknown outer 'nestrov'. Did you mean 'nesterov'?"),
        ({"outer_lr": 0}, r"outer_lr must be in \(0, 10\], got 0"),
        ({"outer_momentum": 1}, r"outer_momentum must be in \[0, 1\), got 1"),
        ({"outer": "average", "outer_momentum": 0.9}, "outer='average' has no momentum"),
        ({"density": 5}, "5 % is 0.05"),
        ({"dnsity": 0.1}, "unknown option 'dnsity'. Did you mean 'density'?"),
        ({"model": 3}, "local_steps needs a torch.nn.Module, got int"),
        ({"optimizer": "adamw"}, "needs the torch optimiser of the inner steps, got str"),
        ({"optimizer": ["adamw"]}, "needs the torch optimiser of the inner steps, got str"),
        ({"optimizer": ()}, "needs the torch optimiser of the inner steps, got an empty list"),
        ({"every": None}, "needs every, the inner steps of a round, or a recipe"),
        ({"model": nn.Linear(3, 3).double()}, "weight is torch.float64: local_steps takes"),
        ({"model": nn.Linear(3, 3).requires_grad_(False)}, "no parameter that needs a gradient"),
    ],
)
def test_bad_input_is_one_line(given, words):
    with pytest.raises((ConfigError, AttachError), match=words) as error:
        call(**given)
    assert "\n" not in str(error.value)


def test_an_optimiser_of_another_model_is_refused():
    other = torch.optim.SGD(models.model().parameters(), lr=0.1)
    with pytest.raises(AttachError, match=r"^SGD holds none of the model's parameters: make it of"):
        call(optimizer=other)
    model = models.model()
    other.add_param_group({"params": list(model.parameters())})
    with pytest.raises(AttachError, match=r"^SGD has a parameter that the model has not"):
        call(model, other)


def test_two_optimisers_of_one_parameter_are_refused():
    model = models.model()
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    two = torch.optim.AdamW(model.b.parameters(), lr=0.1)
    with pytest.raises(AttachError, match=r"^b.weight is in two optimisers, SGD and AdamW: leave"):
        call(model, [one, two])


def test_a_sharded_parameter_is_refused():
    model = nn.Linear(3, 3)
    model.weight = Sharded(torch.zeros(3, 3))
    with pytest.raises(AttachError, match="weight is sharded"):
        call(model)


class FullyShardedDataParallel(nn.Module):
    """FSDP1 is known by its name, because importing it takes seconds."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_a_model_in_fsdp1_is_refused():
    with pytest.raises(AttachError, match=r"a sharded model \(FSDP1\): pass the plain model$"):
        call(nn.Sequential(FullyShardedDataParallel(models.model())))


def wrapped(rank):
    ddp = DistributedDataParallel(models.model())
    with pytest.raises(AttachError, match="pass the plain model"):
        gradwire.local_steps(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), every=3)
    return True


def test_a_ddp_model_is_refused(ranks):
    assert ranks.run(1, wrapped) == [True]


def test_an_exchange_cannot_be_skipped_and_states_must_fit():
    workers, run = crew(1)
    run(lambda w: w.train(3))
    with pytest.raises(StateError, match="cannot be taken back"):
        workers[0].local.skip_step()
    state = workers[0].local.state_dict()
    with pytest.raises(StateError, match="not of local_steps"):
        workers[0].local.load_state_dict({k: v for k, v in state.items() if k != "local"})
    other, _ = crew(1, outer="average")
    with pytest.raises(StateError, match="saved with outer momentum, here outer_momentum is 0"):
        other[0].local.load_state_dict(state)


def called_alone(rank, call):
    """What is said of a call on rank 1 alone, and whether nothing has changed."""
    worker = Worker(rank, every=2).train(3)
    if rank == 1:
        {"flush": worker.local.flush, "follow_lr": lambda: worker.local.follow_lr(0.5)}[call]()
    worker.optimizer.step()
    shared = torch.cat([x.reshape(-1) for x in worker.local.shared_weights().values()])
    before = worker.flat, worker.residual, shared
    try:
        worker.local.exchange()
    except ExchangeError as error:
        shared = torch.cat([x.reshape(-1) for x in worker.local.shared_weights().values()])
        after = worker.flat, worker.residual, shared
        return str(error), [torch.equal(*pair) for pair in zip(before, after, strict=True)]
    return "nothing", []


@pytest.mark.parametrize(("call", "field"), [("flush", "flush 1"), ("follow_lr", "rate 0.5")])
def test_a_call_on_one_rank_is_refused_before_anything_changes(ranks, call, field):
    for said, same in ranks.run(2, called_alone, call):
        assert f"{field}, rank 0 has" in said
        assert same == [True] * 3


def test_a_round_that_fails_leaves_the_weights():
    """Also with a drift watch, which looks at the shared weights in their place."""
    workers, run = crew(2, every=2, watch=1)
    run(lambda w: w.train(3))
    workers[1].local.reference["a.bias"] += 1
    before = [w.flat for w in workers]
    with pytest.raises(DriftError):
        run(lambda w: w.local.exchange())
    assert all(torch.equal(w.flat, flat) for w, flat in zip(workers, before, strict=True))


def test_after_an_exchange_that_broke_off_nothing_goes_on():
    """Some bundles may have landed and others not, so ranks may differ."""
    workers, run = crew(1, every=2, bundle_mb=0.001)
    (local,) = (w.local for w in workers)
    assert len(local.bundles) > 1
    begun, real = [], local.replace

    def fail(bundle, pieces):
        begun.append(bundle)
        if len(begun) == 2:
            raise ExchangeError("rank 1 is gone")
        real(bundle, pieces)

    local.replace = fail
    with pytest.raises(ExchangeError, match="rank 1 is gone"):
        run(lambda w: w.train(2))
    local.replace = real
    with pytest.raises(ExchangeError, match="rank 1 is gone"):
        run(lambda w: w.local.step())
