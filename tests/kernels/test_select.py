"""Exact top-k: the same indices as a stable sort, on every kind of data."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels import topk
from gradwire.kernels.select import block_maxima, topk_cpu, topk_torch


def sorted_topk(u, k):
    """The definition: largest first, ties to the smaller index, then ascending."""
    order = torch.sort(u.abs(), descending=True, stable=True).indices[:k]
    return order.sort().values.to(torch.int32)


def vector(kind, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, generator=generator)
    uniform = torch.rand(size, generator=generator)
    return {
        "gaussian": normal,
        "laplace": normal.sign() * -torch.log(uniform.clamp_min(1e-7)),
        "t3": normal / (0.1 + uniform) ** 2,
        "layers": normal * torch.logspace(-8, 4, size),
        "zeros": normal * (uniform < 0.1),
        "all zero": torch.zeros(size),
        "all equal": torch.full((size,), -1.5),
        "few values": (normal * 2).round(),
        "one hot": (torch.arange(size) == size // 2).float(),
        "denormal": normal * 1e-41,
        "ascending": torch.arange(size).float(),
        "descending": -torch.arange(size).float().flip(0),
        "a winner in every block": (torch.arange(size) % 16 == 3).float() * (1 + uniform),
        "a small layer": normal * torch.where(torch.arange(size) % 997 < 90, 100.0, 1.0),
        "all winners in one block": (torch.arange(size) < 40) * (2 + uniform) + 0.1 * uniform,
    }[kind]


KINDS = [
    "gaussian", "laplace", "t3", "layers", "zeros", "all zero", "all equal", "few values",
    "one hot", "denormal", "ascending", "descending", "a winner in every block",
    "a small layer", "all winners in one block",
]  # fmt: skip


@pytest.mark.parametrize("version", [topk_torch, topk_cpu])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(size=st.integers(1, 6000), share=st.sampled_from([0, 0.001, 0.004, 0.02, 0.1, 0.7, 1.0]))
def test_exact(version, kind, size, share):
    u = vector(kind, size)
    k = min(size, max(1, round(share * size)) if share else 0)
    assert torch.equal(version(u, k), sorted_topk(u, k))


@pytest.mark.parametrize("size", [1, 7, 63, 64, 65, 2**18 - 1, 2**18 + 65, 3 * 2**18 + 17])
def test_sizes_around_the_blocks(size):
    u = vector("gaussian", size)
    for k in {1, size // 1000, size // 100, size}:
        assert torch.equal(topk_cpu(u, k), sorted_topk(u, k))


def test_group_maxima_of_a_scan_are_used_and_agree():
    u = vector("t3", 64 * 1000)
    for block in (16, 64):
        maxima = u.abs().view(-1, block).amax(1)
        assert torch.equal(block_maxima(u, block), maxima)
        assert torch.equal(topk(u, 100, maxima, block), sorted_topk(u, 100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    u = vector("gaussian", 5000).to(dtype)
    for version in (topk_torch, topk_cpu):
        assert torch.equal(version(u, 17), sorted_topk(u, 17))
