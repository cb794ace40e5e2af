"""The memory that local steps say they hold is what is there."""

import gc

import pytest
import torch
from torch import nn

import gradwire
from gradwire.ranks.echo import EchoGroup
from tests.integrate.fsdp import models as sharded
from tests.integrate.island_models import Islander
from tests.integrate.test_local import call


def test_each_use_is_counted():
    local = call(every=4, overlap=1, fragments=2, outer="nesterov", dense_below=0)
    entries = sum(p.numel() for p in local.weights.values())
    use = local.memory_use()
    assert use["x"] == use["outer momentum"] == 4 * entries
    assert 4 * entries <= use["residual"] < 4.3 * entries
    sizes = [0, 0]
    for name, number in local.fragment_of.items():
        sizes[number] += local.weights[name].numel()
    assert 4 * max(sizes) <= use["difference and update"] < 4.3 * max(sizes)
    assert use["weights at the difference"] == 4 * max(sizes)
    plain = call(every=4, outer="average")
    assert plain.memory_use()["outer momentum"] == 0
    assert plain.memory_use()["weights at the difference"] == 0
    assert "bytes per parameter: x 4, residual 4" in repr(plain)
    assert "outer momentum 4" in repr(local)


class Observed(EchoGroup):
    """One of four ranks, which counts the bytes of all tensors while messages are on their way."""

    def all_gather(self, tensor):
        out = super().all_gather(tensor)
        self.seen.append(held_bytes())
        return out


def held_bytes():
    """The bytes of all tensors that were made since `gc.freeze`."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def observed(recipe, **fields):
    """Bytes per parameter, beside model and optimiser: between exchanges, at the peak, and said."""
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(8)])
    entries = sum(p.numel() for p in model.parameters())
    optimizer = gradwire.optim.muon(model)
    group = Observed(4, on_stream=False)
    group.seen = []
    gc.collect()
    gc.freeze()
    try:
        local = gradwire.local_steps(
            model, optimizer, recipe=recipe, group=group, bundle_mb=0.06, **fields
        )
        group.seen.clear()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)
        for _ in range(local.every + local.overlap):
            local.step()
        local.exchange()
        use = local.memory_use()
        between = held_bytes()
    finally:
        gc.unfreeze()
    assert len(local.bundles) == 8
    return [n / entries for n in (between, max(group.seen))], {
        name: count / entries for name, count in use.items()
    }


ALWAYS = ("x", "outer momentum", "residual", "owned part")


@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ("muon", {}),
        ("muon", {"keep_unsent": False}),
        ("muon", {"overlap": 2}),
        ("muon", {"overlap": 2, "fragments": 4}),
        ("muon-wan", {}),
    ],
    ids=["muon", "lost ones", "overlap", "fragments", "wan"],
)
def test_the_peak_of_an_exchange_is_what_is_said(recipe, fields):
    """The differences of one bundle of eight, and no other copy of the model, but for overlap."""
    (between, peak), use = observed(recipe, **fields)
    assert between == pytest.approx(sum(use[name] for name in ALWAYS), abs=0.3)
    assert peak < sum(use.values()) + 0.3
    if not fields.get("overlap"):
        assert peak < 12 + 20 / 8


def test_an_owner_keeps_its_part():
    (between, _), use = observed("muon", exchange="owner")
    assert use["owned part"] == pytest.approx(5 / 4, abs=0.01)
    assert between == pytest.approx(12 + 5 / 4, abs=0.1)


def island(rank, kind):
    worker = Islander(kind, every=4, outer="nesterov")
    use = worker.local.memory_use()
    worker.close()
    return use["x"], use["outer momentum"]


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_rank_of_an_island_holds_its_part(ranks, kind):
    got = ranks.run(4, island, kind)
    entries = sum(p.numel() for p in sharded.Net().parameters())
    for first, second in (got[:2], got[2:]):
        assert first[0] + second[0] == first[1] + second[1] == 4 * entries


def test_the_log_says_it_at_the_start(caplog):
    with caplog.at_level("INFO", logger="gradwire"):
        call(every=4, outer="nesterov")
    assert "bytes per parameter: x 4, outer momentum 4, residual 4" in caplog.text
