"""Islands: FSDP2 or DDP inside, local steps between; each rank exchanges its part of the model."""

import runpy
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.optim import muon, muon_adamw
from tests.integrate.fsdp import models as sharded
from tests.integrate.island_models import Islander, Plain, tensor_parallel

KINDS = ["fsdp2", "ddp"]
WHOLE = {"method": "dense", "values": "fp32", "indices": "int32"}
SIGNS = {"method": "topk", "density": 0.5, "values": "sign", "indices": "auto"}


def alike(rank, kind, fields):
    """Both ranks of an island see the same data, so their mean gradient is a rank's, exactly."""
    worker = Islander(kind, seed=rank // 2, alike=True, **fields).train(7)
    whole, stats = worker.whole(), worker.local.stats()
    worker.close()
    return whole, stats.steps


def plain(rank, fields):
    return Plain(rank, None, **fields).train(7).whole()


@pytest.mark.parametrize(("kind", "kept"), [("fsdp2", False), ("ddp", True)])
def test_an_island_is_a_plain_rank(ranks, kind, kept):
    """Bit by bit, if everything is sent and the islands' gradients are a rank's."""
    fields = WHOLE | {"outer": "nesterov", "keep_unsent": kept}
    one, two = ranks.run(2, plain, fields)
    got = ranks.run(4, alike, kind, fields)
    assert [steps for _, steps in got] == [2] * 4
    assert [whole for whole, _ in got] == [one, one, two, two]


def compressed(rank, kind, fields):
    """Rounds of compressed exchanges: every term of the law, and what is equal to what."""
    worker = Islander(kind, seed=rank // 2, outer="average", **fields)
    rows = []
    for _ in range(3):
        worker.train(2)
        worker.inner()
        x, kept, moved = worker.x(), worker.residual(), worker.parts()
        start = x - kept if worker.local.keep_unsent else x
        worker.local.step()
        rows.append((start - moved, kept, x - worker.x(), worker.residual()))
    stats, inside = worker.local.stats(), worker.local.bytes_inside
    out = rows, worker.x(), worker.whole(), stats.asdict(), inside
    worker.close()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "fields",
    [SIGNS | {"keep_unsent": True}, SIGNS | {"method": "topk/owner"}, {"decay": 0.9}],
    ids=["kept", "owner", "decay"],
)
def test_nothing_is_lost_and_all_ranks_share_x(ranks, kind, fields):
    got = ranks.run(4, compressed, kind, fields)
    for one, other in (got[0::2], got[1::2]):
        assert torch.equal(one[1], other[1]), "x differs between islands"
        for (u0, k0, step0, left0), (u1, k1, step1, left1) in zip(one[0], other[0], strict=True):
            assert torch.equal(step0, step1)
            assert step0.count_nonzero() > 0
            total = (u0 + k0).double() + (u1 + k1).double()
            left = left0.double() + left1.double()
            if "decay" in fields:
                left /= fields["decay"]
            if "owner" not in str(fields.get("method")):
                torch.testing.assert_close(total, 2 * step0.double() + left, atol=3e-6, rtol=0)
    # The ranks of an island hold the same weights, and without keep_unsent all ranks do.
    assert got[0][2] == got[1][2]
    assert (got[0][2] == got[2][2]) is not fields.get("keep_unsent", False)
    for _, _, _, stats, inside in got:
        assert stats["world_size"] == 2
        assert 0 < stats["bytes_sent"] < stats["bytes_dense"] / 3
        assert inside > 0


def entries(rank, kind, differ):
    worker = Islander(kind, seed=rank // 2 if differ else 0, **WHOLE).train(3)
    stats, count = worker.local.stats(), sum(x.numel() for x in worker.local.reference.values())
    inside = worker.local.bytes_inside
    worker.close()
    return stats.bytes_sent, count, inside


@pytest.mark.parametrize(("kind", "differ"), [("fsdp2", False), ("ddp", False), ("ddp", True)])
def test_an_island_sends_every_entry_once(ranks, kind, differ):
    """n links carry 1/n each; DDP's copies meet again inside, in the weights' own dtype."""
    got = ranks.run(4, entries, kind, differ)
    count = sum(p.numel() for p in sharded.Net().parameters())
    for island in (got[:2], got[2:]):
        assert sum(n for _, n, _ in island) == count
        # A ring all-reduce of two ranks sends every entry of a bundle once, padding included.
        padding = 2 * 14 * 64
        assert count <= sum(sent for sent, _, _ in island) / 4 < count + padding
        longest = sum(-(-p.numel() // 2) for p in sharded.Net().parameters())
        # The stretches once at the beginning if islands differ then, once after the round, and 4
        # bytes that say whether a rank was finite.
        wanted = 4 + 4 * longest * ((kind == "ddp") + differ)
        assert [inside for _, _, inside in island] == [wanted] * 2


def spoiled(rank, kind):
    """One entry of one rank is infinite: every rank of every island goes back to x."""
    worker = Islander(kind, method="topk", values="fp32").train(3)
    before, kept = worker.x(), worker.residual()
    worker.train(2)
    worker.inner()
    moved = worker.parts()
    if rank in ((3,) if kind == "fsdp2" else (2, 3)):
        with torch.no_grad():
            worker.local.parts.held("last.bias")[-1:] = float("inf")
    worker.local.step()
    checks = [torch.equal(worker.parts(), before), torch.equal(worker.x(), before)]
    same = (worker.residual() - kept) - (before - moved)
    checks += [int(same.abs().gt(1e-6).sum()) <= 1, worker.local.stats().skipped == 1]
    # AdamW's moments are of steps that count no more, but the rounds go on.
    worker.train(3)
    checks += [not torch.equal(worker.x(), before), worker.local.stats().skipped == 1]
    worker.close()
    return checks, worker.x()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_not_finite_stops_the_round_for_all(ranks, kind):
    got = ranks.run(4, spoiled, kind)
    assert [checks for checks, _ in got] == [[True] * 6] * 4
    assert torch.equal(got[0][1], got[2][1])


def evaluated(rank, kind):
    """x inside `shared`, the own weights behind it, also in the unit that FSDP2 keeps gathered."""
    worker = Islander(kind, keep_unsent=True, **SIGNS).train(4)
    own, x = sharded.data(50, rank=0), worker.x()
    seen = []

    def output():
        with torch.no_grad():
            seen.append(worker.model(own).numpy().tobytes())

    before = worker.whole()
    output()
    with worker.local.shared():
        output()
        inside = torch.equal(worker.parts(), x)
    output()
    after = worker.whole() == before
    shared = worker.local.shared_weights()
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in shared.values()]
    shapes = [tuple(t.shape) for t in full] == [tuple(p.shape) for p in sharded.Net().parameters()]
    worker.train(2)
    worker.close()
    return seen, [inside, after, shapes], worker.whole()


def untouched(rank, kind):
    worker = Islander(kind, keep_unsent=True, **SIGNS).train(6)
    worker.close()
    return worker.whole()


@pytest.mark.parametrize("kind", KINDS)
def test_all_islands_evaluate_the_same_weights(ranks, kind):
    got = ranks.run(4, evaluated, kind)
    for seen, checks, _ in got:
        assert checks == [True] * 3
        assert seen[0] == seen[2] != seen[1] == got[0][0][1]
    assert got[0][0][0] != got[2][0][0]
    assert [whole for _, _, whole in got] == ranks.run(4, untouched, kind)


def mixed(rank):
    """bf16 inside, fp32 shards; and bf16 shards, whose x is fp32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    out = []
    for dtype in (torch.float32, torch.bfloat16):
        net = sharded.model(0, dtype=dtype)
        axes = sharded.mesh()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        net = sharded.sharded(net, axes["shard"], mp_policy=policy)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        local = gradwire.local_steps(
            net, optimizer, every=2, replicate_group=axes["replicate"], **SIGNS
        )
        for step in range(4):
            optimizer.zero_grad()
            sharded.loss(net, sharded.data(step, dtype=dtype)).backward()
            optimizer.step()
            local.step()
        kinds = {p.dtype for p in local.reference.values()} == {torch.float32}
        kinds &= {p.dtype for p in net.parameters()} == {dtype}
        out.append((sharded.flat(net).numpy().tobytes(), kinds))
        local.close()
        dist.barrier()
    return out


def test_mixed_precision(ranks):
    got = ranks.run(4, mixed)
    for place in range(2):
        assert got[0][place] == got[2][place]
        assert got[1][place] == got[3][place]
        assert got[0][place][1]


def muon_steps(rank, kind):
    """One step of Muon on whole matrices and on shards of them, with the same gradients."""
    net = Projections()
    start = [p.detach().clone() for p in net.parameters()]
    worker = Islander(kind, net=net, make=muon_of, alike=True, every=100)
    loss_of(worker.model, 0).backward()
    worker.optimizer.step()
    end = [(p.full_tensor() if kind == "fsdp2" else p).detach() for p in worker.weights()]
    worker.close()
    return start, end


def muon_of(model):
    return muon(model, lr=0.02)


def loss_of(model, step):
    return model(torch.randn(8, 13, generator=torch.Generator().manual_seed(step))).square().mean()


class Projections(sharded.Net):
    """A matrix for each way that Muon cuts weights, tall and wide, and a bias that nothing cuts."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__()
        self.qkv = torch.nn.Linear(22, 66)
        self.experts = torch.nn.Parameter(torch.randn(3, 22, 22) / 5)

    def forward(self, x):
        x = self.first(x)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + torch.einsum("bi,eij->bj", q * k, self.experts) + v
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def counted(rank, kind):
    """The matrices that this rank orthogonalises in a step."""
    real, seen = muon_adamw.orthogonalise, []
    muon_adamw.orthogonalise = lambda stack: seen.append(len(stack)) or real(stack)
    try:
        muon_steps(rank, kind)
    finally:
        muon_adamw.orthogonalise = real
    return sum(seen)


def test_the_ranks_of_an_island_share_muons_products(ranks):
    """Of three tensors of one shape one rank has two; a stack of experts is dealt as a whole."""
    (every, *_), cut = ranks.run(4, counted, "ddp"), ranks.run(4, counted, "fsdp2")
    assert cut[0] + cut[1] == cut[2] + cut[3] == every
    assert 0 < min(cut) <= max(cut) < every


def test_muon_on_shards_is_muon(ranks):
    whole = ranks.run(4, muon_steps, "ddp")
    cut = ranks.run(4, muon_steps, "fsdp2")
    for start, one, other in zip(whole[0][0], whole[0][1], cut[3][1], strict=True):
        moved = (one - start).norm()
        assert moved > 0
        assert (one - other).norm() <= 1e-2 * moved


def recipe_rounds(rank, kind):
    net = Projections()
    worker = Islander(kind, net=net, make=muon_of, recipe="muon", every=2, density=0.5)
    losses = []
    for step in range(12):
        worker.optimizer.zero_grad()
        loss = loss_of(worker.model, 4 * step + rank)
        loss.backward()
        worker.optimizer.step()
        worker.local.step()
        losses.append(float(loss.detach()))
    out = losses, worker.x(), worker.whole(), worker.local.stats().steps
    worker.close()
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipe_for_muon_runs_in_islands(ranks, kind):
    got = ranks.run(4, recipe_rounds, kind)
    for place in range(2):
        assert torch.equal(got[place][1], got[2 + place][1])
        assert got[2 * place][2] == got[2 * place + 1][2]
    for losses, _, _, steps in got:
        assert steps == 6
        assert sum(losses[-3:]) < 0.6 * sum(losses[:3])


def in_parts(rank, shape):
    """FSDP2 and tensor parallelism inside an island."""
    net, mesh = tensor_parallel(shape)
    optimizer = muon(net, lr=0.01)
    fields = {"every": 2, "dense_below": 0, "replicate_group": mesh["replicate"].get_group()}
    local = gradwire.local_steps(net, optimizer, **SIGNS, **fields)
    island = mesh["replicate"].get_local_rank()
    shard = mesh["shard"].get_local_rank()
    for step in range(6):
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(100 * step + 10 * island + shard)
        net(torch.randn(8, 14, generator=draw)).square().mean().backward()
        optimizer.step()
        local.step()
    with torch.no_grad():
        whole = [p.full_tensor().numpy().tobytes() for p in net.parameters()]
        own = {n: p.to_local().numpy().tobytes() for n, p in net.named_parameters()}
    out = whole, own, sorted(local.parts.whole), local.stats().residual_norm > 0
    local.close()
    return out


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)])
def test_tensor_parallelism_inside(ranks, shape):
    got = ranks.run(4, in_parts, shape)
    norms = ["norm.bias", "norm.weight"]
    for whole, _, alike, has_residual in got:
        assert whole == got[0][0], "ranks differ"
        assert alike == ["down.bias", *norms]
        assert has_residual
    # Ranks along the tensor parallel axis hold the same norms.
    if shape == (1, 2, 2):
        assert all(got[0][1][n] == got[1][1][n] for n in norms)


class Tied(torch.nn.Module):
    """The head is the table, in units of their own, and a parameter is frozen."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 14)
        self.body = torch.nn.Linear(14, 14)
        self.head = torch.nn.Linear(14, 20, bias=False)
        self.head.weight = self.table.weight
        self.body.bias.requires_grad_(False)

    def forward(self, tokens):
        return self.head(torch.relu(self.body(self.table(tokens))))


def tied(rank):
    from torch.distributed.fsdp import fully_shard

    mesh = sharded.mesh()
    torch.manual_seed(rank // 2)
    net = Tied()
    fully_shard(net.body, mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    fields = {"every": 2, "dense_below": 0, "replicate_group": mesh["replicate"]}
    local = gradwire.local_steps(net, optimizer, **SIGNS, **fields)
    for step in range(4):
        tokens = torch.randint(20, (8,), generator=torch.Generator().manual_seed(10 * step + rank))
        torch.nn.functional.cross_entropy(net(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
    with torch.no_grad():
        whole = [p.full_tensor().numpy().tobytes() for p in net.parameters()]
    out = sorted(local.reference), whole
    local.close()
    return out


def test_tied_and_frozen_parameters(ranks):
    got = ranks.run(4, tied)
    assert got[0][0] == ["body.weight", "table.weight"]
    assert all(whole == got[0][1] for _, whole in got)


EXAMPLE = Path(__file__).parents[2] / "examples" / "islands.py"


def example(rank):
    return runpy.run_path(str(EXAMPLE))["train"](steps=10)


def test_the_example_runs(ranks):
    """Two ranks in each of two islands: twice the factor of four ranks that gather from each."""
    assert min(ranks.run(4, example)) > 60


def two_sites(rank):
    script = runpy.run_path(str(EXAMPLE.with_name("two_sites.py")))
    script["train"].__globals__["connect"] = lambda sites, device: (2, 2)
    words = {"text": EXAMPLE, "recipe": "muon", "overlap": 2, "sites": 2}
    sizes = {"steps": 11, "say": 10, "batch": 2, "width": 32, "depth": 1}
    return script["train"](Namespace(**words, **sizes))


def test_the_example_of_two_sites_has_ddp_inside(ranks, capfd):
    losses = ranks.run(4, two_sites)
    assert all(1 < loss < 7 for loss in losses)
