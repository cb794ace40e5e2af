"""Count-Sketch: what goes in comes out, the order does not matter, Triton finds the same bits."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire.kernels.sketch import (
    hashes,
    insert,
    insert_torch,
    median,
    power_of_two,
    query,
    query_torch,
)
from gradwire.kernels.triton.sketch import insert_triton, query_triton
from tests.kernels.compare import agree
from tests.kernels.test_select import KINDS, vector

SEEDS = torch.tensor([11, -22, 33, -44, 55, 66, -77], dtype=torch.int32)


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
@pytest.mark.parametrize(("size", "columns"), [(1, 1), (1000, 37), (2049, 4096)])
def test_triton_finds_the_same_bits(rows, size, columns):
    u = vector("t3", size).to(DEVICE)
    seeds, factor = SEEDS[:rows].to(DEVICE), power_of_two(torch.tensor(20, device=DEVICE))
    cells = insert_torch(u, columns, seeds, factor)
    agree(insert_torch, insert_triton, u, columns, seeds, factor)
    for block in (0, 16, 64):
        agree(query_torch, query_triton, cells.float(), seeds, size, block)


def test_ties_between_rows():
    table = torch.zeros(5, 7, device=DEVICE)
    table[:, 3] = 2.0
    seeds = SEEDS[:5].to(DEVICE)
    agree(query_torch, query_triton, table, seeds, 500, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_alone_in_its_cells_comes_out_as_it_went_in(kind):
    u = vector(kind, 300) * (torch.arange(300) % 100 == 7)
    magnitudes, _ = query(insert(u, 200_000, SEEDS[:5]), SEEDS[:5], 300, 0)
    torch.testing.assert_close(magnitudes, u.abs(), rtol=1e-6, atol=float(u.abs().max()) * 2**-30)


def test_the_order_of_the_entries_does_not_matter(monkeypatch):
    """Floats would round differently; integers do not."""
    u = vector("layers", 5000)
    seeds, factor = SEEDS[:3], power_of_two(torch.tensor(10))
    cells = insert_torch(u, 50, seeds, factor)
    for step in (1234, 17):
        monkeypatch.setattr("gradwire.kernels.sketch.ALONE", step)
        assert torch.equal(insert_torch(u, 50, seeds, factor), cells)


@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1.0, 1e37])
def test_any_scale(scale):
    u = vector("gaussian", 2000)
    a, b = insert(u * scale, 500, SEEDS[:3]), insert(u, 500, SEEDS[:3])
    torch.testing.assert_close(a / scale, b, rtol=1e-2 if scale < 1e-40 else 1e-5, atol=1e-2)
    assert insert(torch.zeros(9), 5, SEEDS[:1]).abs().max() == 0


def test_the_largest_sum_does_not_overflow():
    """Every entry in one cell, with the same sign as far as the hash goes."""
    u = torch.full((100_000,), 3e4)
    _, negative = next(hashes(range(100_000), 1, SEEDS[:1]))
    u = torch.where(negative, -u, u)
    assert float(insert(u, 1, SEEDS[:1])) == pytest.approx(3e9)


def test_hashes_are_uniform_and_rows_independent():
    (first, positive), (second, _) = hashes(range(100_000), 100, SEEDS[:2])
    counts = torch.bincount(first * 100 + second, minlength=10_000)
    assert int(first.min()) >= 0
    assert int(first.max()) == 99
    # 10 a pair on average; chi square per degree of freedom is 1 +- 0.014.
    assert float(((counts - 10.0) ** 2 / 10).mean()) == pytest.approx(1, abs=0.06)
    assert abs(float(positive.float().mean()) - 0.5) < 0.01


def test_median():
    for n in (1, 3, 5, 7, 9):
        rows = torch.randn(n, 100)
        assert torch.equal(median(list(rows.unbind())), rows.median(0).values)


@gpu
def test_full_size():
    u = vector("t3", 25_557_032).to(DEVICE)
    seeds, factor = SEEDS[:5].to(DEVICE), power_of_two(torch.tensor(20, device=DEVICE))
    cells = insert_torch(u, 500_000, seeds, factor)
    agree(insert_torch, insert_triton, u, 500_000, seeds, factor)
    agree(query_torch, query_triton, cells.float(), seeds, u.numel(), 64)
