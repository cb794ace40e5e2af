"""Sketches: what they find, on which data, and what is refused."""

import warnings

import numpy as np
import pytest
import torch

import gradwire
from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.exchange.gs_sgd import halving_mean
from gradwire.exchange.means import ordered_mean
from gradwire.exchange.sketch_size import SketchSize
from gradwire.exchange.sketched import find_largest, next_seeds
from gradwire.kernels import insert
from gradwire.ranks.virtual import VirtualRanks
from gradwire.types import Memory
from tests.exchange.cases import SKETCHES, Hand
from tests.law.cases import violation

K, SIZE = 1000, 1_000_000


def drawn(kind):
    generator = np.random.default_rng(0)
    if kind == "gaussian":
        return torch.from_numpy(generator.standard_normal(SIZE, np.float32))
    return torch.from_numpy(generator.standard_t(float(kind[1:]), SIZE).astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "candidates", "recall", "energy"),
    [
        ("gaussian", 5, 10_000, 4, 0.008, 0.29),
        ("gaussian", 5, 50_000, 4, 0.043, 0.45),
        ("t3", 3, 33_333, 4, 0.40, 0.78),
        ("t3", 5, 50_000, 4, 0.80, 0.98),
        ("t2.1", 5, 10_000, 1, 0.35, 0.86),
        ("t2.1", 5, 50_000, 1, 0.83, 0.99),
    ],
)
def test_recall_needs_heavy_tails(kind, rows, columns, candidates, recall, energy):
    """Of the true top k, and of their energy, when k of the candidates are taken exactly."""
    u = drawn(kind)
    seeds = next_seeds(Memory(), rows, u.device)
    found = find_largest(insert(u, columns, seeds), seeds, SIZE, candidates * K).long()
    true = gradwire.compress(u, k=K)
    share = len(set(found.tolist()) & set(true.indices.tolist())) / K
    taken = u[found].abs().sort(descending=True).values[:K]
    captured = float(taken.square().sum() / true.values.square().sum())
    assert share == pytest.approx(recall, abs=0.05)
    assert captured == pytest.approx(energy, abs=0.1)  # of t2.1 a few entries hold most


@pytest.mark.parametrize("exchange", SKETCHES)
def test_a_few_large_entries_of_the_sum_are_found(exchange):
    """Entries that no worker has among its largest, and all have a little of."""
    generator = torch.Generator().manual_seed(1)
    u = [torch.randn(4000, generator=generator) for _ in range(8)]
    where = torch.tensor([5, 777, 3999])
    for x in u:
        x[where] = 2.5
    out = Hand(exchange, 8, rows=5, columns=1000).step(u, 3)
    assert torch.equal(out.updates[0].nonzero().view(-1), where)
    torch.testing.assert_close(out.updates[0][where], torch.full((3,), 2.5))
    assert all(not kept[where].any() for kept in out.residuals)


def test_both_ways_of_adding_agree():
    u = [torch.randn(3000) ** 5 for _ in range(4)]
    a, b = (Hand(exchange, 4, columns=600).step(u, 20) for exchange in SKETCHES)
    torch.testing.assert_close(a.updates[0], b.updates[0])


def test_hashes_change_at_every_step_and_are_the_same_on_all_ranks():
    first, second = Memory(0), Memory(1)
    seen = [next_seeds(first, 5, torch.device("cpu")).tolist() for _ in range(3)]
    assert [next_seeds(second, 5, torch.device("cpu")).tolist() for _ in range(3)] == seen
    assert len({seed for step in seen for seed in step}) == 15


@pytest.mark.parametrize("mean", [ordered_mean, halving_mean])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 6, 7, 8])
def test_means(mean, dtype, world):
    """The same everywhere, near the true one, and what was given adds up to it."""
    ranks = VirtualRanks(world)
    for size in (1, 7, 100):
        values = [torch.randn(size) for _ in range(world)]
        values[0][0] = 3.4e38 if dtype == torch.bfloat16 else 1e30

        def work(rank, values=values):
            return mean(values[rank], dtype, ranks.groups[rank])

        means, given = zip(*ranks.run(work), strict=True)
        assert len({m.numpy().tobytes() for m in means}) == 1
        exact = torch.stack(values).double().mean(0)
        total = torch.stack(given).double().mean(0)
        near = 2**-22 * torch.stack(values).double().abs().amax(0)
        assert bool(((total - means[0].double()).abs() <= near).all())
        tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(means[0].double()[1:], exact[1:], rtol=0, atol=tolerance)


def test_an_ordered_mean_adds_in_the_order_of_ranks():
    """1 + 2^24 is 2^24 in fp32; in another order the 1 would be left."""
    ranks, values = VirtualRanks(3), [1.0, 2.0**24, -(2.0**24)]

    def work(rank):
        return ordered_mean(torch.tensor([values[rank]]), torch.float32, ranks.groups[rank])[0]

    assert [float(mean) for mean in ranks.run(work)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rows": 4}, "rows must be odd, for there is a median of them; got 4: use 5"),
        ({"rows": 0}, "rows must be odd"),
        ({"columns": -1}, "columns must be at least 1, or 0"),
        ({"ratio": 0.5}, "ratio must be at least 1"),
        ({"candidates": -1}, "candidates must be at least 1 .* or 0 for the number of ranks"),
        ({"rows": 4.5}, "option rows of sketched must be int, got 4.5"),
        ({"method": "randk"}, "'sketched' chooses the entries itself, .* not 'randk'"),
        ({"values": "int8"}, "'sketched' adds values on the way: fp32 or bf16, not 'int8'"),
    ],
)
def test_bad_input(more, message):
    with pytest.raises(ValueError, match=message):
        gradwire.VirtualCluster(2, exchange="sketched", density=0.01, **more).average(
            [torch.randn(1000)] * 2
        )


def test_a_table_below_four_columns_an_entry_is_used_and_warned_of():
    """u falls as i^-1.5: a table 200 times smaller holds nearly all of the energy."""
    u = torch.arange(1.0, 100_033) ** -1.5
    for columns, least in ((100, 0.99), (50, 0.97)):
        first, second = said(u, columns=columns)
        assert len(first) == 1
        assert not second
        share = float(first[0].partition("candidates hold ")[2].partition("%")[0])
        assert 100 >= share >= 100 * least
    kept = said(torch.randn(100_000), columns=399)[0][0]
    assert float(kept.partition("candidates hold ")[2].partition("%")[0]) < 40


@pytest.mark.filterwarnings("ignore:a sketch of 5 x 200")
def test_a_larger_k_of_a_later_step_is_looked_at_too():
    cluster = gradwire.VirtualCluster(
        2, exchange="gs-sgd", density=0.02, warmup=(0.004,), warmup_steps=1, columns=160
    )
    u = torch.randn(10_000) ** 9
    cluster.average([u] * 2)
    with pytest.warns(match="5 x 160 cells shows about .* of the 200 largest"):
        cluster.average([u] * 2)


@pytest.mark.filterwarnings("ignore:a sketch of")
@pytest.mark.parametrize("exchange", [*SKETCHES, "server"])
def test_as_many_candidates_as_ranks(exchange, monkeypatch):
    more = {"server": True} if exchange == "server" else {}
    name = "sketched" if more else exchange
    u = [torch.randn(2000) for _ in range(3)]
    out, same = (Hand(name, 3, candidates=n, **more).step(u, 7) for n in (0, 3))
    assert torch.equal(out.updates[0], same.updates[0])
    assert out.sent == same.sent < Hand(name, 3, **more).step(u, 7).sent


@pytest.mark.filterwarnings("ignore:a sketch of")
@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("values", ["fp32", "bf16"])
def test_a_server_does_what_the_ranks_do_together(world, values):
    """In fp32 the same bits; and of bf16 the same law."""
    more = {"values": values, "columns": 90}
    together, alone = Hand("sketched", world, **more), Hand("sketched", world, server=True, **more)
    left = [torch.randn(2000) ** 3 for _ in range(world)]
    for _ in range(3):
        a, b = together.step(left, 20), alone.step(left, 20)
        assert violation(left, b.updates[0], b.residuals) <= 4
        assert len({x.numpy().tobytes() for x in b.updates}) == 1
        if values == "fp32":
            assert torch.equal(a.updates[0], b.updates[0])
            assert all(map(torch.equal, a.residuals, b.residuals))
        left = [x + torch.randn(2000) for x in b.residuals]


def test_bytes_and_rounds_of_a_server():
    """Rank 0 sends most with many ranks, a worker with a large table."""
    for world, columns in ((2, 90), (8, 20)):
        hand = Hand("sketched", world, server=True, columns=columns)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = hand.step([torch.randn(2000) for _ in range(world)], 20)
        options = {"server": True, "columns": columns}
        sent = [group.bytes_sent for group in hand.ranks.groups]
        exchange = EXCHANGES["sketched"]
        assert max(sent) == exchange.bytes(world, 2000, 20, Encoding(), **options)
        assert (sent[0] > sent[1]) == (world == 8)
        assert out.rounds == exchange.rounds(world, **options) == 4 * (world - 1)


def test_a_rank_that_is_not_finite_stops_the_server():
    u = [torch.randn(500) for _ in range(3)]
    out = Hand("sketched", 3, server=True, columns=200).step(u, 5, [True, False, True])
    assert not any(out.ok)
    assert all(x.isnan().all() for x in out.updates)


@pytest.mark.parametrize(
    ("kind", "rows", "columns", "recall"),
    [
        ("gaussian", 5, 50_000, 0.05),
        ("t3", 5, 10_000, 0.22),
        ("t3", 3, 33_333, 0.42),
        ("t3", 5, 50_000, 0.81),
        ("t2.1", 5, 1_000, 0.07),
        ("t2.1", 5, 10_000, 0.52),
        ("t2.1", 5, 50_000, 0.99),
    ],
)
def test_what_a_table_shows_is_estimated(kind, rows, columns, recall):
    """Near the share of the largest that four candidates find: the figures of docs/exchanges.md."""
    shown, _ = SketchSize(rows, columns).estimate(drawn(kind), K)
    assert shown / K == pytest.approx(recall, abs=0.2)


@pytest.mark.parametrize("kind", ["t3", "t2.1"])
def test_the_size_that_is_estimated_shows_them(kind):
    _, columns = SketchSize(5, 4000).estimate(drawn(kind), K)
    assert SketchSize(5, columns).estimate(drawn(kind), K)[0] == K
    assert SketchSize(5, round(0.9 * columns)).estimate(drawn(kind), K)[0] < K


def test_an_estimate_of_vectors_without_noise():
    """Nothing but winners, fewer of them than k, none at all."""
    u = torch.zeros(1000)
    assert SketchSize(5, 100).estimate(u, 10) == (10, 40)
    u[:7] = 1e30
    assert SketchSize(5, 100).estimate(u, 10) == (10, 40)
    assert SketchSize(5, 100).estimate(u, 900)[1] == 1000


def said(u, **fields):
    """The warnings of the first step, and of the second."""
    cluster = gradwire.VirtualCluster(2, exchange="gs-sgd", density=0.001, **fields)
    steps = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            cluster.average([u] * 2)
        steps.append([str(w.message) for w in seen])
    return steps


def test_a_sketch_that_shows_next_to_nothing_is_warned_of_once():
    u = drawn("t3")[:100_000]
    first, second = said(u, columns=450)
    assert len(first) == 1, "one rank says it"
    assert "5 x 450 cells shows about 2 of the 100 largest of these 100032 entries, and" in first[0]
    assert not second
    columns = int(first[0].partition("use columns=")[2].partition(",")[0])
    assert first[0].endswith(f"a ratio of {100_032 / columns / 5:.3g}")
    assert said(u, columns=columns) == [[], []]
    assert said(u, columns=columns // 2) == [[], []], "a third is better than nothing"


def test_no_sketch_is_proposed_where_none_would_do():
    first, _ = said(drawn("gaussian")[:100_000])
    assert "0 of the 100 largest" in first[0]
    assert first[0].endswith("no smaller than they are: use exchange='oktopk'")
