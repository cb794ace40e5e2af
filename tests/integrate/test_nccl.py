"""The same on CUDA: NCCL ranks that share one GPU, virtual workers on it, and no host sync."""

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.compress import METHODS
from gradwire.workbench import models as networks
from tests.integrate import models
from tests.law.cases import violation
from tests.rank_pool import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def wrapped(**fields):
    torch.cuda.set_device(0)
    net = models.model(width=1500).cuda()
    ddp = DistributedDataParallel(net, device_ids=[0], bucket_cap_mb=1)
    fields = {"density": 0.001, "dense_below": 0, "bundle_mb": 0.036, **fields}
    return ddp, gradwire.attach(ddp, **fields)


def train(ddp, rank, steps, start=0, optimizer=None, scaler=None):
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss = ddp(models.data(rank, step).cuda()).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return optimizer


def steps(rank, count, fields):
    ddp, wire = wrapped(**fields)
    train(ddp, rank, count)
    stats = wire.stats()
    assert torch.isfinite(models.flat(ddp)).all()
    return models.flat(ddp).cpu().numpy().tobytes(), stats.asdict()


@pytest.mark.parametrize("fields", [{}, {"method": "randk"}, {"values": "bf16"}], ids=str)
def test_replicas_are_bit_equal_after_200_steps(nccl, fields):
    (first, stats), (second, _) = nccl.run(2, steps, 200, fields)
    assert first == second
    assert stats["bytes_sent"] < stats["bytes_dense"] / 100
    assert stats["residual_norm"] > 0


def test_gloo_ranks_with_cuda_tensors():
    pool = Ranks(2)
    try:
        (first, stats), (second, _) = pool.run(2, steps, 20, {})
    finally:
        pool.close()
    assert first == second
    assert stats["bytes_sent"] < stats["bytes_dense"] / 50


EVERY = ["union", "gtopk", "oktopk", "sketched", "gs-sgd", "owner", "hierarchical"]
EVERY += ["dense", "dense-bf16"]


@pytest.mark.parametrize("exchange", EVERY)
def test_every_exchange(nccl, exchange):
    fields = {"exchange": exchange}
    if exchange == "hierarchical":
        fields["local"] = 1
    if exchange == "gtopk":
        fields |= {"values": "int8", "indices": "packed"}
    (first, stats), (second, _) = nccl.run(2, steps, 30, fields)
    assert first == second
    assert stats["steps"] == 30


def real_size(rank, device, method, pixels):
    """Three steps of ResNet-50; what the replica is then."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(networks.build("resnet50").to(device))
    wire = gradwire.attach(ddp, method=method, density=0.001)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    torch.manual_seed(rank + 1)
    x = torch.randn(4, 3, pixels, pixels, device=device)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    assert len(wire.bundles) > 1
    return hashlib.sha256(models.flat(ddp).cpu().numpy().tobytes()).hexdigest()


@pytest.mark.timeout(150)
@pytest.mark.parametrize("method", ["dense", "topk", "dgc", "gaussiank"])
def test_a_network_of_real_size_on_four_ranks(method):
    """In its first gradient large entries lie together: a bundle takes the slower selection."""
    pool = Ranks(4, backend="nccl")
    try:
        assert len(set(pool.run(4, real_size, "cuda:0", method, 224))) == 1
    finally:
        pool.close()


def broken(rank, folder, resume):
    """20 steps, a checkpoint, 20 more; or the last 20 from the checkpoint, in a new model."""
    ddp, wire = wrapped(**({"bundle_mb": 25.0} if resume else {}))
    if resume:
        train(ddp, rank, 2, start=90)
        model, momentum = torch.load(f"{folder}/model{rank}.pt", weights_only=True)
        ddp.module.load_state_dict(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        optimizer.load_state_dict(momentum)
        gradwire.load(wire, folder)
    else:
        optimizer = train(ddp, rank, 20)
        torch.save([ddp.module.state_dict(), optimizer.state_dict()], f"{folder}/model{rank}.pt")
        gradwire.save(wire, folder)
    train(ddp, rank, 20, start=20, optimizer=optimizer)
    return models.flat(ddp).cpu().numpy().tobytes()


def test_resumed_is_bit_equal(nccl, tmp_path):
    whole = nccl.run(2, broken, str(tmp_path), False)
    assert nccl.run(2, broken, str(tmp_path), True) == whole
    assert len(set(whole)) == 1


def overflowing(rank):
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=3)
    ddp, wire = wrapped(scaler=scaler)
    weight = ddp.module.get_parameter("c.weight")
    calls = []

    def poison(gradient):
        calls.append(1)
        return gradient * (float("inf") if len(calls) == 5 and rank == 1 else 1.0)

    weight.register_hook(poison)
    train(ddp, rank, 10, scaler=scaler)
    finite = all(bool(torch.isfinite(wire.residual(n)).all()) for n in ("a.weight", "c.weight"))
    return models.flat(ddp).cpu().numpy().tobytes(), wire.stats().skipped, finite


def test_grad_scaler_on_the_device(nccl):
    results = nccl.run(2, overflowing)
    assert len({r[0] for r in results}) == 1
    for _, skipped, finite in results:
        assert skipped == 1
        assert finite


def without_sync(rank, fields):
    ddp, wire = wrapped(**fields)
    optimizer = train(ddp, rank, 5)
    batches = [models.data(rank, step).cuda() for step in range(5)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return wire.stats().steps


@pytest.mark.parametrize("exchange", ["allgather", *EVERY])
def test_no_host_sync_in_a_step(nccl, exchange):
    assert nccl.run(2, without_sync, {"exchange": exchange}) == [10, 10]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "topk"])
def test_no_host_sync_by_any_method(nccl, method):
    assert nccl.run(2, without_sync, {"method": method}) == [10, 10]


CODES = [
    ("bf16", "packed"),
    ("int4", "packed"),
    ("sign", "packed"),
    ("two-bit", "packed"),
    ("int8", "local16"),
    ("fp16", "bitmap"),
]


@pytest.mark.parametrize(("values", "indices"), CODES)
def test_no_host_sync_by_any_encoding(nccl, values, indices):
    fields = {"values": values, "indices": indices, "momentum": 0.9, "clip": 1.0}
    assert nccl.run(2, without_sync, fields) == [10, 10]


@pytest.mark.parametrize("method", METHODS)
def test_the_law_on_the_gpu(method):
    cluster = gradwire.VirtualCluster(3, method=method, density=0.01)
    old = [torch.zeros(20011)] * 3
    for step in range(3):
        seeds = [torch.Generator().manual_seed(10 * step + r) for r in range(3)]
        g = [torch.randn(20011, generator=seed) ** 3 for seed in seeds]
        update = cluster.average([x.cuda() for x in g]).cpu()
        new = [cluster.residual(rank).cpu() for rank in range(3)]
        u = [a + b for a, b in zip(g, old, strict=True)]
        assert violation(u, update, new) <= 4
        old = new


@pytest.mark.parametrize("method", ["topk", "randk", "dense"])
def test_virtual_workers_on_the_gpu_equal_those_on_the_cpu(method):
    clusters = [gradwire.VirtualCluster(4, method=method, density=0.01) for _ in range(2)]
    for step in range(4):
        g = [
            torch.randn(20011, generator=torch.Generator().manual_seed(10 * step + r))
            for r in range(4)
        ]
        on_cpu = clusters[0].average(g)
        on_gpu = clusters[1].average([x.cuda() for x in g])
        assert torch.equal(on_cpu, on_gpu.cpu())
    for rank in range(4):
        assert torch.equal(clusters[0].residual(rank), clusters[1].residual(rank).cpu())


@pytest.mark.parametrize("exchange", ["oktopk", "sketched", "gs-sgd", "hierarchical"])
def test_exchanges_on_the_gpu_equal_those_on_the_cpu(exchange):
    clusters = [gradwire.VirtualCluster(3, exchange=exchange, density=0.002) for _ in range(2)]
    for step in range(4):
        seeds = [torch.Generator().manual_seed(10 * step + r) for r in range(3)]
        g = [torch.randn(20011, generator=seed) ** 3 for seed in seeds]
        on_cpu = clusters[0].average(g)
        on_gpu = clusters[1].average([x.cuda() for x in g])
        # torch divides by the number of ranks in one rounding on the CPU, in two on CUDA.
        torch.testing.assert_close(on_cpu, on_gpu.cpu(), rtol=2**-22, atol=0)
    for rank in range(3):
        assert torch.equal(clusters[0].residual(rank), clusters[1].residual(rank).cpu())
    assert clusters[0].stats().dense == {}


def let_go(rank):
    """The groups that are known, after each of three wires is gone."""
    ddp, wire = wrapped()
    optimizer = train(ddp, rank, 2)
    counts = []
    for _ in range(3):
        wire.detach()
        train(ddp, rank, 2, 2, optimizer)
        counts.append(len(dist.distributed_c10d._world.pg_map))
        wire = gradwire.attach(ddp, density=0.001, dense_below=0)
        train(ddp, rank, 2, 4, optimizer)
    wire.close()
    return counts, models.flat(ddp).cpu().numpy().tobytes()


def test_a_communicator_is_used_again(nccl):
    (counts, first), (_, second) = nccl.run(2, let_go)
    assert counts == [2, 2, 2]
    assert first == second
