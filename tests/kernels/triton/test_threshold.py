"""level in Triton: the reference's ranks to the bit, its rules up to the rounding of a mean."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
import gradwire
from gradwire import kernels
from gradwire.kernels.threshold import Rule, find_threshold_torch, first_threshold_torch
from gradwire.kernels.triton import threshold as module
from gradwire.kernels.triton.threshold import (
    MOST,
    TILE,
    find_threshold_triton,
    first_threshold_triton,
)
from tests.compress.test_degenerate import INPUTS, K
from tests.compress.test_selectors import EXACT, choose
from tests.kernels.compare import agree

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DATA = {
    "normal": lambda n: torch.randn(n).abs(),
    "wide": lambda n: torch.randn(n).mul(20).exp(),
    "ties": lambda n: torch.randint(0, 3, (n,)).float(),
    "zeros": torch.zeros,
    "denormal": lambda n: torch.randint(0, 50, (n,), dtype=torch.int32).view(torch.float32),
    "largest": lambda n: torch.full((n,), torch.finfo(torch.float32).max),
}


def threshold(*args, **more):
    """The threshold that both versions find."""
    return agree(find_threshold_torch, find_threshold_triton, *args, **more)[0]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("n", "every"), [(1, 1), (4096, 1), (5001, 1), (9000, 7)])
def test_ranks_are_those_of_the_reference(data, n, every):
    torch.manual_seed(n)
    values = DATA[data](n).to(DEVICE)
    seen = -(-n // every)
    most = torch.full((1,), float("inf")).to(DEVICE)
    for rank in (1, seen, seen + 1, seen // 3 + 1):
        threshold(Rule.LIST, most, 1, values, every, [rank])
    for size, ranks in ((0.0, (1, seen)), (1e38, (seen // 3 + 1, seen // 2 + 1))):
        u = torch.full((5,), size).to(DEVICE)
        threshold(Rule.NORMAL, u, 1, values, every, ranks, 9.0)


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
        found = threshold(rule, u, *rest, tolerance=1e-5, wide=1)
        sure = maxima[::every].sort(descending=True).values[ranks[0] - 1 :][:1]
        assert 0 <= found <= sure.sum()
        if sure.numel() and sure > 0:
            assert (u.abs() > found).any()


def test_the_smallest_of_a_list_and_the_largest_of_all_by_two_programs(monkeypatch):
    monkeypatch.setattr(module, "PARTS", 2)
    torch.manual_seed(5)
    listed = torch.rand(3 * TILE + 7).to(DEVICE) + 2
    maxima = torch.full((50,), 9.0).to(DEVICE)
    for place in (5, TILE + 1, -1):
        listed[place] = 1.5
        assert threshold(Rule.LIST, listed, 1, maxima, 1, [4]) == 1.5 - 2**-23
        listed[place] = 400
        found = threshold(Rule.HALVES, listed[9:90], 3, maxima, 1, [4], 1.0, listed)
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
    threshold(Rule.LIST, values + 1, 1, values, 1, [90])


@pytest.mark.parametrize("name", [*INPUTS, "bf16"])
def test_the_first_u_that_is_not_zero_gives_the_threshold_for_good(name):
    u = INPUTS[name].to(DEVICE) if name in INPUTS else torch.randn(40_011).bfloat16().to(DEVICE)
    kept = torch.zeros((), device=DEVICE)
    for vector in (torch.zeros_like(u), u, -3 * u, torch.full_like(u, float("nan"))):
        if kept > 0 or vector.isfinite().all():
            args = (kept, vector, 7, 0.125)
            agree(first_threshold_torch, first_threshold_triton, *args, tolerance=1e-6, wide=1)
            first_threshold_triton(*args)
    assert (kept > 0) == u[::7].any()


@gpu
@pytest.mark.parametrize("rule", [Rule.NORMAL, Rule.LADDER, Rule.HALVES])
def test_full_size(rule):
    u = torch.randn(138_357_504, device=DEVICE)
    maxima = u.abs().view(-1, 32).amax(1)
    ranks = (200, 240) if rule == Rule.NORMAL else (200,)
    args = (rule, u, 8443, maxima, 1103, ranks, 3.29, maxima)
    found = threshold(*args, tolerance=1e-4, wide=1)
    assert all(torch.equal(find_threshold_triton(*args), found) for _ in range(20))
