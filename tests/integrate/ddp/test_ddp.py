"""attach on DistributedDataParallel: the law, identical replicas, and every way DDP is used."""

import torch

from tests.integrate import models


def law_and_replicas(rank, method, exchange, values, dtype, steps, more=None):
    """Largest error of the law over all entries and steps, parameters' bytes, stats."""
    import torch.distributed as dist

    fields = {"method": method, "exchange": exchange, "values": values} | (more or {})
    ddp, wire = models.wrapped(dtype=dtype, **fields)
    names = [n for n, _ in ddp.module.named_parameters()]
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    old = {n: torch.zeros(p.shape) for n, p in ddp.module.named_parameters()}
    local = models.model(dtype=dtype)
    worst = 0.0
    for step in range(steps):
        local.load_state_dict(ddp.module.state_dict())
        local.zero_grad()
        local(models.data(rank, step, dtype)).float().square().mean().backward()
        optimizer.zero_grad()
        ddp(models.data(rank, step, dtype)).float().square().mean().backward()
        for name in names:
            gradient = local.get_parameter(name).grad.float()
            new = wire.residual(name)
            update = ddp.module.get_parameter(name).grad.float()
            total = gradient + old[name] - new
            dist.all_reduce(total)
            error = (total / dist.get_world_size() - update).abs().max()
            worst = max(worst, float(error / (update.abs().max() + 1e-3)))
            old[name] = new
        optimizer.step()
    stats = wire.stats()
    wire.close()
    return worst, models.flat(ddp).numpy().tobytes(), stats.asdict()


def check(results, compressed=True):
    worst, params, stats = zip(*results, strict=True)
    assert max(worst) < 1e-5
    assert len(set(params)) == 1
    if compressed:
        assert all(0 < s["bytes_sent"] < s["bytes_dense"] for s in stats)


def test_law(ranks):
    for method in ("topk", "randk"):
        check(ranks.run(2, law_and_replicas, method, "allgather", "fp32", torch.float32, 5))
    check(ranks.run(4, law_and_replicas, "topk", "allgather", "bf16", torch.float32, 5))
    check(ranks.run(3, law_and_replicas, "topk", "dense", "fp32", torch.float32, 5), False)
    check(ranks.run(3, law_and_replicas, "dense", "dense", "fp32", torch.float32, 5), False)
    check(ranks.run(2, law_and_replicas, "topk", "allgather", "fp32", torch.bfloat16, 5))


def test_law_of_every_exchange(ranks):
    for world, exchange, more in (
        (3, "gtopk", {}),
        (3, "oktopk", {"refresh": 2}),
        (2, "sketched", {"rows": 1, "ratio": 4.0, "candidates": 2}),
        (3, "gs-sgd", {"rows": 1, "ratio": 4.0, "candidates": 2}),
        (4, "hierarchical", {"local": 2}),
    ):
        fields = {"density": 0.02, "bundle_mb": 25.0} | more
        run = (law_and_replicas, "topk", exchange, "fp32", torch.float32, 4, fields)
        check(ranks.run(world, *run))


def test_two_hundred_steps_at_one_in_a_thousand(ranks):
    results = ranks.run(2, long_run)
    assert len({parameters for parameters, _, _ in results}) == 1
    _, stats, finite = results[0]
    assert finite
    assert stats["steps"] == 200
    assert stats["achieved_density"] < 0.0012
    assert stats["bytes_sent"] < stats["bytes_dense"] / 100


def long_run(rank):
    net = models.model(width=300)
    ddp, wire = models.wrapped(net=net, density=0.001, bundle_mb=0.2)
    models.train(ddp, rank, 200, lr=0.01)
    stats = wire.stats()
    wire.close()
    parameters = models.flat(ddp)
    return parameters.numpy().tobytes(), stats.asdict(), bool(torch.isfinite(parameters).all())
