"""A new method and a new exchange, a few lines each, on two real ranks."""

import copy

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.compress import METHODS, Method
from gradwire.exchange import EXCHANGES, Exchange, Outcome
from gradwire.plan import auto
from gradwire.types import Entries, Sparse
from tests.integrate import models


def strided(u, k, memory, scan=None, *, first: int = 0):
    """Every (d/k)-th entry, one further in each step."""
    turn = memory.setdefault("turn", torch.tensor(first))
    step = u.numel() // k
    indices = (int(turn) % step + step * torch.arange(k)).to(torch.int32)
    turn += 1
    return Sparse(indices, u[indices], torch.tensor(k, dtype=torch.int32), u.numel())


def rows(message, u, group, memory, *, extra: int = 0):
    """Every rank's entries as a dense row, added in rank order."""
    gathered = group.all_gather(message.chosen.dense())
    ok = group.all_gather(message.finite.float().view(1)).min() == 1
    update = torch.cat([gathered.sum(0) / group.size, gathered.new_zeros(1)])
    memory["rows.calls"] = memory.get("rows.calls", torch.zeros(1)) + 1 + extra
    return Outcome(torch.where(ok, update, float("nan")), Entries(message.chosen), ok)


def added():
    """Register both, as a user would."""
    METHODS["strided"] = Method(strided)
    EXCHANGES["rows"] = Exchange(
        rows, lambda ranks, size, capacity, encoding, **options: 1, lambda ranks, **options: 1
    )


def removed():
    METHODS.pop("strided", None)
    EXCHANGES.pop("rows", None)


@pytest.fixture(autouse=True)
def _here():
    added()
    yield
    removed()


WAYS = ["strided/allgather", "topk/rows", "strided/rows"]


def saved_and_resumed(rank, folder, method):
    added()
    try:
        fields = {"method": method, "density": 0.05}
        ddp, wire = models.wrapped(**fields)
        optimizer = models.train(ddp, rank, 6)
        gradwire.save(wire, folder)
        weights = {name: t.clone() for name, t in ddp.module.state_dict().items()}
        momentum = copy.deepcopy(optimizer.state_dict())
        models.train(ddp, rank, 4, start=6, optimizer=optimizer)
        unbroken, stats = models.flat(ddp), wire.stats()
        wire.close()
        del ddp, wire
        dist.barrier()
        ddp, wire = models.wrapped(**fields, seed=5)
        ddp.module.load_state_dict(weights)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        optimizer.load_state_dict(momentum)
        gradwire.load(wire, folder)
        models.train(ddp, rank, 4, start=6, optimizer=optimizer)
        memory = {key for bundle in wire.bundles for key in bundle.memory}
        wire.close()
        return unbroken, models.flat(ddp), stats, memory
    finally:
        removed()


@pytest.mark.parametrize("method", WAYS)
def test_both_train_and_are_saved_and_resumed(ranks, tmp_path, method):
    results = ranks.run(2, saved_and_resumed, str(tmp_path / "saved"), method)
    for unbroken, resumed, stats, memory in results:
        assert torch.equal(unbroken, results[0][0])
        assert torch.equal(unbroken, resumed)
        assert 0.04 < stats.achieved_density < 0.06
        assert ("turn" in memory, "rows.calls" in memory) == (
            method.startswith("strided"),
            method.endswith("rows"),
        )


@pytest.mark.parametrize("method", WAYS)
def test_both_are_planned(method):
    plan = gradwire.plan("resnet20", workers=4, link="100mbit", methods=[method])
    way = {"method": method.partition("/")[0], "exchange": method.partition("/")[2]}
    assert any(vars(p.way).items() >= way.items() for p in plan.predictions)


def chosen_by_auto(rank):
    added()
    try:
        auto.measure_link = lambda *_: (1e4, 1e-5)
        ddp = models.DistributedDataParallel(models.model(), bucket_cap_mb=0.01)
        wire = gradwire.attach(ddp, method="auto", dense_below=0, bundle_mb=0.02)
        models.train(ddp, rank, auto.SKIPPED + auto.MEASURED + 2)
        found = wire.config.method, wire.config.exchange
        wire.close()
        return found
    finally:
        removed()


def test_auto_looks_at_them_too(ranks):
    """Auto tries every exchange; without a `preference` it recommends none of the new ones."""
    first, second = ranks.run(2, chosen_by_auto)
    assert first == second
    assert first[0] == "topk"
    assert first[1] != "rows"
