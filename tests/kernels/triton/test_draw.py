"""draw in Triton: the reference's indices and values, whatever order the atomics come in."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire.accumulate.layout import assign_offsets, size_of
from gradwire.kernels.draw import draw_torch, grid, pick_torch
from gradwire.kernels.triton import draw as kernel
from gradwire.types import Memory, Slot
from tests.kernels.compare import agree

STREAM = -0x3C6EF372FE94F82B


def run(u, k, size=None, stream=STREAM, draws=0, places=()):
    size = u.numel() if size is None else size
    count = torch.tensor(draws, device=DEVICE)
    args = (k, size, u.numel(), count, stream, *places)
    indices, n = agree(draw_torch, kernel.draw_triton, *args)
    assert int(n) == k
    agree(pick_torch, kernel.pick_triton, u, indices)
    return indices


def numbers(size):
    return torch.arange(size, device=DEVICE).float() + 0.5


@pytest.mark.parametrize("size", [1, 2, 3, 5, 97, 1001, 2048])
def test_sizes_and_every_k(size):
    for k in sorted({0, 1, size // 7, size}):
        run(numbers(size), k, draws=k)


def test_streams_and_draws():
    """Also numbers that fit into 32 bits, and a counter that has gone far."""
    drawn = [
        run(numbers(3000), 40, stream=stream, draws=draws).tolist()
        for stream in (STREAM, 5, -1, 2**63 - 1)
        for draws in (0, 3)
    ]
    drawn.append(run(numbers(3000), 40, draws=2**40).tolist())
    assert len(set(map(tuple, drawn))) == len(drawn)


@pytest.mark.parametrize("k", [1, 1030, 5000])
def test_a_program_that_does_more(k, monkeypatch):
    """As beside a scan: eight tiles drawn, and eight times the buckets put in order."""
    monkeypatch.setattr(kernel, "side_stream_pays", lambda length, device: True)
    run(numbers(20_000), k)


def test_walks_are_needed():
    """The grid has cells outside, and with k = size something lands on them."""
    size = 7 * 8 + 1
    a, b = grid(size)
    assert a * b - size == 6
    for draws in range(3):
        run(numbers(size), size, draws=draws)


def test_slots_with_padding_between_them():
    for sizes in ((5, 64, 1, 70), (640,), tuple(range(1, 34))):
        slots = assign_offsets([Slot(str(n), (n,), (1,), torch.float32, numel=n) for n in sizes])
        memory = Memory()
        memory.lay_out(slots, DEVICE)
        u = numbers(size_of(slots))
        for k in (sum(sizes), sum(sizes) // 3):
            run(u, k, sum(sizes), places=memory.places)


def test_several_items(monkeypatch):
    """More buckets than one item has, more tiles than one an item."""
    run(numbers(20_000), 2_500)
    monkeypatch.setattr(kernel, "MAX_ITEMS", 2)
    run(numbers(20_000), 2_500)


def test_full_buckets(monkeypatch):
    """More entries in a bucket than are looked at side by side."""
    monkeypatch.setattr(kernel, "MEAN", 60)
    run(numbers(4000), 700)


def test_bf16_and_slices():
    run(numbers(1000).bfloat16(), 100)
    run(numbers(1001)[1:], 100)


@gpu
@pytest.mark.parametrize("density", [1e-4, 1e-3, 1e-2, 0.1, 0.5])
def test_full_size(density):
    size = 25_557_032
    u = numbers(size)
    for draws in range(3):
        run(u, int(size * density), draws=draws)


@gpu
def test_two_to_the_thirty_one():
    u = torch.zeros(2**31 - 1, dtype=torch.bfloat16, device=DEVICE)
    u[-100_000:] = 1
    assert int(run(u, 200_000)[-1]) > 2**31 - 2**20


@gpu
def test_beside_other_work():
    """The second launch takes turns: programs of another stream change nothing."""
    u, a = numbers(6_553_600), torch.randn(4096, 4096, device=DEVICE)
    other = torch.cuda.Stream()
    for draws in range(20):
        with torch.cuda.stream(other):
            a = (a @ a).clamp(-1, 1)
        run(u, 65_536, draws=draws)
