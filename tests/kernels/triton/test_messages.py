"""settle and decode in Triton: the reference's bits."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu, same  # isort: skip
from gradwire.encode import Encoding, encode
from gradwire.kernels.messages import mean_of_messages_torch
from gradwire.kernels.scatter import settle_torch
from gradwire.kernels.side_stream import LARGE, Target
from gradwire.kernels.triton.messages import SPAN, WIDE, mean_of_messages_triton
from gradwire.kernels.triton.scatter import settle_triton
from gradwire.types import Sparse, align
from tests.kernels.compare import agree


def chosen(size, k, seed=0, padding=0, common=False):
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(size, generator=generator)[:k].sort().values.int()
    values = torch.randn(k, generator=generator)
    if padding:
        indices[-padding:], values[-padding:] = size, 0
    count = torch.tensor(k - padding)
    return Sparse(indices.to(DEVICE), values.to(DEVICE), count.to(DEVICE), size, common)


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize(("k", "padding"), [(1, 0), (300, 9), (257, 257)])
def test_settle(skipped, k, padding):
    sparse = chosen(1000, k, padding=padding)
    buffer, flag = torch.randn(1001).to(DEVICE), torch.tensor(skipped, device=DEVICE)
    agree(settle_torch, settle_triton, buffer, sparse.indices, sparse.values, flag)
    settle_triton(buffer, sparse.indices, sparse.values, flag)
    assert float(buffer[-1]) == 0


def gathered(size, k, ranks, values="fp32", common=False, padding=0):
    messages = [
        encode(
            chosen(size, k, 0 if common else rank, padding, common),
            torch.tensor(True, device=DEVICE),
            Encoding(values),
        )
        for rank in range(ranks)
    ]
    return torch.stack([m.buffer for m in messages]), messages[0]


def decoded(stack, message):
    mine = message.sparse
    common = mine.indices if mine.common else None
    args = (stack, message.buffer, mine.size, mine.capacity, message.encoding.dtype, common)
    mean, ok = agree(mean_of_messages_torch, mean_of_messages_triton, *args)
    return mean, bool(ok)


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("values", ["fp32", "bf16"])
@pytest.mark.parametrize("common", [False, True])
def test_decode_equals_reference(ranks, values, common):
    for size, k, padding in (
        (64, 3, 0),
        (2 * SPAN + 777, 900, 30),
        (SPAN, 1, 0),
        (SPAN - 1, 40, 0),
    ):
        mean, ok = decoded(*gathered(size, k, ranks, values, common, padding))
        assert ok
        assert mean.numel() == size + 1
        assert float(mean[-1]) == 0


def pieces_of(lengths, gap=0):
    """Slices of one buffer full of sevens, for parts that begin at multiples of 64."""
    buffer = torch.full((sum(lengths) + gap * (len(lengths) + 1),), 7.0, device=DEVICE)
    pieces, place, start = [], 0, gap
    for n in lengths:
        pieces.append((place, buffer[start : start + n]))
        place, start = place + align(n), start + n + gap
    return place, pieces, buffer


@pytest.mark.parametrize("zeroed", [False, True])
@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize("gap", [0, 3])
@pytest.mark.parametrize("lengths", [[SPAN + 70], [5, SPAN + 1, 64, 64, 130], [640, 128]], ids=str)
def test_the_mean_goes_into_pieces(lengths, gap, usable, zeroed):
    size, pieces, buffer = pieces_of(lengths, gap)
    stack, message = gathered(size, 500, 3)
    stack[1].view(torch.int32)[4] = int(usable)
    args = (stack, message.buffer, size, 500, torch.float32)
    mean, _ = mean_of_messages_torch(*args)
    for version in (mean_of_messages_torch, mean_of_messages_triton):
        buffer.fill_(7)
        target = Target(size, buffer.device, pieces)
        if zeroed:
            target.zero()
            assert int((buffer == 0).sum()) == sum(lengths)
        nothing, ok = version(*args, None, target)
        assert nothing is None
        assert bool(ok) == usable
        for place, piece in pieces:
            assert same(piece, mean[place : place + piece.numel()])
        assert int((buffer == 7).sum()) == gap * (len(lengths) + 1)


@pytest.mark.parametrize("usable", [True, False])
@pytest.mark.parametrize("size", [100, WIDE, 2 * WIDE + 777])
def test_the_mean_where_it_is_zero_already(size, usable):
    stack, message = gathered(size, 90, 4, padding=3)
    stack[2].view(torch.int32)[4] = int(usable)
    args = (stack, message.buffer, size, 90, torch.float32)
    target = Target(size, stack.device)
    target.out.fill_(7)
    target.zero()
    assert not target.out.any()
    mean, ok = mean_of_messages_triton(*args, None, target)
    assert mean is target.out
    assert bool(ok) == usable
    assert same(mean, mean_of_messages_torch(*args)[0])


@gpu
def test_a_target_is_zeroed_beside_what_goes_on():
    """The stream at its side waits for what is enqueued before, and `wait` for the side."""
    given = torch.ones(LARGE, device=DEVICE)
    for _ in range(20):
        given.fill_(7)
        torch.cuda._sleep(200_000)
        kept = given.clone()
        target = Target(given.numel(), given.device, [(0, given)])
        target.clear()
        target.wait()
        zeros = given.clone()
        assert float(kept.min()) == 7
        assert not zeros.any()


@pytest.mark.parametrize("word", [0, 1, 2, 4, 5, 6, 7])
def test_a_header_that_differs_makes_everything_nan(word):
    stack, message = gathered(1000, 10, 3)
    stack[1].view(torch.int32)[word] += 1
    mean, ok = decoded(stack, message)
    assert not ok
    assert bool(mean.isnan().all())


def test_an_index_outside_touches_nothing():
    stack, message = gathered(1000, 10, 2)
    stack[1].view(torch.int32)[8 + 9] = 2**31 - 1
    stack[1].view(torch.int32)[8] = -5
    mean, ok = decoded(stack, message)
    assert ok
    assert int((mean != 0).sum()) <= 18


def test_indices_out_of_order_touch_nothing_outside():
    stack, message = gathered(1000, 10, 2)
    stack[1].view(torch.int32)[8 + 4] = 2**31 - 1
    mean, ok = mean_of_messages_triton(stack, message.buffer, 1000, 10, torch.float32)
    assert bool(ok)
    assert bool(mean.isfinite().all())


@gpu
def test_full_size():
    mean, ok = decoded(*gathered(138_357_544, 138_358, 4))
    assert ok
    assert int((mean != 0).sum()) <= 4 * 138_358
