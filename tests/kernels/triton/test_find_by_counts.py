"""find_by_counts in Triton: the thresholds of the reference, to the bit, with few reads."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire import kernels
from gradwire.kernels.find_by_counts import (
    Aim,
    find_by_counts_cpu,
    find_by_counts_torch,
)
from gradwire.kernels.triton import find_by_counts as module
from gradwire.kernels.triton.find_by_counts import find_by_counts_triton
from tests.compress.test_degenerate import INPUTS
from tests.distributions import MAKERS, draw
from tests.kernels.compare import agree

LADDERS = {
    "one": [1.0],
    "near": [2.0 ** (1 - i / 4) for i in range(19)] + [0.0],
    "too high": [1e30, 1e29],
    "zero": [0.0],
}
AIMS = (Aim(20, 40, 20, 40), Aim(24, 39, 30, 30), Aim(30, 10**9, 30, 30), Aim(1, 1, 1, 1))


def maxima_of(u, block, bits16=False):
    padded = torch.nn.functional.pad(u.float(), (0, -u.numel() % block))
    maxima = padded.abs().view(-1, block).amax(1)
    return (maxima.view(torch.int32) >> 15).to(torch.int16) if bits16 else maxima


def check(u, ladder, span, aim, halvings=25, blocks=(16, 64)):
    """With every kind of maxima, and without; on the CPU too, where there are only fp32 ones."""
    expected = find_by_counts_torch(u, ladder, span, aim, None, 0, halvings)
    if u.device.type == "cpu":
        for known in ((None, 0), *((maxima_of(u, block).to(u.dtype), block) for block in blocks)):
            found = find_by_counts_cpu(u, ladder, span, aim, *known, halvings)
            assert torch.equal(found, expected), (aim, known[1])
    u, ladder, span = (None if x is None else x.to(DEVICE) for x in (u, ladder, span))
    known = [(None, 0)] + [(maxima_of(u, b, bits), b) for b in blocks for bits in (False, True)]
    for maxima, block in known:
        agree(
            find_by_counts_torch, find_by_counts_triton, u, ladder, span, aim, maxima, block,
            halvings,
        )  # fmt: skip
    return expected


@pytest.mark.parametrize("kind", ["t3", "zeros"])
def test_every_ladder_and_aim(kind):
    u = draw(kind, 3_011)
    for ladder in LADDERS.values():
        for aim in AIMS:
            check(u, torch.tensor(ladder), None, aim, blocks=(64,))


@pytest.mark.parametrize("name", INPUTS)
def test_ties_and_extremes(name):
    u = INPUTS[name][:3001]
    start = 3.0 * float(u.double().square().mean().sqrt())
    check(u, start * torch.tensor(LADDERS["near"]), None, Aim(20, 40, 20, 40), blocks=(64,))
    span = torch.stack([u.abs().double().mean().float(), u.abs().max()])
    check(u, None, span, Aim(30, 30, 30, 30), blocks=(64,))


@pytest.mark.parametrize("halvings", [1, 3, 25, 30])
def test_a_span_is_halved(halvings):
    for kind in ("gaussian", "t3"):
        u = draw(kind, 4_000)
        span = torch.stack([u.abs().double().mean().float(), u.abs().max()])
        low, high = check(u, None, span, Aim(40, 40, 40, 40), halvings)
        assert low < high
        assert int((u.abs() > high).sum()) < 40 <= int((u.abs() > low).sum())


def test_other_dtypes_and_few_items(monkeypatch):
    monkeypatch.setattr(module, "SHARE", 64)
    monkeypatch.setattr(module, "LIMIT", 3)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        u = draw("laplace", 6_000).to(dtype)
        check(u, torch.tensor(LADDERS["near"]), None, AIMS[0])
        check(u, torch.tensor([1e-3]), None, AIMS[3], blocks=(64,))


@pytest.mark.parametrize("kind", MAKERS)
def test_only_the_blocks_of_the_largest_maxima_are_read(kind):
    """At most 40 entries may pass, so what lies outside of the 40 largest blocks goes unseen."""
    u = draw(kind, 6_400)
    maxima, ladder, aim = maxima_of(u, 64), torch.tensor(LADDERS["near"]), AIMS[0]
    hidden = u.view(-1, 64).clone()
    hidden[maxima.argsort(descending=True)[40:]] = 1e30
    expected = find_by_counts_torch(u, ladder, None, aim)
    for x in (u, hidden.flatten()):
        assert torch.equal(find_by_counts_cpu(x, ladder, None, aim, maxima, 64), expected)
        args = (t.to(DEVICE) for t in (x, ladder))
        found = find_by_counts_triton(*args, None, aim, maxima.to(DEVICE), 64)
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("method", ["gaussiank", "dgc", "trimmed", "mstopk"])
def test_methods_with_both(method, monkeypatch):
    from tests.compress.test_selectors import choose

    u = draw("t5", 9_600).to(DEVICE)
    expected = choose(method, u, 96)
    monkeypatch.setattr(kernels, "find_by_counts", find_by_counts_triton)
    found = choose(method, u, 96)
    assert torch.equal(found.indices, expected.indices)


@gpu
@pytest.mark.parametrize("kind", ["gaussian", "t3", "zeros", "uniform"])
def test_large_and_often(kind):
    u = draw(kind, 40_000_000).to(DEVICE)
    k = 40_000
    ladder = 3.3 * u.square().mean().sqrt() * torch.tensor(LADDERS["near"], device=DEVICE)
    aim = Aim(2 * k // 3, 4 * k // 3, 2 * k // 3, 4 * k // 3)
    expected = find_by_counts_torch(u, ladder, None, aim)
    for bits in (False, True):
        maxima = maxima_of(u, 64, bits)
        for _ in range(20):
            assert torch.equal(find_by_counts_triton(u, ladder, None, aim, maxima, 64), expected)
