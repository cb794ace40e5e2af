"""What the scan counts of the maxima, and the bound that comes of it."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, ON_GPU  # isort: skip
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.triton import momentum, scan
from gradwire.kernels.triton.select import sizes
from gradwire.kernels.triton.select.sizes import UNIT, launch_sizes, processors, units_per_count
from gradwire.kernels.triton.select.strategy import BY_BINS
from gradwire.kernels.triton.select.turns import BOUND, STRATEGY
from tests.kernels.triton.test_last_selection import Steps, Thresholds, cut, header

SIZE, BLOCK = 16 * UNIT, 32
HASH, WIDE = 0x9E3779B1, 2**32


def counted_units(size, apart):
    return [u for u in range(-(-size // UNIT)) if (u * HASH % WIDE) * apart // WIDE == 0]


def known(edge_value):
    """An edge that a selection has left."""
    edge = LastSelection(torch.device(DEVICE))
    edge.record[0] = int(torch.tensor(edge_value).view(torch.int32))
    edge.remember(edge.record, edge.record)
    return edge


def expected(u, edge_value, apart):
    """A count for each bin."""
    maxima = u.abs().view(-1, BLOCK).amax(1).cpu()
    units = torch.tensor(counted_units(u.numel(), apart))
    seen = maxima.view(-1, UNIT // BLOCK)[units].flatten().view(torch.int32) >> 15
    lowest = max(0, int(torch.tensor(edge_value).view(torch.int32) >> 15) - 640)
    bins = (seen - lowest).clamp(max=1023)
    return torch.bincount(bins[bins >= 0].long(), minlength=1024)


def counts_of(edge):
    return edge.counts[:1024].cpu().view(32, 32).t().flatten()


@pytest.fixture
def few(monkeypatch):
    """One in four units counts."""
    for module in (scan, momentum, sizes):
        monkeypatch.setattr(module, "units_per_count", lambda size: 4)
    launch_sizes.cache_clear()
    yield 4
    launch_sizes.cache_clear()


@pytest.mark.parametrize("edge_value", [2.5, 0.4, 20.0])
def test_the_scan_counts_around_the_last_edge(edge_value, few):
    """Also where most maxima lie above all bins, or below."""
    torch.manual_seed(1)
    u, edge = torch.zeros(SIZE, device=DEVICE), known(edge_value)
    maxima = torch.zeros(SIZE // BLOCK, device=DEVICE)
    scan.scan_triton(u, [(0, torch.randn(SIZE).to(DEVICE))], maxima, BLOCK, None, edge)
    assert 2 <= len(counted_units(SIZE, few)) <= 6
    assert torch.equal(counts_of(edge), expected(u, edge_value, few))


def test_momentum_counts_too(few):
    torch.manual_seed(2)
    u, velocity = torch.zeros(SIZE, device=DEVICE), torch.zeros(SIZE, device=DEVICE)
    maxima, edge = torch.zeros(SIZE // BLOCK, dtype=torch.int16, device=DEVICE), known(2.0)
    given = [(0, torch.randn(SIZE).to(DEVICE))]
    momentum.momentum_triton(u, velocity, given, maxima, BLOCK, 0.9, last_selection=edge)
    assert torch.equal(counts_of(edge), expected(u, 2.0, few))
    assert torch.equal(maxima, cut(u.abs().view(-1, BLOCK).amax(1)))


def test_nothing_is_counted_before_the_first_edge_nor_twice():
    edge = LastSelection(torch.device(DEVICE))
    assert edge.counts_to_fill() is None
    assert edge.take_counts() is None
    edge = known(1.0)
    edge.counts_to_fill()[5] = 7
    assert int(edge.counts_to_fill().sum()) == 0, "what no selection has read is gone"
    assert edge.take_counts() is edge.counts
    assert edge.take_counts() is None


def test_how_many_units_count():
    sizes = 1, 10**5, 6_553_600, 25_557_032, 138_357_544, 2**31 - 1
    assert [units_per_count(size) for size in sizes] == [1, 1, 8, 16, 64, 128]


@pytest.mark.parametrize(("k", "block"), [(400, 16), (100, 32), (100, 64)])
def test_the_bound_is_what_enough_of_those_counted_reach(k, block, few):
    torch.manual_seed(3)
    run = Steps(SIZE, k, block, maxima16=True)
    for step in range(3):
        run.step(torch.randn(SIZE))
        rank = launch_sizes(SIZE, k, block, processors(DEVICE)).counted
        units = torch.tensor(counted_units(SIZE, few))
        seen = run.maxima.cpu().view(-1, UNIT // block)[units].flatten().int() & 0xFFFF
        if step:
            assert header(BOUND) == int(seen.sort(descending=True).values[rank - 1]) << 15
        assert ON_GPU or header(STRATEGY) == BY_BINS.value


@pytest.mark.parametrize("scale", [1e-6, 0.1, 1.5, 3.0, 1e6])
def test_an_edge_that_moves_out_of_the_bins_costs_no_winner(scale):
    torch.manual_seed(4)
    run = Steps(3000, 20, 32, maxima16=True)
    for factor in (1.0, scale, scale, 1.0):
        run.mine.zero_()
        run.theirs.zero_()
        run.step(torch.randn(3000) * factor)
        assert ON_GPU or header(STRATEGY) == BY_BINS.value or scale != 1.5


def test_many_that_are_nearly_alike_are_candidates():
    """Seven times k within one code, as error feedback leaves them: no reason for the slower path.

    On a GPU so small a vector has parts without room for them.
    """
    u = torch.randn(20_000).clamp(-2, 2)
    u[::66] = 3 + 0.01 * torch.rand(304)
    run = Steps(20_000, 40, 32, maxima16=True)
    for gradient in (u, u * 0):
        run.step(gradient)
        assert ON_GPU or header(STRATEGY) == BY_BINS.value


def test_winners_that_lie_together_have_few_maxima():
    """Fewer of these than winners are near the last edge, which then is the bound, lowered."""
    torch.manual_seed(6)
    run = Steps(6000, 60, 32, maxima16=True)
    run.step(torch.randn(6000))
    run.mine.zero_()
    run.theirs.zero_()
    bound = run.edge.record[0].cpu().view(torch.float32) * 0.85
    gradient = 1e-3 * torch.randn(6000)
    gradient[640:800] = 9 + torch.rand(160)
    run.step(gradient)
    assert torch.tensor(header(BOUND), dtype=torch.int32).view(torch.float32) == bound


def test_a_threshold_within_the_code_of_a_maximum():
    run = Thresholds(3000, 20, 32, maxima16=True)
    gradient = torch.zeros(3000)
    gradient[1234] = 2.9001
    assert cut(gradient[1234]) == cut(torch.tensor(2.9))
    assert int(run.step(gradient, 2.9)[0]) == 1234
