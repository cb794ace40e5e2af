"""chunks in Triton: the reference's indices and values, by the blocks and by whole chunks."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire.kernels.chunks import chunks_torch
from gradwire.kernels.triton import chunks as kernel
from gradwire.kernels.triton.scan import block_maxima
from tests.kernels.compare import agree
from tests.kernels.test_select import KINDS, vector


@pytest.fixture
def ways(monkeypatch):
    """Which launches were used."""
    seen = []

    def noted(name, launch):
        def call(*args):
            seen.append(name)
            launch(*args)

        return call

    whole = {warps: noted("many", launch) for warps, launch in kernel._launch_many.items()}
    monkeypatch.setattr(kernel, "_launch_many", whole)
    monkeypatch.setattr(kernel, "_launch_few", noted("few", kernel._launch_few))
    return seen


def run(u, chunk, each, last, block):
    u = u.to(DEVICE)
    maxima = block_maxima(u, block) if block else None
    agree(chunks_torch, kernel.chunks_triton, u, chunk, each, last, maxima, block)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data(kind, ways):
    u = vector(kind, 2 * 1024 + 200)
    run(u, 1024, 3, 3, 32)
    run(u, 1024, 40, 7, 32)
    assert ways == ["few", "many"]


@pytest.mark.parametrize("each", [1, 2, 5, 8, 16])
def test_every_number_of_winners(each, ways):
    run(vector("few values", 2 * 1024 + 500), 1024, each, min(each, 3), 32)
    run(vector("gaussian", 5 * 1024), 1024, each, 0, 16)
    assert ways == ["few", "few"]


@pytest.mark.parametrize("rest", [0, 1, 15, 65, 1023])
def test_the_rest_behind_the_last_chunk(rest, ways):
    for size in (rest, 2048 + rest):
        u = vector("few values", size)
        run(u, 1024, 2, min(2, rest), 64)
        run(u, 1024, 100, rest, 0)
    run(vector("few values", 1024 + rest), 1024, 2, 0, 64)
    assert {"few", "many"} <= set(ways)


@pytest.mark.parametrize(("chunk", "block"), [(1, 0), (7, 0), (192, 16), (320, 64)])
def test_other_chunks(chunk, block):
    """Small ones, and such as are no power of two."""
    u = vector("few values", 2 * chunk + chunk // 2)
    for each in {0, 1, chunk // 2, chunk}:
        run(u, chunk, each, chunk // 4, block)


def test_more_than_a_block_holds(ways):
    """By whole chunks up to 16384, by blocks beyond; the reference has the rest."""
    run(vector("gaussian", 16384 + 900), 16384, 300, 0, 64)
    run(vector("gaussian", 32768), 32768, 2, 0, 64)
    run(vector("gaussian", 32768), 32768, 200, 0, 64)
    assert ways == ["many", "few"]


def test_groups_that_do_not_divide_the_chunk_are_not_used(ways):
    run(vector("gaussian", 4000), 1000, 4, 0, 64)
    run(vector("gaussian", 4000), 1024, 4, 0, 64)
    assert ways == ["many", "few"]


def test_the_sign_of_zero_is_kept():
    u = torch.zeros(1100)
    u[[3, 70, 1030]] = -0.0
    run(u, 1024, 4, 2, 64)
    run(u, 1024, 50, 20, 0)


def test_bf16():
    u = vector("gaussian", 2100).to(torch.bfloat16)
    run(u, 1024, 4, 1, 64)
    run(u, 1024, 50, 2, 0)


def test_slices_begin_anywhere():
    u, maxima = vector("gaussian", 2100).to(DEVICE), None
    part = u[1:2050]
    maxima = torch.zeros(40, device=DEVICE)[3:36]
    maxima.copy_(block_maxima(part.clone(), 64))
    agree(chunks_torch, kernel.chunks_triton, part, 1024, 4, 1, maxima, 64)


def test_what_lies_after_the_last_entry_is_not_looked_at():
    room = torch.full((3000,), 1e9, device=DEVICE)
    room[:2100] = vector("gaussian", 2100)
    run(room[:2100], 1024, 4, 1, 64)
    run(room[:2100], 1024, 100, 20, 0)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("each", [1, 4, 16, 41, 410])
def test_full_size(kind, each):
    run(vector(kind, 25_557_032), 4096, each, 1, 64)


@gpu
@pytest.mark.parametrize("block", [0, 64])
def test_two_to_the_thirty_one(block):
    """The last entries of the longest bundle; too many for the reference's sort."""
    size, chunk = 2**31 - 1, 4096
    u = torch.zeros(size, device=DEVICE)
    u[-1] = 5
    u[-chunk - 3] = -4
    maxima = block_maxima(u, block) if block else None
    indices, values = kernel.chunks_triton(u, chunk, 2, 1, maxima, block)
    assert indices.numel() == size // chunk * 2 + 1
    assert int(indices[-1]) == size - 1
    assert float(values[-1]) == 5
    assert bool((indices[1:] > indices[:-1]).all())
    at = size // chunk * chunk - chunk
    assert sorted(indices[-3:-1].tolist()) == sorted({at, size - chunk - 3})
    assert float(values.sum()) == 1
