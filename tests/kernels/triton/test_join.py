"""join and mean in Triton: the reference's bits."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire.kernels.join import join_torch
from gradwire.kernels.mean import mean_torch
from gradwire.kernels.triton import join as module
from gradwire.kernels.triton.join import join_triton
from gradwire.kernels.triton.mean import mean_triton
from tests.kernels.compare import agree


def lists(ranks, k, size, padding=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(size, generator=generator)[:k].sort().values for _ in range(ranks)]
    for row in rows:
        row[k - padding :] = size
    return torch.cat(rows).int().to(DEVICE)


CASES = [
    (1, 1, 1, 0),
    (4, 50, 1000, 0),
    (3, 700, 1000, 40),
    (5, 1000, 1000, 0),
    (2, 300, 9000, 300),
]


@pytest.mark.parametrize(("ranks", "k", "size", "padding"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_join(ranks, k, size, padding, dtype):
    u = torch.randn(size).to(dtype).to(DEVICE)
    agree(join_torch, join_triton, lists(ranks, k, size, padding), u)


def test_join_in_parts_of_several_tiles(monkeypatch):
    monkeypatch.setattr(module, "PARTS", 2)
    agree(join_torch, join_triton, lists(4, 1500, 20_000, 7), torch.randn(20_000).to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mean(dtype):
    agree(mean_torch, mean_triton, torch.randn(6, 1500).to(dtype).to(DEVICE))


def test_the_mean_is_added_in_order():
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0]]).to(DEVICE)
    assert mean_triton(rows).tolist() == [0.25]


@gpu
@pytest.mark.parametrize("ranks", [2, 16])
def test_at_full_size(ranks):
    u = torch.randn(25_557_032, device=DEVICE)
    agree(join_torch, join_triton, lists(ranks, 25_557, u.numel(), 100), u)
    agree(mean_torch, mean_triton, torch.randn(ranks, 1_000_003, device=DEVICE).bfloat16())
