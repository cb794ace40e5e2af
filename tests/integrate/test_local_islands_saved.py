"""Checkpoints of islands: resumed bit by bit, and on other numbers of islands and of ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import gradwire
from gradwire.errors import StateError
from gradwire.optim import muon
from tests.integrate.fsdp import models as sharded
from tests.integrate.island_models import Islander, adamw, tensor_parallel

SIGNS = {"method": "topk", "density": 0.5, "values": "sign", "indices": "auto"}
KEPT = SIGNS | {"keep_unsent": True}


def muon_of(model):
    return muon(model, lr=0.01)


def pair(model):
    named = [p for _, p in model.named_parameters()]
    two = [torch.optim.AdamW(named[:3], lr=0.01), torch.optim.SGD(named[3:], 0.1, momentum=0.9)]
    return Both(two)


class Both(list):
    def step(self):
        for optimizer in self:
            optimizer.step()

    def zero_grad(self):
        for optimizer in self:
            optimizer.zero_grad()


MAKES = {"adamw": adamw, "muon": muon_of, "pair": pair}


def end_of(worker):
    out = worker.whole(), worker.x().numpy().tobytes(), worker.local.stats().bytes_sent
    worker.close()
    return out


def unbroken(rank, kind, make, steps, fields):
    return end_of(Islander(kind, make=MAKES[make], **fields).train(steps))


def broken(rank, kind, make, steps, stop, folder, how, fields):
    worker = Islander(kind, make=MAKES[make], **fields).train(stop)
    if how == "dcp":
        dcp.save({"local": worker.local}, checkpoint_id=folder)
    else:
        gradwire.save(worker.local, folder)
    worker.close()
    again = Islander(kind, seed=9, make=MAKES[make], **fields)
    if how == "dcp":
        again.train(stop)  # moments have to be there, as for any optimiser in such a folder
        dcp.load({"local": again.local}, checkpoint_id=folder)
    else:
        gradwire.load(again.local, folder)
    again.taken = stop
    return end_of(again.train(steps - stop))


@pytest.mark.parametrize(
    ("kind", "make", "stop", "how", "fields"),
    [
        ("ddp", "adamw", 4, "gradwire", KEPT),
        ("fsdp2", "adamw", 3, "dcp", KEPT),
        ("fsdp2", "muon", 5, "gradwire", SIGNS | {"method": "topk/owner"}),
        ("ddp", "pair", 4, "gradwire", {"outer": "average"}),
    ],
    ids=["ddp", "dcp", "muon", "two optimisers"],
)
def test_resumed_is_bit_equal(ranks, tmp_path, kind, make, stop, how, fields):
    whole = ranks.run(4, unbroken, kind, make, 8, fields)
    assert whole == ranks.run(4, broken, kind, make, 8, stop, str(tmp_path), how, fields)


def whole_of(local, tensors):
    cuts = local.cuts()
    return torch.cat(
        [cuts[n].wrap(t.float().clone()).full_tensor().reshape(-1) for n, t in tensors.items()]
    )


def everything(worker):
    """x, weights and residual of the whole model, as this rank's island has them."""
    local = worker.local
    residual = {name: local.residual(name) for name in local.reference}
    return [whole_of(local, tensors) for tensors in (local.reference, local.parts.read(), residual)]


def saved(rank, kind, islands, folder):
    worker = Islander(kind, islands, make=muon_of, **KEPT).train(4)
    gradwire.save(worker.local, folder)
    out = everything(worker)
    worker.close()
    return out


def loaded(rank, kind, islands, folder):
    worker = Islander(kind, islands, seed=5, make=muon_of, **KEPT)
    gradwire.load(worker.local, folder)
    worker.taken = 4
    out = everything(worker)
    worker.train(2)
    end = worker.x(), worker.whole(), worker.local.inner_steps
    moments = sum(len(state) for state in worker.optimizer.state.values())
    worker.close()
    return out, end, moments


@pytest.mark.parametrize(("kind", "old", "new"), [("fsdp2", 4, 2), ("fsdp2", 2, 1), ("ddp", 1, 2)])
def test_other_numbers_of_islands_and_ranks_start_from_the_mean(ranks, tmp_path, kind, old, new):
    """Four ranks each time: fewer islands have more ranks."""
    before = ranks.run(4, saved, kind, old, str(tmp_path))
    after = ranks.run(4, loaded, kind, new, str(tmp_path))
    for what in range(3):
        mean = sum(parts[what].double() for parts in before) / 4
        for parts, _, _ in after:
            torch.testing.assert_close(parts[what].double(), mean, atol=1e-6, rtol=1e-5)
    # Every rank of an island has its weights, and counterparts have the same part of x.
    size = 4 // new
    for rank, (_, (x, whole, steps), moments) in enumerate(after):
        assert steps == 6
        assert torch.equal(x, after[rank % size][1][0])
        assert whole == after[rank // size * size][1][1]
        assert moments == after[0][2] > 0


def refused(rank, kind, folder, changes):
    worker = Islander(kind, **SIGNS).train(4)
    gradwire.save(worker.local, folder)
    worker.close()
    return [attempt(kind, folder, change) for change in changes]


def attempt(kind, folder, change):
    fields = {"kept": {"keep_unsent": True}, "outer": {"outer": "average"}}.get(change, {})
    kind = {"ddp": "fsdp2", "fsdp2": "ddp"}[kind] if change == "kind" else kind
    make = muon_of if change == "optimiser" else adamw
    if change == "attach":
        mesh = sharded.mesh()
        net = sharded.sharded(sharded.model(), mesh["shard"])
        wire = gradwire.attach(net, replicate_group=mesh["replicate"], dense_below=0)
    else:
        wire = Islander(kind, make=make, **(SIGNS | fields)).local
    try:
        gradwire.load(wire, folder)
    except StateError as error:
        return str(error)
    finally:
        wire.close()
        dist.barrier()
    return "loaded"


def test_what_does_not_fit_is_refused(ranks, tmp_path):
    wanted = {
        "kind": "the state is of islands of 'fsdp2', these are of 'ddp'",
        "kept": "saved with keep_unsent=False, this is keep_unsent=True",
        "outer": "saved with outer momentum, here outer_momentum is 0",
        "optimiser": "AdamW",
        "attach": "this state is of local_steps",
        "": "loaded",
    }
    for said in ranks.run(4, refused, "fsdp2", str(tmp_path), list(wanted)):
        for words, text in zip(wanted.values(), said, strict=True):
            assert words in text
            assert "\n" not in text


def in_parts(shape, seed, steps, taken=0, folder="", load=False):
    """A model in FSDP2 and tensor parallelism; whole weights and x at the end."""
    net, mesh = tensor_parallel(shape, seed)
    optimizer = muon(net, lr=0.01)
    group = mesh["replicate"].get_group()
    local = gradwire.local_steps(
        net, optimizer, every=2, dense_below=0, replicate_group=group, **KEPT
    )
    if load:
        gradwire.load(local, folder)
    island, shard = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
    for step in range(taken, taken + steps):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(100 * step + 10 * island + shard)
        net(torch.randn(8, 14, generator=draw)).square().mean().backward()
        optimizer.step()
        local.step()
    if folder and not load:
        gradwire.save(local, folder)
    with torch.no_grad():
        whole = torch.cat([p.full_tensor().reshape(-1) for p in net.parameters()])
        x = torch.cat([x.full_tensor().reshape(-1) for x in local.shared_weights().values()])
    local.close()
    dist.barrier()
    return whole, x


def parts_whole(rank, shape, folder):
    return in_parts(shape, 0, 7), in_parts(shape, 0, 5, folder=folder)


def parts_loaded(rank, shape, folder, steps):
    return in_parts(shape, 3, steps, 5, folder, load=True)


def test_tensor_parallel_islands_resume(ranks, tmp_path):
    shape, other = (2, 1, 2), (1, 2, 2)
    before = ranks.run(4, parts_whole, shape, str(tmp_path))
    for (end, _), again in zip(
        before, ranks.run(4, parts_loaded, shape, str(tmp_path), 2), strict=True
    ):
        assert torch.equal(end[0], again[0])
        assert torch.equal(end[1], again[1])
    # The other shape has as many ranks along tensor parallelism, and other shards.
    mean = sum(saved[0].double() for _, saved in before) / 4
    for whole, x in ranks.run(4, parts_loaded, other, str(tmp_path), 0):
        torch.testing.assert_close(whole.double(), mean, atol=1e-6, rtol=1e-5)
        assert torch.equal(x, before[0][1][1])
