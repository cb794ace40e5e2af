"""The law: mean of u = update + mean of the new residuals. First test of everything."""

import multiprocessing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.accumulate.schedule import entries
from gradwire.compress import METHODS
from gradwire.exchange import EXCHANGES
from gradwire.ranks.virtual import VirtualRanks
from tests.exchange.cases import allowed, options

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COMBINED = ("topk", "randk", "dense")
"""Methods that meet every exchange and value encoding."""
ALSO = [("allgather", "fp32"), ("allgather", "int4"), ("union", "fp32"), ("gtopk", "fp32")]
"""What the others meet: the exchanges that see how many entries were chosen."""
CASES = [
    (method, exchange, values)
    for method, exchange, values in allowed()
    if METHODS[method].exchange or method in COMBINED or (exchange, values) in ALSO
]


def gradients(kind, world, size, dtype, generator):
    """One flat gradient a worker: alike, independent, or of very different sizes."""
    shared = torch.randn(size, generator=generator)
    out = []
    for rank in range(world):
        own = torch.randn(size, generator=generator)
        g = {
            "independent": own,
            "correlated": 0.7 * shared + 0.3 * own,
            "identical": shared,
            "heavy": own / (0.05 + torch.rand(size, generator=generator)) ** 2,
            "layers": own * torch.logspace(-6, 3, size),
            "zeros": own * (torch.rand(size, generator=generator) < 0.1),
            "one worker": own * (rank == 0),
            "constant": torch.full((size,), 0.5),
        }[kind]
        out.append(g.to(dtype))
    return out


KINDS = [
    "independent",
    "correlated",
    "identical",
    "heavy",
    "layers",
    "zeros",
    "one worker",
    "constant",
]


def violation(u, update, residuals):
    """The largest error of the law, in roundings of the summands."""
    mean_u = torch.stack(u).double().mean(0)
    kept = torch.stack(residuals).double().mean(0)
    # A residual is larger than u where a sign made a large value of a small one.
    sizes = (torch.stack(tensors).double().abs().amax(0) for tensors in (u, residuals))
    size = torch.maximum(*sizes) + update.double().abs() + 1e-30
    return float(((mean_u - update.double() - kept).abs() / size).max()) / 2**-23


@pytest.mark.parametrize(("method", "exchange", "values"), CASES)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    world=st.sampled_from([1, 2, 3, 4, 5, 8]),
    size=st.integers(1, 700),
    density=st.sampled_from([0.001, 0.01, 0.1, 0.5, 1.0]),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    indices=st.sampled_from(["int32", "packed", "auto"]),
    seed=st.integers(0, 10**6),
)
def test_law(method, exchange, values, world, size, density, kind, dtype, indices, seed):
    generator = torch.Generator().manual_seed(seed)
    cluster = gradwire.VirtualCluster(
        world,
        method=method,
        exchange=exchange,
        values=values,
        indices=indices,
        density=density,
        options=options(exchange, size, entries(density, size)),
    )
    old = [torch.zeros(size) for _ in range(world)]
    for _ in range(3):
        g = gradients(kind, world, size, dtype, generator)
        update = cluster.average(g)
        new = [cluster.residual(rank) for rank in range(world)]
        assert update.dtype == dtype
        u = [a.float() + b for a, b in zip(g, old, strict=True)]
        assert violation(u, update, new) <= 4
        old = new


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_everything_chosen_is_the_dense_mean(exchange, world):
    generator = torch.Generator().manual_seed(world)
    g = gradients("independent", world, 333, torch.float32, generator)
    """Here the schedule sends it dense; by hand, see tests/exchange/test_every.py."""
    cluster = gradwire.VirtualCluster(world, exchange=exchange, density=1.0)
    update, kept = cluster.average(g), [cluster.residual(rank) for rank in range(world)]
    tolerance = 2**-7 if exchange == "dense-bf16" else 1e-6
    torch.testing.assert_close(update, torch.stack(g).mean(0), rtol=tolerance, atol=tolerance)
    assert all(float(k.abs().max()) <= (world * 2**-6 if tolerance > 1e-6 else 0) for k in kept)


@pytest.mark.parametrize(("method", "exchange", "values"), CASES)
def test_every_worker_computes_the_same_bits(method, exchange, values):
    cluster = gradwire.VirtualCluster(
        5,
        method=method,
        exchange=exchange,
        values=values,
        density=0.05,
        options=options(exchange, 997, 50),
    )
    generator = torch.Generator().manual_seed(0)
    cluster.average(gradients("heavy", 5, 997, torch.float32, generator))
    g = gradients("heavy", 5, 997, torch.float32, generator)

    def work(rank):
        state = cluster._states[rank]
        state.begin()
        return state.process(state.bundles[0], [g[rank]]).numpy().tobytes()

    assert len(set(cluster._ranks.run(work))) == 1


def test_what_was_sent_is_exactly_gone():
    cluster = gradwire.VirtualCluster(3, density=0.1)
    g = [torch.randn(500) for _ in range(3)]
    cluster.average(g)
    for rank in range(3):
        sent = gradwire.compress(g[rank], density=0.1)
        kept = cluster.residual(rank)
        assert torch.equal(kept[sent.indices.long()], torch.zeros(50))
        assert torch.equal(kept + sent.dense(), g[rank])


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_worker_that_is_not_finite_stops_the_step_everywhere(exchange, bad):
    cluster = gradwire.VirtualCluster(
        3, exchange=exchange, density=0.1, options=options(exchange, 300, 30)
    )
    first = [torch.randn(300) for _ in range(3)]
    sent = cluster.average(first)
    kept = [cluster.residual(rank) for rank in range(3)]
    second = [torch.randn(300) for _ in range(3)]
    second[1][7] = bad
    assert not torch.isfinite(cluster.average(second)).any()
    second[1][7] = 0  # the entry itself is dropped, everything else stays
    for rank in range(3):
        assert torch.equal(cluster.residual(rank), kept[rank] + second[rank])
    third = [torch.randn(300) for _ in range(3)]
    update = cluster.average(third)
    total = torch.stack([*first, *second, *third]).double().sum(0)
    new = sum(cluster.residual(rank).double() for rank in range(3))
    torch.testing.assert_close(3 * (sent + update).double() + new, total, rtol=0, atol=1e-5)
    assert cluster.stats().skipped == 1


def test_fp16_mean_that_overflows_is_a_step_that_does_not_happen():
    cluster = gradwire.VirtualCluster(2, density=0.5, method="topk/dense")
    small = torch.full((100,), 60000.0).half()
    for _ in range(2):
        update = cluster.average([small, small])
    assert not torch.isfinite(update).any()
    assert torch.isfinite(cluster.residual(0)).all()
    assert float(cluster.residual(0).max()) == 120000


def test_flush_and_skip_step():
    cluster = gradwire.VirtualCluster(2, density=0.1)
    first, second = ([torch.randn(200) for _ in range(2)] for _ in range(2))
    update = cluster.average(first)
    kept = [cluster.residual(r) for r in range(2)]
    cluster.skip_step()
    assert torch.equal(cluster.residual(0), first[0])
    cluster.flush()
    update = cluster.average(second)
    assert float(cluster.residual(0).norm()) == 0
    mean = torch.stack([a + b for a, b in zip(first, second, strict=True)]).mean(0)
    torch.testing.assert_close(update, mean)
    cluster.skip_step()
    assert torch.equal(cluster.residual(1), first[1] + second[1])
    assert not torch.equal(kept[0], first[0])


def test_a_shared_seed_sends_no_indices():
    shared = gradwire.VirtualCluster(4, method="randk", density=0.1)
    own = gradwire.VirtualCluster(4, method="randk", density=0.1, shared=False)
    g = [torch.randn(1000) for _ in range(4)]
    union = [int((c.average(g) != 0).sum()) for c in (shared, own)]
    assert shared.stats().bytes_sent == 3 * (32 + 4 * 100 + 0)
    assert own.stats().bytes_sent == 3 * (32 + 8 * 100)
    assert union[0] == 100
    assert union[1] > 300


def real(rank, method, exchange):
    import torch.distributed as dist

    state = gradwire.State(method=method, exchange=exchange, density=0.05, dense_below=0)
    out = b""
    for step in range(20):
        g = torch.randn(977, generator=torch.Generator().manual_seed(100 * step + rank))
        gradwire.average({"gradient": g}, state)
        out += g.numpy().tobytes()
    assert dist.get_world_size() == state.stats().world_size
    return out


@pytest.mark.parametrize("method", ["topk", "randk"])
def test_four_virtual_workers_equal_four_real_ranks_bit_for_bit(ranks, method):
    cluster = gradwire.VirtualCluster(4, method=method, exchange="allgather", density=0.05)
    out = b""
    for step in range(20):
        seeds = [torch.Generator().manual_seed(100 * step + rank) for rank in range(4)]
        out += cluster.average([torch.randn(977, generator=s) for s in seeds]).numpy().tobytes()
    assert set(ranks.run(4, real, method, "allgather")) == {out}


def test_virtual_workers_meet_several_times_in_order():
    ranks = VirtualRanks(3)

    def work(rank):
        group, seen = ranks.groups[rank], []
        for i in range(4):
            seen.append(group.all_gather(torch.tensor([10 * i + rank])).view(-1).tolist())
            seen.append(int(group.all_reduce(torch.tensor(i + rank))))
        return seen

    expected = [x for i in range(4) for x in ([10 * i, 10 * i + 1, 10 * i + 2], 3 * i + 3)]
    assert ranks.run(work) == [expected] * 3


def test_virtual_workers_have_the_threads_of_whoever_calls_them():
    ranks, before = VirtualRanks(2), torch.get_num_threads()
    try:
        for threads in (2, 1, 3):
            torch.set_num_threads(threads)
            assert ranks.run(lambda rank: torch.get_num_threads()) == [threads] * 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_virtual_workers_work_in_a_child_too():
    """A fork has no threads but its own, whatever the parent has kept."""
    ranks = VirtualRanks(2)
    assert ranks.run(lambda rank: rank) == [0, 1]
    child = multiprocessing.get_context("fork").Process(target=ranks.run, args=(abs,))
    child.start()
    child.join(20)
    hangs = child.is_alive()
    child.kill()
    assert not hangs
    assert child.exitcode == 0


def test_virtual_workers_survive_a_failure():
    cluster = gradwire.VirtualCluster(3, density=0.1)
    cluster.average([torch.ones(10)] * 3)
    with pytest.raises(ZeroDivisionError):
        cluster._ranks.run(lambda rank: 1 / (rank - 1))
    with pytest.raises(ZeroDivisionError):
        cluster._ranks.run(
            lambda r: cluster._ranks.groups[r].all_reduce(torch.ones(1)) / (r - 1 or 1 // 0)
        )
    cluster.average([torch.ones(10)] * 3)


def test_bad_input():
    with pytest.raises(ValueError, match="world_size must be a whole number of at least 1, got 0"):
        gradwire.VirtualCluster(0)
    cluster = gradwire.VirtualCluster(2, density=0.1)
    with pytest.raises(ValueError, match="one gradient a worker: 2, got 1"):
        cluster.average([torch.ones(4)])
    with pytest.raises(ValueError, match=r"gradient 1 has shape \(5,\), expected flat \(4,\)"):
        cluster.average([torch.ones(4), torch.ones(5)])
    with pytest.raises(ValueError, match=r"gradient 0 is torch.float64"):
        cluster.average([torch.ones(4).double()] * 2)
    cluster.average([torch.ones(4)] * 2)
    with pytest.raises(ValueError, match=r"rank must be in 0..1, got 2"):
        cluster.residual(2)


def test_bytes_decide_by_what_really_travels():
    """At density 0.3 four ranks send more than dense with indices, and less without them."""
    g = [torch.randn(1000) for _ in range(4)]
    for shared, dense in ((True, {}), (False, {"bytes": 1})):
        cluster = gradwire.VirtualCluster(4, method="randk", density=0.3, shared=shared)
        cluster.average(g)
        assert cluster.stats().dense == dense
