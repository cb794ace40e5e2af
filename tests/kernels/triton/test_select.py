"""topk in Triton: the reference's indices and values, on every kind of data, by either path."""

import math
from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_device import DEVICE, ON_GPU, gpu  # isort: skip
from gradwire.kernels.select import block_size, topk_torch
from gradwire.kernels.triton.scan import block_maxima
from gradwire.kernels.triton.select import entry as kernel
from gradwire.kernels.triton.select import sizes
from gradwire.kernels.triton.select.sizes import launch_sizes, processors
from gradwire.kernels.triton.select.turns import DIGITS, HEADER
from gradwire.kernels.triton.workspace import workspace
from tests.kernels.test_select import KINDS, vector


def run(u, k, block):
    """Indices and values, checked; the way they were found: by bins, with zeros, by digits."""
    u = u.to(DEVICE)
    maxima = block_maxima(u, block) if block else None
    words = workspace(0, u.device)[0]
    words[HEADER.value + 2] = -1
    indices, values = kernel.topk_triton(u, k, maxima, block)
    expected = topk_torch(u, k)
    assert indices.dtype == torch.int32
    assert torch.equal(indices, expected)
    assert torch.equal(values, u[expected.long()])
    clean = words[: DIGITS.value].clone()
    clean[HEADER.value : HEADER.value + 8] = 0
    assert not clean.any(), "the counters must be zero for the next call"
    return {1: "bins", 2: "zeros", 0: "digits", -1: "none"}[int(words[HEADER.value + 2])]


def took(way, expected):
    """Which way it is depends on the number of multiprocessors too: the interpreter has three."""
    assert ON_GPU or way == expected


CASES = [(1000, 1, 64), (5003, 5, 32), (20011, 100, 16), (9000, 1800, 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data(kind):
    cases = CASES if ON_GPU else [CASES[1 + KINDS.index(kind) % 3]]
    for size, k, block in cases:
        run(vector(kind, size), k, block)


@pytest.mark.parametrize(("size", "block"), [(1, 16), (7, 0), (64, 16), (65, 0), (65, 16)])
def test_small_sizes_and_every_k(size, block):
    for k in sorted({0, 1, size // 2, size}):
        run(vector("gaussian", size), k, block)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_maxima_of_a_ragged_vector(block):
    u = vector("t3", 4 * 4096 + 77).to(DEVICE)
    padded = torch.zeros(math.ceil(u.numel() / block) * block, device=DEVICE)
    padded[: u.numel()] = u.abs()
    assert torch.equal(block_maxima(u, block), padded.view(-1, block).amax(1))


def test_the_way_depends_on_the_data():
    took(run(vector("gaussian", 20000), 20, 32), "bins")
    took(run(vector("layers", 20000), 20, 32), "bins")
    took(run(vector("all equal", 20000), 20, 32), "digits")
    took(run(vector("zeros", 20000) * (torch.arange(20000) < 50), 20, 32), "zeros")
    took(run(torch.zeros(20000), 20, 32), "zeros")


def test_a_hot_stretch_spills_and_stays_on_the_fast_way():
    size, k, block = 40000, 400, 32
    u = vector("gaussian", size) * 1e-3
    u[4000:4900] = 1 + torch.arange(900).float().flip(0) * 1e-3
    assert launch_sizes(size, k, block, processors(DEVICE)).room < 900
    took(run(u, k, block), "bins")


def test_too_many_candidates_for_the_spill_lose_nothing():
    """Fewer hot blocks than k: the bound is a cold one, and every hot entry a candidate."""
    size, k, block = 40000, 400, 32
    u = vector("gaussian", size) * 1e-3
    u[3200:15200] = 1 + torch.rand(12000)
    cut = launch_sizes(size, k, block, processors(DEVICE))
    assert cut.items * cut.room + cut.spill < 12000 or ON_GPU
    took(run(u, k, block), "digits")


def test_an_unlucky_sample_is_noticed(monkeypatch):
    """A bound that fewer than k entries reach would lose some of them."""
    honest = launch_sizes(20000, 50, 32, processors(DEVICE))
    monkeypatch.setattr(kernel, "launch_sizes", lambda *_: replace(honest, rank=3, crowd=100))
    took(run(vector("gaussian", 20000), 50, 32), "digits")


def test_a_sample_stands_for_the_whole():
    """More blocks than the sample holds: the bound comes from a part of them."""
    size, k = 32 * 3 * 4096 + 5, 300
    took(run(vector("gaussian", size), k, 32), "bins")
    run(vector("layers", size), k, 32)


@pytest.fixture
def alone(monkeypatch):
    """Phase 0 in launches of its own, as for large vectors."""
    monkeypatch.setattr(sizes, "ALONE", 64)
    launch_sizes.cache_clear()
    yield
    launch_sizes.cache_clear()


@pytest.mark.parametrize("kind", ["gaussian", "layers", "all equal", "all zero", "zeros"])
def test_launches_of_their_own(kind, alone):
    cases = [(20011, 20, 64), (40000, 200, 32), (20000, 300, 16), (9001, 700, 0)]
    for size, k, block in cases if ON_GPU else cases[len(kind) % 2 :: 2]:
        assert launch_sizes(size, k, block or 1, processors(DEVICE)).begin == 1 or ON_GPU
        run(vector(kind, size), k, block)


def test_long_lists_are_read_in_rounds(alone):
    """Three lists of more than 256 candidates: not all eight fit side by side into a tile."""
    u = vector("gaussian", 200_000) * 1e-3
    for part in (0, 3, 6):
        u[16384 * part + 500 : 16384 * part + 720] = 1 + torch.rand(220)
    took(run(u, 1500, 16), "bins")


def test_a_wide_range_needs_wide_bins():
    """The k-th magnitude lies many powers of two above the bound."""
    u = vector("gaussian", 20000) * 1e-4
    u[:160] = vector("gaussian", 160)
    took(run(u, 60, 32), "bins")
    took(run(torch.where(u.abs() > 1e-2, u * 1e30, u), 60, 32), "digits")


def test_winners_that_the_sample_did_not_see():
    """Far above the largest of the sample, where no bin is.

    512 of 640 sectors of 8 maxima are looked at, and the fifth is the first of the others.
    """
    u = vector("gaussian", 32 * 8 * 640)
    u[32 * 8 * 4 : 32 * 8 * 4 + 32] *= 1e6
    assert run(u, 20, 32) == "digits"


def test_what_lies_after_the_last_entry_is_not_looked_at():
    for block, k in ((32, 5), (16, 100), (0, 1200)):
        room = torch.full((5103,), 1e9, device=DEVICE)
        room[:5003] = vector("gaussian", 5003)
        room[5002] = 5
        run(room[:5003], k, block)


def test_bf16():
    u = vector("gaussian", 5003).to(torch.bfloat16)
    run(u, 60, 16)
    run(u, 700, 0)


def test_scratch_stays_within_its_limit():
    for size in (6_553_600, 138_357_544):
        for density in (1e-4, 1e-3, 1e-2, 0.1):
            k = int(size * density)
            block = block_size(size, k, torch.device("cuda"))
            cut = launch_sizes(size, k, block or 1, 132)
            maxima = cut.n if block else 0
            assert cut.words + maxima <= size / 8 + 8 * k + 140 * 132


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [1e-4, 1e-3, 1e-2, 0.1])
def test_full_size(kind, density):
    size = 25_557_032
    u = vector(kind, size).to(DEVICE)
    k = int(size * density)
    block = block_size(size, k, DEVICE)
    first = kernel.topk_triton(u, k, block_maxima(u, block) if block else None, block)
    again = kernel.topk_triton(u, k)
    expected = topk_torch(u, k)
    assert torch.equal(first[0], expected)
    assert torch.equal(first[1], u[expected.long()])
    assert torch.equal(again[0], expected)


@gpu
def test_two_to_the_thirty_one():
    """The last entries of the longest bundle."""
    size, k = 2**31 - 1, 1000
    u = torch.zeros(size, device=DEVICE)
    u[-k // 2 :] = 1
    u[: k // 2] = 2
    indices, values = kernel.topk_triton(u, k)
    assert torch.equal(indices[: k // 2], torch.arange(k // 2, device=DEVICE).int())
    assert torch.equal(indices[k // 2 :].long(), torch.arange(size - k // 2, size, device=DEVICE))
    assert float(values.sum()) == 1.5 * k
