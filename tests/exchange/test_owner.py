"""Owner: bytes that do not grow with the ranks, and a rounding that only the owner keeps."""

import pytest
import torch

import gradwire
from gradwire.accumulate.owned import OWNED, part_length
from gradwire.encode import Encoding
from gradwire.encode.format import BLOCK, VALUES
from gradwire.errors import ConfigError
from gradwire.exchange import EXCHANGES
from tests.exchange.cases import Hand
from tests.law.cases import NOTHING, gradients, violation

OWNER = EXCHANGES["owner"]


@pytest.mark.parametrize("back", VALUES)
@pytest.mark.parametrize("values", ["sign", "two-bit", "int4", "int8", "fp32"])
def test_law_of_all_entries(values, back):
    """Ranks that do not divide the blocks, parts without an entry, parts that end in a block."""
    generator = torch.Generator().manual_seed(len(values + back))
    for world, size in ((1, 300), (2, 257), (3, 1000), (5, 255), (7, 4096), (8, 1)):
        hand = Hand("owner", world, "dense", values, back=back)
        old, before = [torch.zeros(size)] * world, NOTHING
        for _ in range(3):
            g = gradients("heavy", world, size, torch.float32, generator)
            u = [a + b for a, b in zip(g, old, strict=True)]
            out = hand.step(u, size)
            assert all(out.ok)
            assert len({x.numpy().tobytes() for x in out.updates}) == 1
            assert violation(u, out.updates[0], out.residuals, before, out.kept) <= 4
            old, before = out.residuals, out.kept
        exact = [name for name in (values, back) if name == "fp32"]
        if values in exact:
            assert all(float(kept.abs().max()) == 0 for kept in old)
        if back in exact:
            assert float(before.abs().max()) == 0
        elif size > 1 and world > 1:
            # Sums of signs of two sizes are more than one int4 can tell.
            assert float(before.abs().max()) > 0


def bits(ranks, d, k, encoding, **options):
    """Bits an entry of the vector that leave a rank, times P / (P - 1)."""
    return 8 * OWNER.bytes(ranks, d, k, encoding, **options) / (ranks - 1) * ranks / d


@pytest.mark.parametrize(
    ("share", "values", "back", "most"),
    [
        (1 / 2, "sign", "int4", 6.4),
        (1 / 6, "sign", "two-bit", 3.8),
        (1, "two-bit", "int4", 6.3),
        (1, "two-bit", "two-bit", 4.3),
    ],
)
def test_bits_of_both_halves_at_every_number_of_ranks(share, values, back, most):
    d = 11_010_048
    k = round(share * d)
    encoding = Encoding(values, "common" if share == 1 else "auto")
    each = [bits(ranks, d, k, encoding, back=back) for ranks in (2, 3, 4, 8, 16, 64)]
    assert max(each) <= most
    assert max(each) <= 1.01 * min(each)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_counted_bits_of_a_step(world):
    """Chosen in chunks, as local steps do: what was counted is what the formula says."""
    d = 60_000
    fields = {"method": "chunked", "exchange": "owner", "values": "sign", "indices": "auto"}
    cluster = gradwire.VirtualCluster(world, density=0.5, **fields)
    cluster.average([torch.randn(d) for _ in range(world)])
    stats = cluster.stats()
    assert 8 * stats.bytes_sent * world / (world - 1) / d < 6.4
    # All that was chosen was sent: the room of an eighth more is enough.
    assert stats.achieved_density == pytest.approx(0.5, abs=1e-3)
    assert stats.dense == {}


@pytest.mark.parametrize("world", [2, 3, 8])
def test_every_owner_has_its_share_of_every_layer(world):
    """Of layers of very different sizes the largest entries are all in one: none is cut."""
    d = 60_000
    cluster = gradwire.VirtualCluster(world, exchange="owner", density=0.25, values="sign")
    sizes = torch.repeat_interleave(torch.tensor([1e-3, 1.0, 1e-2, 1e-4]), d // 4)
    cluster.average([sizes * torch.randn(d) for _ in range(world)])
    assert cluster.stats().achieved_density == 0.25


@pytest.mark.parametrize("method", ["topk", "randk:shared"])
def test_what_does_not_fit_has_its_turn(method):
    """All entries lie in one part: two fifths of them fit, and all are sent in three steps."""
    size, world = 3 * BLOCK, 3
    u = torch.zeros(size)
    u[:100] = torch.arange(1.0, 101)
    hand = Hand("owner", world, method, back="fp32", room=1.2)
    if method != "topk":
        u[:] = 1.0
    sent, left = torch.zeros(size), [u.clone() for _ in range(world)]
    counts = []
    for _ in range(3):
        before = left[0].count_nonzero()
        out = hand.step(left, 100)
        assert violation(left, out.updates[0], out.residuals) <= 4
        sent, left = sent + out.updates[0], out.residuals
        counts.append(int(before - left[0].count_nonzero()))
    if method == "topk":
        assert counts == [40, 40, 20]
        assert torch.equal(sent, u)
    else:
        # Shared indices travel nowhere: all ranks have cut the same ones.
        assert all(torch.equal(x, left[0]) for x in left)
        assert all(60 < n <= 100 for n in counts)


def test_padding_is_no_entry():
    """A method that leaves out zeros sends ten entries in room for a hundred."""
    cluster = gradwire.VirtualCluster(3, method="dgc", exchange="owner", density=0.1, dense_below=0)
    g = [torch.zeros(1000) for _ in range(3)]
    for one in g:
        one[::100] = 1.0
    cluster.average(g)
    assert cluster.stats().achieved_density == 0.01


def test_the_next_mean_has_what_the_last_one_lost():
    """Without residuals: after n steps the updates are n means, less what is kept now."""
    world, size = 4, 3000
    hand = Hand("owner", world, "dense", back="sign")
    g = [torch.randn(size) for _ in range(world)]
    total = torch.zeros(size, dtype=torch.float64)
    for step in range(1, 20):
        out = hand.step(g, size)
        total += out.updates[0]
        mean = step * torch.stack(g).double().mean(0)
        torch.testing.assert_close(total + out.kept, mean, rtol=1e-4, atol=1e-4)
    assert float((total / 19 - mean / 19).norm() / (mean / 19).norm()) < 0.2


def test_an_owner_keeps_its_part_and_no_more():
    hand = Hand("owner", 3, "dense", "sign")
    hand.step([torch.randn(1000) for _ in range(3)], 1000)
    length = part_length(1000, 3)
    assert length == 512
    for memory in hand.memories:
        kept = {name: x for name, x in memory.items() if x.numel() > 1}
        assert kept.keys() == {OWNED}
        assert kept[OWNED].numel() == length
    # Four blocks are dealt out, the last one short. Behind them is nothing to keep.
    ends = [512 - 24, 256, 256]
    for rank, memory in enumerate(hand.memories):
        kept = memory[OWNED]
        assert kept[: ends[rank]].count_nonzero() > 50
        assert not kept[ends[rank] :].any()


@pytest.mark.parametrize("method", ["topk", "dense"])
def test_a_step_that_is_not_finite_keeps_what_was_kept(method):
    u = [torch.randn(900) for _ in range(3)]
    hand = Hand("owner", 3, method, "sign", "auto")
    kept = hand.step(u, 300).kept
    for broken in range(3):
        out = hand.step(u, 300, [rank != broken for rank in range(3)])
        assert not any(out.ok)
        assert all(bool(x.isnan().all()) for x in out.updates)
        assert torch.equal(out.kept, kept)
    assert all(hand.step(u, 300).ok)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"back": "int5"}, "unknown value encoding 'int5'. Did you mean 'int8'"),
        ({"room": 0.9}, "room must be at least 1"),
        ({"room": float("nan")}, "room must be at least 1"),
        ({"rounding": "stochastic", "values": "int4"}, "'owner' rounds to the nearest"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError, match=words):
        gradwire.VirtualCluster(2, exchange="owner", density=0.5, **options)
