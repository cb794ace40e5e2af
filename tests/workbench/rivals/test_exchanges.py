"""The law or the declared forgetting of every rival, and its bytes by hand."""

import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.workbench.rivals import RIVALS
from gradwire.workbench.rivals.chunks import Chunks, Cosine, chunk_side
from gradwire.workbench.rivals.coded_exchange import CodedExchange
from gradwire.workbench.rivals.codes import ChunkBins, FourBitFloats, RowBins
from gradwire.workbench.rivals.demo import DemoExchange
from gradwire.workbench.rivals.every_round import muloco_outer
from gradwire.workbench.rivals.every_step import EXCHANGES
from gradwire.workbench.rivals.fragments import cut_into_fragments
from gradwire.workbench.rivals.powersgd import PowerSgdExchange
from gradwire.workbench.rivals.shared_masks import SharedMaskExchange

P = 3
SHAPES = [(128, 64), (96, 50), (64,), (6, 4)]
ENTRIES = 128 * 64 + 96 * 50 + 64 + 24
CPU = torch.device("cpu")
FP64 = {"dtype": torch.float64}


def vectors(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(P, ENTRIES, generator=generator, dtype=torch.float64) ** 3


def energy(*parts):
    return sum(float(part.square().sum()) for part in parts)


def close(one, other):
    return torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("subtract", [1.0, 0.2])
def test_demo_forgets_what_decay_takes_and_nothing_else(subtract):
    exchange = DemoExchange(
        P, SHAPES, CPU, keep=8, decay=0.9, subtract=subtract, mean="all", **FP64
    )
    lost = offered = 0.0
    for step in range(3):
        old, g = exchange.momentum.clone(), vectors(step)
        update = exchange.average(g, 0.5)
        forgotten = 0.1 * old
        whole = (0.5 * g + old).sum(0)
        assert close(whole, P * subtract * update + exchange.momentum.sum(0) + forgotten.sum(0))
        lost, offered = lost + energy(forgotten), offered + energy(0.9 * old + 0.5 * g)
    assert exchange.forgotten == pytest.approx(lost / offered, rel=1e-9)
    assert exchange.forgotten > 1e-3


def test_demo_means_over_the_workers_that_sent_a_coefficient():
    """A coefficient that only one worker sends arrives whole, or as a third."""
    ramp = torch.arange(64.0).view(1, 64)
    wave = torch.cos(torch.pi / 64 * (ramp + 0.5) * 5)
    given = torch.cat([wave, torch.zeros(2, 64)]).double()
    for mean, share in (("senders", 1), ("all", 1 / 3)):
        exchange = DemoExchange(P, [(64,)], CPU, keep=1, mean=mean, values="fp32", **FP64)
        # The others send a zero at some other place.
        assert torch.allclose(exchange.average(given, 1.0), share * given[0], atol=1e-5)


@pytest.mark.parametrize(
    ("code", "decay", "twice"),
    [
        (RowBins(2), 0.9, False),
        (RowBins(2), 0.9, True),
        (ChunkBins(8), 0.95, False),
        (FourBitFloats(), 0.0, False),
        (FourBitFloats(), 1.0, False),
    ],
)
def test_coded_differences_forget_what_they_declare(code, decay, twice):
    exchange = CodedExchange(P, SHAPES, CPU, code=code, decay=decay, twice=twice, **FP64)
    once = CodedExchange(P, SHAPES, CPU, code=code, decay=decay, **FP64)
    lost = offered = 0.0
    for step in range(3):
        old, g = exchange.residual.clone(), vectors(step)
        if not decay:
            old = torch.zeros_like(g)
        update, mean = exchange.average(g, 1.0), once.average(g, 1.0)
        new = exchange.residual if decay else torch.zeros_like(g)
        forgotten = (g + old).sum(0) - P * update - new.sum(0)
        u = g + decay * old
        if decay:
            # Of the residuals a share, and P times what the second rounding took.
            assert close(forgotten, (1 - decay) * old.sum(0) + P * (mean - update))
            lost += energy((1 - decay) * old) + P * energy(mean - update)
        else:
            arrived = torch.stack([code_of(code, row) for row in u])
            assert close(P * update, arrived.sum(0))
            lost += energy(u - arrived)
        offered += energy(u)
        assert twice == (energy(mean - update) > 0)
    assert exchange.forgotten == pytest.approx(lost / offered, rel=1e-9)
    assert (exchange.forgotten == 0) == (decay == 1)


def code_of(code, row):
    sizes = [s[0] * (s[1] if len(s) > 1 else 1) for s in SHAPES]
    parts = [
        code(part.view(1, *shape)).values[0]
        for part, shape in zip(row.split(sizes), SHAPES, strict=True)
    ]
    return torch.cat(parts)


def test_senders_divide_by_their_number():
    exchange = CodedExchange(P, [(4, 4)], CPU, code=ChunkBins(1), mean="senders", **FP64)
    given = torch.zeros(P, 16, dtype=torch.float64)
    given[0, 3], given[1, 3], given[2, 7] = 4.0, 2.0, 9.0
    update = exchange.average(given, 1.0)
    assert update[3] == 3
    assert update[7] == 9
    assert update.count_nonzero() == 2


def test_powersgd_forgets_nothing():
    exchange = PowerSgdExchange(P, SHAPES, CPU, rank=2, start=1, **FP64)
    for step in range(4):
        old, g = exchange.residual.clone(), vectors(step)
        update = exchange.average(g, 1.0)
        assert close((g + old).sum(0), P * update + exchange.residual.sum(0))
        assert (exchange.residual != 0).any() == (step > 0)
    assert exchange.forgotten == 0
    low = update[: 128 * 64].view(128, 64)
    assert torch.linalg.matrix_rank(low) == 2


def test_shared_masks_forget_the_rounding_of_the_mean():
    exchange = SharedMaskExchange(P, SHAPES, CPU, density=0.05, start=1, **FP64)
    lost = offered = 0.0
    for step in range(4):
        old, g, mask = exchange.residual.clone(), vectors(step), exchange.mask.clone()
        update = exchange.average(g, 1.0)
        rounding = (g + old).sum(0) - P * update - exchange.residual.sum(0)
        if step == 0:
            assert close(rounding, torch.zeros_like(rounding))
            continue
        # A mean of three may be exactly 0.
        assert set(update.nonzero().flatten().tolist()) <= set(mask.tolist())
        assert len(update.nonzero()) > 0.99 * len(mask)
        assert len(set(mask.tolist())) == sum(exchange.counts) == pytest.approx(ENTRIES / 20, abs=2)
        assert float(rounding.abs().max()) < P * 2**-8 * float(update.abs().max())
        lost, offered = lost + energy(rounding) / P, offered + energy(g + old)
    assert exchange.forgotten == pytest.approx(lost / offered, rel=1e-6)
    assert 0 < exchange.forgotten < 1e-4


def test_every_worker_chooses_the_largest_moments_of_its_part():
    exchange = SharedMaskExchange(2, [(8,)], CPU, density=0.25, start=1, **FP64)
    given = torch.tensor([[1.0, 9, 2, 3, 9, 9, 9, 9], [9.0, 1, 9, 9, 1, 2, 3, 8]]).double()
    exchange.average(given, 1.0)
    assert exchange.mask.tolist() == [1, 7]
    update = exchange.average(given, 1.0)
    assert update.nonzero().flatten().tolist() == [1, 7]


# --- what travels -------------------------------------------------------------------------------


def test_values_that_arrive_fit_into_their_bits():
    given = vectors(0)[:, : 128 * 64].view(P, 128, 64)
    for bits in (2, 4):
        rows = RowBins(bits)(given).values.view(P, 128, 64)
        for row in rows[0]:
            assert len(row.unique()) <= 2**bits
        assert torch.equal(rows, rows.bfloat16().double())
    coded = ChunkBins(16)(given)
    assert all(
        len(row[sent].unique()) <= 4 for row, sent in zip(coded.values, coded.sent, strict=False)
    )
    assert (coded.sent.view(P, 2, 64 * 64).sum(-1) == 16).all()
    assert not coded.values[~coded.sent].any()
    values = FourBitFloats()(given).values[0]
    powers = (values.abs() / values.abs().max()).unique()
    assert set(powers.tolist()) <= {0.0, *(2.0**-n for n in range(7))}


def test_the_nearest_of_the_four_bit_floats():
    floats = torch.tensor([0, 0.25, 0.5, 1, 2, 4, 8, 16]).double()
    given = torch.cat([torch.linspace(-16, 16, 1001).double(), floats])
    values = FourBitFloats()(given.view(1, -1)).values[0]
    nearest = (given.abs().unsqueeze(1) - floats).abs().min(1).values
    assert torch.allclose((values - given).abs(), nearest)
    assert not FourBitFloats()(torch.zeros(1, 5)).values.any()


def test_bytes_of_demo_by_hand():
    exchange = DemoExchange(P, SHAPES, CPU, keep=32, **FP64)
    # 2 chunks of 64 x 64, 2 of 48 x 50, one of 64, and 6 x 4 of which all 24 are sent.
    bits = 2 * 32 * (12 + 16) + 2 * 32 * (12 + 16) + 32 * (6 + 16) + 24 * (5 + 16)
    exchange.average(vectors(0), 1.0)
    assert exchange.bytes_sent == P * (P - 1) * (bits // 8)
    assert exchange.message * 8 == bits
    assert DemoExchange(P, SHAPES, CPU, keep=1, values="fp32").message == -(
        -(2 * 44 + 2 * 44 + 38 + 37) // 8
    )


def test_bytes_of_codes_by_hand():
    sent = {}
    for name, code, twice in (
        ("rows", RowBins(2), False),
        ("rows, two halves", RowBins(2), True),
        ("chunks", ChunkBins(64, 2), False),
        ("floats", FourBitFloats(), False),
    ):
        exchange = CodedExchange(P, SHAPES, CPU, code=code, twice=twice, **FP64)
        exchange.average(vectors(0), 1.0)
        sent[name] = exchange.bytes_sent
    matrices = 128 * 64 + 96 * 50 + 24
    rows = (2 * matrices + (128 + 96 + 6) * 4 * 16 + 64 * 32) // 8
    assert sent["rows"] == P * (P - 1) * rows
    assert sent["rows, two halves"] == (P - 1) * 2 * rows
    chunks = 2 * 64 * 14 + 2 * 64 * 14 + 64 * 8 + 24 * 7 + 4 * 4 * 32
    assert sent["chunks"] == P * (P - 1) * chunks // 8
    assert sent["floats"] == P * (P - 1) * (4 * ENTRIES + 4 * 32) // 8


def test_bytes_of_powersgd_and_shared_masks_by_hand():
    exchange = PowerSgdExchange(P, SHAPES, CPU, rank=2, start=1, **FP64)
    exchange.average(vectors(0), 1.0)
    assert exchange.bytes_sent == 2 * (P - 1) * 4 * ENTRIES
    exchange.average(vectors(1), 1.0)
    # 6 x 4 would take 20 of 24 entries.
    low = 2 * (128 + 64 + 96 + 50) + 64 + 24
    assert exchange.bytes_sent == 2 * (P - 1) * 4 * (ENTRIES + low)

    masks = SharedMaskExchange(2, [(8192,)], CPU, density=1 / 64, start=1)
    masks.average(torch.randn(2, 8192), 1.0)
    # 64 of 4096 places: 6 low bits each, and 64 + 64 + 1 high bits, in words of 32.
    places = 2 * (64 * 6 + 5 * 32) // 8
    assert masks.bytes_sent == 2 * 4 * 8192 + places
    masks.average(torch.randn(2, 8192), 1.0)
    assert masks.bytes_sent == 2 * 4 * 8192 + 2 * places + 2 * 2 * 128


@pytest.mark.parametrize("name", RIVALS)
def test_an_exchange_computes_on_its_device_alone_and_never_waits_for_it(name):
    """A tensor without numbers refuses both another device and every question for a number."""
    recipe = RIVALS[name]
    options = dict(recipe.rounds or recipe.gradients)
    for other in ("every", "outer", "fragments", "delay", "mixing", "clip"):
        options.pop(other, None)
    kind = EXCHANGES[options.pop("exchange")] if recipe.gradients else CodedExchange
    exchange = kind(P, SHAPES, torch.device("meta"), **options)
    for _ in range(12):
        update = exchange.average(torch.empty(P, ENTRIES, device="meta"), 0.1)
    assert update.device.type == "meta"
    assert update.shape == (ENTRIES,)
    assert exchange.bytes_sent > 0


# --- parts --------------------------------------------------------------------------------------


def test_chunks_are_squares_of_divisors_and_come_back():
    assert [chunk_side(n) for n in (1, 64, 96, 100, 128, 67)] == [1, 64, 48, 50, 64, 1]
    chunks, given = Chunks([*SHAPES, (2, 3, 64)]), torch.arange(2 * (ENTRIES + 384)).view(2, -1)
    cut = chunks.cut(given)
    assert {size: part.shape[1] for size, part in cut.items()} == {
        (64, 64): 2,
        (48, 50): 2,
        (1, 64): 1,
        (6, 4): 1,
        (2, 64): 3,
    }
    assert torch.equal(chunks.join(cut), given)
    matrix = given[0, 8192 : 8192 + 4800].view(96, 50)
    assert torch.equal(cut[48, 50][0, 1], matrix[48:])
    assert torch.equal(Chunks([(8, 8)], side=4).cut(given[:, :64])[4, 4][0, 1],
                       given[0, :64].view(8, 8)[:4, 4:])  # fmt: skip


def test_the_cosine_transform_keeps_energy_and_comes_back():
    given = vectors(0)[0, : 48 * 50].view(48, 50)
    transform = Cosine()
    coefficients = transform.forward(given)
    assert energy(coefficients) == pytest.approx(energy(given))
    assert close(transform.back(coefficients), given)
    assert float(transform.forward(torch.ones(4, 9).double())[0, 0]) == pytest.approx(6)


def test_fragments_take_blocks_in_turn():
    names = ["embed.weight", *(f"blocks.{i}.weight" for i in range(5)), "norm", "head.weight"]
    assert cut_into_fragments(names, 3) == [
        ["embed.weight", "blocks.0.weight", "blocks.3.weight"],
        ["blocks.1.weight", "blocks.4.weight"],
        ["blocks.2.weight", "norm", "head.weight"],
    ]
    assert cut_into_fragments(names, 1) == [names]
    with pytest.raises(ConfigError, match="6 fragments need as many blocks, this model has 5"):
        cut_into_fragments(names, 6)


def test_the_outer_step_of_muloco_goes_by_the_workers():
    assert [muloco_outer(p) for p in (1, 2, 4, 8, 16, 64)] == [
        (0.7, 0.6),
        (0.7, 0.6),
        (0.9, 0.8),
        (0.9, 0.8),
        (1.0, 0.9),
        (1.0, 0.9),
    ]


@pytest.mark.parametrize("kind", [DemoExchange, CodedExchange])
def test_an_unknown_mean_is_refused(kind):
    options = {"code": RowBins(2)} if kind is CodedExchange else {}
    with pytest.raises(ConfigError, match="'half'"):
        kind(P, SHAPES, CPU, mean="half", **options)
