"""What owners keep of the mean follows every event that residuals follow: nothing of it is lost."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.accumulate.owned import OWNED, by_part, in_order, spread_part
from gradwire.ranks.virtual import VirtualRanks
from tests.exchange.cases import owned_after
from tests.integrate.fsdp import models as sharded
from tests.law.cases import NOTHING, gradients, violation

FIELDS = {"exchange": "owner", "density": 0.3, "values": "sign", "back": "sign"}
SIZE = 1000


class Books:
    """A cluster, and the law of each of its steps seen from outside."""

    def __init__(self, world=3, **fields):
        self.cluster = gradwire.VirtualCluster(world, **FIELDS | fields)
        self.world, self.generator = world, torch.Generator().manual_seed(world)
        self.residuals, self.kept = [torch.zeros(SIZE)] * world, NOTHING

    def step(self):
        g = gradients("heavy", self.world, SIZE, torch.float32, self.generator)
        u = [a + b for a, b in zip(g, self.residuals, strict=True)]
        update = self.cluster.average(g)
        before = self.look()
        assert violation(u, update, self.residuals, before, self.kept) <= 4
        return g, update

    def look(self):
        """Note what is kept now; returns what owners kept before."""
        before, states = self.kept, self.cluster._states
        self.residuals = [self.cluster.residual(rank) for rank in range(self.world)]
        self.kept = owned_after(states, SIZE)
        return before


@pytest.mark.parametrize("world", [1, 2, 5])
def test_a_part_lies_where_it_lay(world):
    u = torch.randn(1300)
    parts = by_part(u, world)
    assert torch.equal(in_order(parts, 1300), u)
    spread = [spread_part(parts[rank], rank, world, 1300) for rank in range(world)]
    assert torch.equal(torch.stack(spread).sum(0), u)


def test_a_skipped_step_takes_back_what_owners_kept():
    books = Books()
    books.step()
    kept, residuals = books.kept, books.residuals
    g, _ = books.step()
    assert not torch.equal(books.kept, kept)
    books.cluster.skip_step()
    books.look()
    assert torch.equal(books.kept, kept)
    for rank in range(3):
        assert torch.equal(books.residuals[rank], residuals[rank] + g[rank])
    books.step()


def test_the_first_step_is_skipped():
    books = Books()
    books.step()
    books.cluster.skip_step()
    books.look()
    assert not books.kept.any()
    books.step()


def test_a_flush_sends_it_too():
    books = Books()
    books.step()
    assert books.kept.any()
    mean = torch.stack(books.residuals).double().mean(0) + books.kept
    books.cluster.flush()
    g, update = books.step()
    torch.testing.assert_close(
        update.double(), mean + torch.stack(g).double().mean(0), rtol=1e-5, atol=1e-4
    )
    assert books.kept is NOTHING
    assert not any(residual.any() for residual in books.residuals)
    books.step()
    assert books.kept.any()


def test_a_flush_that_is_skipped_leaves_it_in_the_residuals():
    books = Books()
    books.step()
    mean = torch.stack(books.residuals).double().mean(0) + books.kept
    books.cluster.flush()
    g, _ = books.step()
    books.cluster.skip_step()
    books.look()
    waits = torch.stack(books.residuals).double().mean(0)
    torch.testing.assert_close(waits, mean + torch.stack(g).double().mean(0), rtol=1e-5, atol=1e-4)
    books.step()


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_it_counts_with_the_learning_rate_of_its_own_step(factor):
    books = Books()
    books.cluster.follow_lr(1.0)
    books.step()
    kept = books.kept
    books.cluster.follow_lr(1 / factor)
    # What waits changes its units as the step begins.
    books.residuals = [factor * residual for residual in books.residuals]
    books.kept = factor * kept
    books.step()


def test_dense_steps_between():
    books = Books(dense_steps=0)
    books.step()
    state = books.cluster.state_dict()
    later = Books(dense_steps=3)
    # The schedule knows step 2 as a dense one.
    later.cluster.load_state_dict(state)
    later.look()
    assert torch.equal(later.kept, books.kept)
    later.step()
    assert later.kept is NOTHING


def test_a_resumed_cluster_goes_on_with_the_same_bits():
    books = Books()
    for _ in range(2):
        books.step()
    again = Books()
    again.cluster.load_state_dict(books.cluster.state_dict())
    again.generator = books.generator.clone_state()
    for _ in range(3):
        assert torch.equal(books.step()[1], Books.step(_looked(again))[1])
    assert torch.equal(books.kept, again.kept)


def _looked(books):
    books.look()
    return books


@pytest.mark.parametrize("field", ["memory", "delivered"])
def test_a_part_of_another_length_is_refused(field):
    books = Books()
    for _ in range(2):
        books.step()
    state = books.cluster.state_dict()
    part = state["workers"][1][field][0]
    key = OWNED if field == "memory" else "owned"
    part[key] = part[key][:-1]
    before = [books.cluster.residual(rank) for rank in range(3)]
    with pytest.raises(
        gradwire.errors.StateError, match=r"must be 512 of fp32, got float32 of shape \(511,\)"
    ):
        books.cluster.load_state_dict(state)
    assert all(torch.equal(books.cluster.residual(rank), before[rank]) for rank in range(3))


# --- real ranks ---


class Net(nn.Module):
    """Two parts that a step may leave out, and weights whose strides may change."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)
        self.parts = nn.ModuleList(nn.Linear(16, 20) for _ in range(2))

    def forward(self, x, used=(0, 1)):
        x = self.conv(x).flatten(2).mean(2)
        return sum(self.parts[i](x).square().mean() for i in used)


def made(seed=0, **fields):
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
    return ddp, gradwire.attach(ddp, dense_below=0, **FIELDS | fields)


def train(ddp, rank, numbers, used=(0, 1)):
    """Gradients of one rank, before and after each step, added up."""
    sums = {}
    for number in numbers:
        torch.manual_seed(100 * number + rank)
        ddp.zero_grad()
        ddp(torch.randn(4, 8, 6, 6), used).backward()
        for name, p in ddp.named_parameters():
            if p.grad is not None:
                name = name.removeprefix("module.")
                sums[name] = sums.get(name, 0) + p.grad.double()
    return sums


def waiting(wire):
    """By parameter, what this rank keeps: its residual, and what it owns for all."""
    wire_skipped = wire.was_skipped()
    out = {}
    for bundle in wire.bundles:
        flat = bundle.residual(wire_skipped).double()
        if bundle.keeps_owned:
            flat += bundle.memory.ranks * bundle.owned_vector(wire_skipped).double()
        for slot in bundle.slots:
            out[slot.name] = bundle.view(flat, slot).clone()
    return out


def unused_part(rank):
    ddp, wire = made()
    train(ddp, rank, [1])
    kept = waiting(wire)
    train(ddp, rank, [2], used=(0,))
    return kept, waiting(wire)


def test_what_is_kept_for_a_parameter_that_nobody_used_stays(ranks):
    for before, after in ranks.run(3, unused_part):
        for name, kept in before.items():
            assert torch.equal(kept, after[name]) == name.startswith("parts.1"), name


def padding(rank):
    ddp, wire = made()
    train(ddp, rank, [1, 2])
    sums = []
    for bundle in wire.bundles:
        vector = bundle.owned_vector(wire.was_skipped()).abs()
        inside = sum(bundle.view(vector, slot).double().sum() for slot in bundle.slots)
        sums.append([float(inside), float(vector.double().sum())])
    return sums


def test_nothing_is_kept_between_parameters(ranks):
    """A folder has no place for it, and a code as `sign` would send something there."""
    for sums in ranks.run(3, padding):
        for inside, everywhere in sums:
            assert inside == pytest.approx(everywhere, rel=1e-12)
            assert inside > 0


def other_strides(rank, folder):
    ddp, wire = made()
    train(ddp, rank, [1, 2])
    before = waiting(wire)
    gradwire.save(wire, folder)
    wire.close()
    ddp, wire = made()
    ddp.module.to(memory_format=torch.channels_last)
    train(ddp, rank, [3])
    gradwire.load(wire, folder)
    return before, waiting(wire)


def test_loaded_into_another_memory_format(ranks, tmp_path):
    close_in_mean(*zip(*ranks.run(3, other_strides, tmp_path), strict=True))


def moved(rank):
    ddp, wire = made()
    train(ddp, rank, [1, 2])
    before = waiting(wire)
    ddp.module.to(memory_format=torch.channels_last)
    own = train(copy.deepcopy(ddp.module), rank, [3])
    update = train(ddp, rank, [3])
    return before, own, update, waiting(wire)


def test_another_memory_format_after_attach(ranks):
    before, own, update, after = zip(*ranks.run(3, moved), strict=True)
    for name in before[0]:
        old, gradient, new = (sum(w[name] for w in waits) for waits in (before, own, after))
        close = {"rtol": 1e-5, "atol": 1e-5 * float((old + gradient).abs().max())}
        torch.testing.assert_close(old + gradient, 3 * update[0][name] + new, **close)


def written(rank, folder):
    ddp, wire = made()
    train(ddp, rank, [1, 2])
    gradwire.save(wire, folder)
    return waiting(wire)


def read(rank, folder):
    _, wire = made()
    gradwire.load(wire, folder)
    return waiting(wire)


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 4), (3, 3)])
def test_another_number_of_ranks_takes_it_over(ranks, tmp_path, old, new):
    before = ranks.run(old, written, tmp_path)
    after = ranks.run(new, read, tmp_path)
    if old == new:
        for own, again in zip(before, after, strict=True):
            assert all(torch.equal(own[name], again[name]) for name in own)
    close_in_mean(before, after)


def close_in_mean(before, after):
    for name in before[0]:
        old, new = (torch.stack([w[name] for w in waits]).mean(0) for waits in (before, after))
        torch.testing.assert_close(old, new, rtol=1e-5, atol=1e-6 * float(old.abs().max()))


# --- sharded models ---


def total(wire):
    """The sum of all that waits, as a mean over replicas, and the sum of its magnitudes."""
    sums = torch.zeros(2, dtype=torch.float64)
    for flat in waiting(wire).values():
        sums += torch.stack([flat.sum(), flat.abs().sum()])
    dist.all_reduce(sums)
    return sums / wire.group.size


def sharded_written(rank, folder):
    net, wire = sharded.wrapped(sharded.mesh(replicas=2), **FIELDS)
    sharded.train(net, 2)
    gradwire.save(wire, folder)
    _, again = sharded.wrapped(sharded.mesh(replicas=2), **FIELDS)
    gradwire.load(again, folder)
    before, after = waiting(wire), waiting(again)
    is_same = all(torch.equal(before[name], after[name]) for name in before)
    return total(wire), is_same, all(bundle.keeps_owned for bundle in again.bundles)


def sharded_read(rank, folder, replicas):
    _, wire = sharded.wrapped(sharded.mesh(replicas=replicas), **FIELDS)
    gradwire.load(wire, folder)
    return total(wire)


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 4), (4, 1)])
def test_sharded_over_others(ranks, tmp_path, world, replicas):
    results = ranks.run(4, sharded_written, tmp_path)
    assert all(is_same and keeps for _, is_same, keeps in results)
    (sum_before, size), *_ = (sums for sums, _, _ in results)
    for sum_after, _ in ranks.run(world, sharded_read, tmp_path, replicas):
        torch.testing.assert_close(sum_after, sum_before, rtol=1e-4, atol=1e-6 * float(size))


# --- local steps ---


def local(rank, group, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fields = FIELDS | {"every": 1, "dense_below": 0, "outer": "average", "bundle_mb": 0.001}
    return gradwire.local_steps(model, optimizer, group=group, **fields)


def test_a_round_that_is_not_finite_leaves_what_owners_kept():
    """One bundle of two is not finite: the round counts for neither."""
    world = 3
    ranks = VirtualRanks(world)
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20))
    nets = [copy.deepcopy(first) for _ in range(world)]
    wires = ranks.run(lambda r: local(r, ranks.groups[r], nets[r]))
    assert len(wires[0].bundles) > 1
    shared = []
    for number in range(4):
        kept = [waiting(wire) for wire in wires]
        before = wires[0].shared_weights()
        own = []
        for rank, net in enumerate(nets):
            torch.manual_seed(10 * number + rank)
            with torch.no_grad():
                for p in net.parameters():
                    p.add_(torch.randn_like(p))
                if number == 1 and rank == 2:
                    net[1].bias[0] = float("inf")
            own.append({n: before[n].double() - p.double() for n, p in net.named_parameters()})
        ranks.run(lambda r: wires[r].step())
        after, new = wires[0].shared_weights(), [waiting(wire) for wire in wires]
        shared.append(after)
        for name in before:
            finite = [torch.where(d[name].isfinite(), d[name], 0.0) for d in own]
            u = sum(finite) + sum(k[name] for k in kept)
            left = world * (before[name].double() - after[name].double())
            left += sum(k[name] for k in new)
            torch.testing.assert_close(u, left, rtol=1e-5, atol=1e-4)
    assert torch.equal(shared[0]["0.weight"], shared[1]["0.weight"])
    assert wires[0].stats().skipped == 1
