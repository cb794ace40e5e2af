"""level in Triton: the reference's ranks to the bit, its rules up to the rounding of a mean."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
import gradwire
from gradwire import kernels
from gradwire.kernels.threshold import Rule, find_threshold_torch
from gradwire.kernels.triton import threshold as module
from gradwire.kernels.triton.select.turns import HEADER
from gradwire.kernels.triton.threshold import MOST, TILE, find_threshold_triton
from gradwire.kernels.triton.workspace import workspace
from tests.compress.test_degenerate import INPUTS, K
from tests.compress.test_selectors import EXACT, choose

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DATA = {
    "normal": lambda n: torch.randn(n).abs(),
    "wide": lambda n: torch.randn(n).mul(20).exp(),
    "ties": lambda n: torch.randint(0, 3, (n,)).float(),
    "zeros": torch.zeros,
    "denormal": lambda n: torch.randint(0, 50, (n,), dtype=torch.int32).view(torch.float32),
    "largest": lambda n: torch.full((n,), torch.finfo(torch.float32).max),
}


def both(*args):
    found, expected = (f(*args) for f in (find_threshold_triton, find_threshold_torch))
    at_rest = workspace(0, found.device)[0][: HEADER.value]
    assert not at_rest.any()
    assert found.shape == expected.shape == ()
    return found, expected


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("n", "every"), [(1, 1), (4096, 1), (5001, 1), (9000, 7)])
def test_ranks_are_those_of_the_reference(data, n, every):
    torch.manual_seed(n)
    values = DATA[data](n).to(DEVICE)
    seen = -(-n // every)
    most = torch.full((1,), float("inf")).to(DEVICE)
    for rank in (1, seen, seen + 1, seen // 3 + 1):
        found, expected = both(Rule.LIST, most, 1, values, every, [rank])
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), rank
    for size, ranks in ((0.0, (1, seen)), (1e38, (seen // 3 + 1, seen // 2 + 1))):
        u = torch.full((5,), size).to(DEVICE)
        found, expected = both(Rule.NORMAL, u, 1, values, every, ranks, 9.0)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), ranks


def one_hot(n):
    return torch.arange(n).eq(n // 7).float() * -2


SHAPES = {
    "gaussian": torch.randn,
    "heavy": lambda n: torch.randn(n) / torch.rand(n).square(),
    "layers": lambda n: torch.randn(n) * torch.linspace(-9, 9, n).exp(),
    "zeros": torch.zeros,
    "one hot": one_hot,
    "constant": lambda n: torch.full((n,), -0.1),
    "denormal": lambda n: torch.full((n,), 1e-42),
    "few": lambda n: torch.randn(n) * (torch.arange(n) % 999 == 5),
    "huge": lambda n: torch.randn(n) * 1e37,
    "bf16": lambda n: torch.randn(n).to(torch.bfloat16),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", [Rule.NORMAL, Rule.LADDER, Rule.HALVES])
def test_rules_are_those_of_the_reference(shape, rule):
    torch.manual_seed(3)
    n, block = 64 * 5003, 64
    u = SHAPES[shape](n).to(DEVICE)
    maxima = u.abs().float().view(-1, block).amax(1)
    for every, ranks in ((1, (40, 50)), (3, (30, 900)), (2, (2502, 2600))):
        counted = ranks if rule == Rule.NORMAL else ranks[:1]
        rest = (19, maxima, every, counted, 3.3, maxima)
        found = both(rule, u, *rest)[0]
        # In fp32 the reference's squares and sums may overflow, or vanish.
        expected = find_threshold_torch(rule, u.double(), *rest)
        sure = maxima[::every].sort(descending=True).values[ranks[0] - 1 :][:1]
        assert 0 <= found <= sure.sum()
        assert torch.isclose(found, expected, rtol=1e-5, atol=1e-44), (every, ranks)
        if sure.numel() and sure > 0:
            assert (u.abs() > found).any()


def test_the_smallest_of_a_list_and_the_largest_of_all_by_two_programs(monkeypatch):
    monkeypatch.setattr(module, "PARTS", 2)
    torch.manual_seed(5)
    listed = torch.rand(3 * TILE + 7).to(DEVICE) + 2
    maxima = torch.full((50,), 9.0).to(DEVICE)
    for place in (5, TILE + 1, -1):
        listed[place] = 1.5
        assert both(Rule.LIST, listed, 1, maxima, 1, [4])[0] == 1.5 - 2**-23
        listed[place] = 400
        found, expected = both(Rule.HALVES, listed[9:90], 3, maxima, 1, [4], 1.0, listed)
        assert found == expected
        listed[place] = 3
    assert 8.9 < found < 9


@pytest.mark.parametrize("method", EXACT)
def test_methods_find_what_topk_finds(method, monkeypatch):
    monkeypatch.setattr(kernels, "find_threshold", find_threshold_triton)
    inputs = {name: u.to(DEVICE) for name, u in INPUTS.items()}
    for name, u in inputs.items():
        expected = gradwire.compress(u, k=K)
        found = choose(method, u, K)
        assert torch.equal(found.indices, expected.indices[expected.values != 0]), name


def test_more_than_one_program_holds():
    values = torch.rand(MOST + 5).to(DEVICE)
    found, expected = both(Rule.LIST, values + 1, 1, values, 1, [90])
    assert torch.equal(found, expected)


@gpu
@pytest.mark.parametrize("rule", [Rule.NORMAL, Rule.LADDER, Rule.HALVES])
def test_full_size(rule):
    u = torch.randn(138_357_504, device=DEVICE)
    maxima = u.abs().view(-1, 32).amax(1)
    ranks = (200, 240) if rule == Rule.NORMAL else (200,)
    args = (rule, u, 8443, maxima, 1103, ranks, 3.29, maxima)
    found, expected = both(*args)
    assert torch.isclose(found, expected, rtol=1e-4)
    assert all(torch.equal(find_threshold_triton(*args), found) for _ in range(20))
