"""above in Triton: what passes a threshold, by each of the ways to find it."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_device import DEVICE, ON_GPU, gpu  # isort: skip
from gradwire.kernels.select import above_torch
from gradwire.kernels.triton.scan import block_maxima
from gradwire.kernels.triton.select import entry, sizes
from gradwire.kernels.triton.select.entry import above_triton
from gradwire.kernels.triton.select.sizes import launch_sizes
from gradwire.kernels.triton.select.turns import DIGITS, HEADER, STRATEGY
from gradwire.kernels.triton.workspace import workspace
from tests.kernels.compare import agree
from tests.kernels.test_select import KINDS, vector


def check(u, threshold, capacity, block):
    """As the reference has it, and the counters at rest; the way it was found."""
    u = u.to(DEVICE)
    threshold = torch.as_tensor(threshold, dtype=torch.float32).to(DEVICE)
    maxima = block_maxima(u, block) if block else None
    agree(above_torch, above_triton, u, threshold, capacity, maxima, block)
    words = workspace(0, u.device)[0]
    way = int(words[STRATEGY.value])
    clean = words[: DIGITS.value].clone()
    clean[HEADER.value : HEADER.value + 8] = 0
    assert not clean.any()
    return {1: "bins", 0: "digits"}[way]


def rank(u, r):
    """A threshold that r entries pass, if no ties are there."""
    return u.abs().sort(descending=True).values[r].item()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data(kind):
    u = vector(kind, 5003)
    for passing, capacity in ((30, 100), (100, 100), (300, 100)):
        check(u, rank(u, passing), capacity, 32)
    check(u, rank(u, 50), 1500, 0)


def test_the_way():
    u = vector("gaussian", 20000)
    assert check(u, rank(u, 15), 20, 32) == "bins"
    assert check(u, rank(u, 20), 20, 32) == "bins"
    assert check(u, rank(u, 500), 20, 32) == "bins"
    # The bound that room for 5000 gives is none, and so many candidates have no room: all of u.
    assert check(u, rank(u, 4000), 5000, 32) == "digits" or ON_GPU


def nan(bits):
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7F800001, -4194304, -1])
def test_nothing_passes_a_nan_whatever_its_bits(bits):
    u = vector("gaussian", 700).to(DEVICE)
    _, _, count = entry.above_triton(u, nan(bits).to(DEVICE), 20)
    assert int(count) == 0


@pytest.mark.parametrize("threshold", [float("nan"), float("inf"), -1.0, -0.0, 0.0, 1e-45])
def test_thresholds_that_pass_nothing_or_everything(threshold):
    few, zeros = torch.tensor([1.0, 0.0, -2.0, 1e-45]), vector("zeros", 700)
    for u, room in ((few, (0, 1, 3, 4, 9)), (zeros, (1, 700))):
        for capacity in room:
            check(u, threshold, capacity, 0)


def test_an_unlucky_sample_does_not_let_small_entries_in(monkeypatch):
    """Fewer than the room reach the bound: digits over all of u, and what passes of these."""
    u = vector("gaussian", 20000)
    honest = launch_sizes(20000, 50, 32, sizes.processors(DEVICE))
    monkeypatch.setattr(entry, "launch_sizes", lambda *_: replace(honest, rank=3, crowd=100))
    for passing in (30, 49, 51, 400):
        assert check(u, rank(u, passing), 50, 32) == "digits" or ON_GPU


def test_other_dtypes_do_not_round_the_threshold():
    u = vector("gaussian", 2000).to(torch.bfloat16)
    just = torch.nextafter(u[7].abs().float(), torch.tensor(0.0))
    assert 7 in above_triton(u.to(DEVICE), just.to(DEVICE), 2000)[0]
    check(u, just, 40, 0)


def test_launches_of_their_own(monkeypatch):
    monkeypatch.setattr(sizes, "ALONE", 64)
    launch_sizes.cache_clear()
    try:
        for kind in ("gaussian", "all equal", "layers"):
            u = vector(kind, 20011)
            for passing in (10, 40):
                check(u, rank(u, passing), 20, 64)
    finally:
        launch_sizes.cache_clear()


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_full_size(kind):
    u = vector(kind, 6_553_600 + 13).to(DEVICE)
    for size, k in ((u.numel(), 6554), (u.numel() - 13, 65_536)):
        part = u[:size]
        for passing in (k // 2, k, 3 * k):
            check(part, rank(part, passing), k, 32)
