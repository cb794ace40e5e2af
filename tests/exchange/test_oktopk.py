"""Ok-Topk: regions have owners, buffers have one size, thresholds are reused."""

import pytest
import torch

import gradwire
from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.exchange.oktopk import (
    _remembered,
    next_threshold,
    region_capacity,
    region_ends,
    split_by_region,
)
from gradwire.types import Sparse
from tests.exchange.cases import Hand


def chosen(u, k):
    return gradwire.compress(u, k=k)


@pytest.mark.parametrize("world", [2, 3, 5, 8, 16, 64])
def test_words_a_worker_sends(world):
    """At most 6 k (P - 1) / P words, indices counted, but for headers and the places of regions."""
    size, k = 1_000_000, 10_000
    sent = EXCHANGES["oktopk"].bytes(world, size, k, Encoding())
    fixed = 2 * (world - 1) * (32 + 16 + 8) + (world - 1) * 4 * world
    assert sent <= 4 * 6 * k * (world - 1) / world + fixed
    assert sent < EXCHANGES["allgather"].bytes(world, size, k, Encoding()) or world < 4


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_an_exact_step_is_the_largest_of_the_sum(world):
    """Against all-gather and an exact top-k of the sum, where no region is full."""
    generator = torch.Generator().manual_seed(world)
    u = [torch.randn(4000, generator=generator) for _ in range(world)]
    out = Hand("oktopk", world, refresh=1).step(u, 80)
    local = torch.stack([chosen(x, 80).dense() for x in u])
    exact = chosen(local.sum(0), 80).dense() / world
    torch.testing.assert_close(out.updates[0], exact)
    for mine, kept, whole in zip(local, out.residuals, u, strict=True):
        assert torch.equal(kept, torch.where((exact != 0) & (mine != 0), 0, whole))


def test_between_refreshes_the_threshold_is_reused():
    generator = torch.Generator().manual_seed(0)
    hand = Hand("oktopk", 4, refresh=4)
    counts, thresholds = [], []
    for step in range(8):
        u = [torch.randn(4000, generator=generator) * (4 if step == 2 else 1) for _ in range(4)]
        out = hand.step(u, 40)
        counts.append(int((out.updates[0] != 0).sum()))
        thresholds.append({float(m["oktopk.threshold"]) for m in hand.memories})
        assert len(thresholds[-1]) == 1, "every rank has the same"
    assert counts[0] == counts[4] == 40, "exact in every fourth step"
    assert counts[2] > 40, "four times larger entries pass the old threshold"
    (first,), (second,), (third,), (fourth,) = thresholds[:4]
    assert first == second
    assert third == pytest.approx(second * 1.012)
    assert fourth == third


def test_thresholds_move_as_the_authors_move_them():
    def next_one(count, exact=False):
        indices = torch.arange(20, dtype=torch.int32)
        indices[count:] = 99
        values = torch.arange(20, 0, -1).float() * (indices < 99)
        result = Sparse(indices, values, torch.tensor(count), 99)
        return float(next_threshold(result, 12, torch.tensor(3.0), torch.tensor(exact)))

    assert next_one(12) == next_one(8) == next_one(15) == 3
    assert next_one(7) == pytest.approx(3 / 1.012)
    assert next_one(16) == pytest.approx(3 * 1.012)
    assert next_one(4) == pytest.approx(3 / 1.012)
    assert next_one(3) == 0
    assert next_one(12, exact=True) == 9
    assert next_one(11, exact=True) == 0


def test_a_sudden_drop_makes_the_next_step_exact():
    hand = Hand("oktopk", 3, refresh=1000)
    counts = []
    for scale in (1, 0.01, 0.01, 0.01):
        out = hand.step([torch.randn(3000) * scale for _ in range(3)], 60)
        counts.append(int((out.updates[0] != 0).sum()))
    assert counts[:3] == [60, 0, 60]
    assert counts[3] > 30


def test_regions_follow_what_is_chosen():
    """All the large entries in a tenth of the vector: at first one owner is asked for all."""
    generator = torch.Generator().manual_seed(0)
    hand = Hand("oktopk", 4, refresh=1)
    delivered = []
    for _ in range(2):
        u = [torch.randn(4000, generator=generator) * 1e-3 for _ in range(4)]
        for x in u:
            x[:400] = torch.randn(400, generator=generator)
        delivered.append(int((hand.step(u, 80).updates[0] != 0).sum()))
    assert delivered == [region_capacity(4, 80), 80]
    ends = hand.memories[0]["oktopk.regions"].float().mean(0)
    torch.testing.assert_close(ends[:3], torch.tensor([100.0, 200, 300]), rtol=0.3, atol=0)


def test_what_does_not_fit_is_cut_by_magnitude():
    u = torch.zeros(1000)
    u[:40] = torch.randperm(40) + 1.0
    u[900:] = 0.5
    parts = split_by_region(chosen(u, 50), torch.tensor([250, 500, 750], dtype=torch.int32), 4, 20)
    assert [int(p.count) for p in parts] == [20, 0, 0, 10]
    assert sorted(parts[0].values.tolist()) == list(range(21, 41))
    assert parts[0].indices.tolist() == sorted(parts[0].indices.tolist())
    assert parts[3].indices.tolist() == [*range(900, 910), *[1000] * 10]
    assert all(bool((p.indices == 1000).all()) for p in parts[1:3])


def test_quantiles():
    sparse = chosen(torch.arange(100.0), 12)
    assert region_ends(sparse, 4).tolist() == [91, 94, 97, 100]
    nothing = Sparse(torch.full((3,), 9, dtype=torch.int32), torch.zeros(3), torch.tensor(0), 9)
    assert region_ends(nothing, 3).tolist() == [9, 9, 9]


def test_another_number_of_ranks_starts_from_equal_regions():
    hand = Hand("oktopk", 3)
    hand.step([torch.randn(300) for _ in range(3)], 9)
    edges, _, _ = _remembered(hand.memories[0], 4, 32, torch.zeros(300))
    assert edges.tolist() == [75, 150, 225]


def test_a_period_of_nothing():
    with pytest.raises(ValueError, match="refresh must be at least 1, got 0"):
        gradwire.Config(exchange="oktopk", options={"refresh": 0})
