"""Every way in which DDP is used, on real Gloo ranks."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireError
from tests.integrate import models


def trained(rank, steps=6, ddp=None, **fields):
    module, wire = models.wrapped(ddp=ddp, **fields)
    models.train(module, rank, steps)
    stats = wire.stats()
    wire.close()
    return models.flat(module).numpy().tobytes(), stats.asdict()


def same(results):
    parameters, stats = zip(*results, strict=True)
    assert len(set(parameters)) == 1, "replicas differ"
    assert all(0 < s["bytes_sent"] < s["bytes_dense"] for s in stats), "nothing was compressed"
    return parameters[0], stats[0]


@pytest.mark.parametrize(
    "ways",
    [
        {"bucket_cap_mb": 25},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False, "bucket_cap_mb": 0.001},
    ],
    ids=lambda w: next(iter(w)),
)
def test_buckets_do_not_matter(ranks, ways):
    """Bundles are fixed when attaching: however DDP cuts its buckets, the bits are the same."""
    reference, _ = same(ranks.run(2, trained, 6))
    assert same(ranks.run(2, trained, 6, ways))[0] == reference


def accumulated(rank):
    ddp, wire = models.wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            last = micro == 2
            with contextlib.nullcontext() if last else ddp.no_sync():
                ddp(models.data(rank, 3 * step + micro)).square().mean().backward()
        optimizer.step()
    stats = wire.stats()
    wire.close()
    return models.flat(ddp).numpy().tobytes(), stats.asdict()


def test_no_sync_compresses_once_a_step(ranks):
    _, stats = same(ranks.run(2, accumulated))
    assert stats["steps"] == 4


class Forked(nn.Module):
    """Each rank may use another branch; nobody uses the last."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(31, 40) for _ in range(3)])
        self.head = nn.Linear(40, 5)

    def forward(self, x, branch):
        return self.head(self.branches[branch](x))


def forked(rank):
    torch.manual_seed(0)
    ddp, wire = models.wrapped(net=Forked(), ddp={"find_unused_parameters": True}, bundle_mb=1.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    grads = []
    for step in range(6):
        optimizer.zero_grad()
        # Step 0 trains every branch so that there is a residual to lose; later ones leave out 2.
        # Its residual is the largest by far, so it would be chosen if it were offered.
        branch, factor = (2, 100) if step == 0 else (rank, 1)
        (factor * ddp(models.data(rank, step), branch).square().mean()).backward()
        grads.append(ddp.module.branches[2].weight.grad is not None)
        if step == 0:
            kept = wire.residual("branches.2.weight")
        optimizer.step()
    after = wire.residual("branches.2.weight")
    wire.close()
    return models.flat(ddp).numpy().tobytes(), grads, torch.equal(kept, after), float(kept.norm())


def test_a_parameter_nobody_used_delivers_nothing(ranks):
    results = ranks.run(2, forked)
    assert len({r[0] for r in results}) == 1
    for _, grads, unchanged, norm in results:
        assert grads == [True] + [False] * 5
        assert norm > 0
        assert unchanged


def joined(rank, divide):
    ddp, wire = models.wrapped()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    try:
        with Join([ddp], divide_by_initial_world_size=divide):
            for step in range(3 + 2 * rank):
                optimizer.zero_grad()
                ddp(models.data(rank, step)).square().mean().backward()
                optimizer.step()
    except Exception as error:
        return str(error), None
    stats = wire.stats()
    wire.close()
    return models.flat(ddp).numpy().tobytes(), stats.asdict()


def test_join(ranks):
    _, stats = same(ranks.run(2, joined, True))
    assert stats["steps"] == 5


def test_join_that_shrinks_is_refused(ranks):
    messages = [m for m, _ in ranks.run(2, joined, False)]
    assert all("divide_by_initial_world_size=False" in m for m in messages)


def two_models(rank):
    first, a = models.wrapped(seed=1)
    second, b = models.wrapped(seed=2, method="randk", density=0.05)
    for step in range(4):
        for ddp in (first, second):
            ddp.zero_grad()
        loss = first(models.data(rank, step)).square().mean()
        (loss + second(models.data(rank, step)).square().mean()).backward()
        for ddp in (first, second):
            with torch.no_grad():
                for p in ddp.parameters():
                    p -= 0.1 * p.grad
    out = models.flat(first).numpy().tobytes() + models.flat(second).numpy().tobytes()
    steps = (a.stats().steps, b.stats().steps)
    a.close()
    b.close()
    return out, steps


def test_two_models_in_one_process(ranks):
    results = ranks.run(2, two_models)
    assert len({r[0] for r in results}) == 1
    assert results[0][1] == (4, 4)


def sub_group(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    net = models.model(seed=rank // 2)
    ddp = DistributedDataParallel(net, process_group=mine, bucket_cap_mb=0.01)
    wire = gradwire.attach(ddp, density=0.01, dense_below=0)
    models.train(ddp, rank, 4)
    stats = wire.stats()
    wire.close()
    return models.flat(ddp).numpy().tobytes(), stats.asdict()


def test_sub_group_is_the_data_parallel_group(ranks):
    results = ranks.run(4, sub_group)
    first, stats = same(results[:2])
    second, _ = same(results[2:])
    assert first != second
    assert stats["world_size"] == 2


def compiled(rank, outside):
    net = models.model(width=600)
    buckets = {"bucket_cap_mb": 1}
    if outside:
        ddp, wire = models.wrapped(net=net, ddp=buckets)
        run = torch.compile(ddp, backend="aot_eager")
    else:
        ddp, wire = models.wrapped(net=torch.compile(net, backend="aot_eager"), ddp=buckets)
        run = ddp
    models.train(run, rank, 4)
    names = sorted(wire.state_dict()["residual"])
    stats = wire.stats()
    wire.close()
    return models.flat(ddp).numpy().tobytes(), stats.asdict() | {"names": names}


@pytest.mark.parametrize("outside", [True, False])
def test_torch_compile(ranks, outside):
    _, stats = same(ranks.run(2, compiled, outside))
    assert stats["names"] == ["a.bias", "a.weight", "b.bias", "b.weight", "c.bias", "c.weight"]


def test_half_precision_parameters(ranks):
    for dtype in (torch.bfloat16, torch.float16):
        results = ranks.run(2, half, dtype)
        same(results)


def half(rank, dtype):
    ddp, wire = models.wrapped(dtype=dtype)
    models.train(ddp, rank, 4, dtype=dtype)
    stats = wire.stats()
    assert wire.residual("a.weight").dtype == torch.float32
    wire.close()
    return models.flat(ddp).numpy().tobytes(), stats.asdict()


def channels_last(rank):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    net = net.to(memory_format=torch.channels_last)
    ddp, wire = models.wrapped(net=net, density=0.02)
    before = torch.clone(ddp.module[0].weight.detach())
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    ddp(x.to(memory_format=torch.channels_last)).square().mean().backward()
    update = ddp.module[0].weight.grad
    local = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    local.load_state_dict(ddp.module.state_dict())
    local(x).square().mean().backward()
    total = local[0].weight.grad - wire.residual("0.weight")
    dist.all_reduce(total)
    wire.close()
    return float((total / 2 - update).abs().max()), before.shape


def test_channels_last_residual_in_the_parameters_shape(ranks):
    for error, _ in ranks.run(2, channels_last):
        assert error < 1e-6


def by_hand(rank):
    state = gradwire.State(density=0.01, dense_below=0)
    ddp = DistributedDataParallel(models.model(), bucket_cap_mb=0.01)
    ddp.register_comm_hook(state, gradwire.ddp_hook)
    models.train(ddp, rank, 4)
    stats = state.stats()
    state.close()
    return models.flat(ddp).numpy().tobytes(), stats.asdict()


def test_state_and_hook_by_hand(ranks):
    same(ranks.run(2, by_hand))


def by_hand_forked(rank, branches):
    """What is said of steps that use these branches, and the step in which."""
    torch.manual_seed(0)
    state = gradwire.State(density=0.05, dense_below=0)
    ddp = DistributedDataParallel(Forked(), bucket_cap_mb=0.01, find_unused_parameters=True)
    ddp.register_comm_hook(state, gradwire.ddp_hook)
    for step, used in enumerate(branches):
        ddp.zero_grad()
        x = models.data(rank, step)
        try:
            with ddp.no_sync():
                for branch in used[1:]:
                    ddp(x, branch).square().mean().backward()
            ddp(x, used[0]).square().mean().backward()
        except RuntimeError as error:
            return step, str(error)
    state.close()
    return len(branches), ""


def test_by_hand_a_parameter_without_a_gradient_is_an_error_and_no_loss(ranks):
    every = (0, 1, 2)
    for step, said in ranks.run(2, by_hand_forked, [every, every, (0, 1), every]):
        assert step == 2
        assert "'branches.2." in said or "'p" in said
        assert "use gradwire.attach(ddp, ...), which keeps it" in said
    assert ranks.run(2, by_hand_forked, [every] * 4) == [(4, "")] * 2


def by_hand_one_without(rank):
    every, few = (0, 1, 2), (0, 1)
    return by_hand_forked(rank, [every, every, few if rank else every, every])


def test_by_hand_a_rank_that_lacks_a_gradient_ends_the_others_too(ranks):
    (_, other), (step, said) = ranks.run(2, by_hand_one_without)
    assert step == 2
    assert "got no gradient" in said
    assert "rank 0, step 3" in other


def own_loop(rank):
    net = models.model()
    state = gradwire.State(density=0.01, dense_below=0)
    for step in range(4):
        net.zero_grad()
        net(models.data(rank, step)).square().mean().backward()
        gradwire.average({n: p.grad for n, p in net.named_parameters()}, state)
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
    return models.flat(net).numpy().tobytes(), state.stats().asdict()


def test_average_in_an_own_loop(ranks):
    same(ranks.run(2, own_loop))


class Odd(nn.Module):
    """Two dtypes, a tied weight, a frozen one, one that DDP is told to ignore."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(31, 64)
        self.low = nn.Linear(64, 64).to(torch.bfloat16)
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.again = nn.Linear(64, 64, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.private = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        x = self.low(torch.relu(self.first(x)).bfloat16()).float()
        return self.private(self.frozen(self.again(torch.relu(self.tied(x)))))


def odd(rank):
    torch.manual_seed(0)
    net = Odd()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["private.weight"])
    ddp, wire = models.wrapped(net=net)
    models.train(ddp, rank, 4)
    names = sorted(wire.state_dict()["residual"])
    stats = wire.stats()
    wire.close()
    shared = torch.cat(
        [p.detach().float().view(-1) for n, p in net.named_parameters() if "private" not in n]
    )
    return shared.numpy().tobytes(), stats.asdict() | {"names": names}


def test_odd_models(ranks):
    _, stats = same(ranks.run(2, odd))
    assert stats["names"] == [
        "first.bias", "first.weight", "low.bias", "low.weight", "tied.weight",
    ]  # fmt: skip
    assert stats["bundles"] >= 2


def refused(given, state):
    try:
        gradwire.average(given, state)
    except GradwireError as error:
        return str(error)
    return "nothing"


def other_gradients(rank):
    state = gradwire.State(density=0.1, dense_below=0, bundle_mb=1)
    said = [refused({"w": torch.randn(50), "b": None}, state)]
    gradwire.average({"w": torch.randn(50)}, state)
    said.append(refused({"w": torch.randn(50).bfloat16()}, state))
    if rank == 1:
        state.flush()
    return [*said, refused({"w": torch.randn(50)}, state)]


def test_average_names_what_is_wrong_with_gradients(ranks):
    for said in ranks.run(2, other_gradients):
        assert said[0].startswith("average needs a tensor for every name, got None for b")
        assert said[1] == "w is torch.bfloat16, before torch.float32"
        assert "rank 1 has flush 1" in said[2]
        assert "All ranks must run the same steps and call save, load" in said[2]
