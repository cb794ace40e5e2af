"""The CPU's way to settle and to take a mean: the reference's bits, in pieces too."""

import pytest
import torch

from gradwire.encode import Encoding, encode
from gradwire.kernels.messages import DIRECT, mean_of_messages_cpu, mean_of_messages_torch
from gradwire.kernels.scatter import settle_cpu, settle_torch
from gradwire.kernels.side_stream import Target
from gradwire.types import Sparse, align
from tests.kernels.compare import agree

TRUE = torch.tensor(True)


def chosen(size, k, seed=0, padding=0, common=False):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(size, generator=generator)[:k].sort().values.int()
    values = torch.randn(k, generator=generator)
    if padding:
        indices[-padding:], values[-padding:] = size, 0
    return Sparse(indices, values, torch.tensor(k - padding), size, common)


def gathered(size, k, ranks, values="fp32", common=False, padding=0):
    sparse = [chosen(size, k, 0 if common else rank, padding, common) for rank in range(ranks)]
    messages = [encode(s, TRUE, Encoding(values)) for s in sparse]
    return torch.stack([m.buffer for m in messages]), messages[0]


def arguments(stack, message):
    mine = message.sparse
    common = mine.indices if mine.common else None
    return stack, message.buffer, mine.size, mine.capacity, message.encoding.dtype, common


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize(("k", "padding"), [(1, 0), (300, 9), (257, 257)])
def test_settle(skipped, k, padding):
    sparse = chosen(1000, k, padding=padding)
    args = torch.randn(1001), sparse.indices, sparse.values, torch.tensor(skipped)
    agree(settle_torch, settle_cpu, *args)
    settle_cpu(*args)
    assert float(args[0][-1]) == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("common", [False, True])
def test_mean(ranks, values, common):
    for size, k, padding in ((64, 3, 0), (5000, 900, 30), (1000, 1, 1), (1000, 1000, 0)):
        args = arguments(*gathered(size, k, ranks, values, common, padding))
        mean, ok = agree(mean_of_messages_torch, mean_of_messages_cpu, *args)
        assert ok
        assert mean.any() == (k > padding)


def pieces_of(lengths):
    """Slices of one buffer full of sevens, for parts that begin at multiples of 64."""
    buffer = torch.full((sum(lengths) + len(lengths),), 7.0)
    pieces, place, start = [], 0, 0
    for n in lengths:
        pieces.append((place, buffer[start : start + n]))
        place, start = place + align(n), start + n + 1
    return place, pieces, buffer


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize("order", ["ascending", "descending", "outside"])
@pytest.mark.parametrize("lengths", [[70], [5, 3 * DIRECT + 1, 64], [2 * DIRECT, 9 * DIRECT]])
def test_the_mean_goes_into_pieces(lengths, usable, order):
    """By a vector or directly, and wherever the indices of another rank lie."""
    size, pieces, buffer = pieces_of(lengths)
    k = size // 3
    stack, message = gathered(size, k, 2)
    words = stack[1].view(torch.int32)
    words[4] = int(usable)
    if order == "descending":
        words[8:] = torch.cat([part.flip(0) for part in words[8 : 8 + 2 * k].split(k)])
    if order == "outside":
        words[8], words[7 + k] = -5, 2**31 - 1
    args = arguments(stack, message)
    mean, _ = mean_of_messages_torch(*args)
    nothing, ok = mean_of_messages_cpu(*args, Target(size, buffer.device, pieces))
    assert nothing is None
    assert bool(ok) == usable
    for place, piece in pieces:
        expected = mean[place : place + piece.numel()]
        assert torch.equal(piece.view(torch.int32), expected.view(torch.int32))
    assert int((buffer == 7).sum()) == len(lengths)


@pytest.mark.parametrize("word", [0, 1, 2, 4, 5, 6, 7])
def test_a_header_that_differs_makes_everything_nan(word):
    stack, message = gathered(1000, 10, 3)
    stack[1].view(torch.int32)[word] += 1
    mean, ok = agree(mean_of_messages_torch, mean_of_messages_cpu, *arguments(stack, message))
    assert not ok
    assert mean.isnan().all()
