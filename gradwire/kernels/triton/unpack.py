"""unpack on CUDA: one launch, or two if entries are set bits.

The n-th set bit is entry n. The first launch counts the bits in each part of the bitmap. The second
adds up the counts before its own part, and writes an entry for every bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.encode.format import INDICES, VALUES, Encoding, low_bits, nbytes
from gradwire.kernels.triton.codes import COMMON, INT32, PACKED, ones_in, value_at
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.write import parts_of

TILE = 1024
WORDS = 128
NOTHING = -1
"""The code of values for messages without values."""
PARTS = 512
"""Parts of a bitmap at most, because each program adds up the counts of all parts."""


@triton.jit
def _frame(out, messages, length, used):
    """Copy the header, and write zeros behind the entries."""
    w = tl.arange(0, 8)
    tl.store(out + w, tl.load(messages + w))
    tl.store(out + used + w, tl.zeros([8], tl.int32), mask=used + w < length)


@triton.jit(do_not_specialize=["stride", "split", "words", "parts", "share"])
def _count(counts, messages, stride, split, words, parts, share, WORDS: tl.constexpr):
    rank, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    bitmap = messages + rank.to(tl.int64) * stride + 8 + split
    total = tl.zeros([WORDS], tl.int32)
    for tile in range(part * share, part * share + share):
        w = tile * WORDS + tl.arange(0, WORDS)
        total += ones_in(tl.load(bitmap + w, mask=w < words, other=0).to(tl.uint32, bitcast=True))
    tl.store(counts + tl.program_id(0), tl.sum(total))


@triton.jit
def _low_of(low_part, i, real, low):
    """Return the `low` bits of entry i."""
    at = i * low
    first = tl.load(low_part + (at >> 5), mask=real, other=0).to(tl.uint32, bitcast=True)
    shift = (at & 31).to(tl.uint32)
    over = real & ((at & 31) + low > 32)
    second = tl.load(low_part + (at >> 5) + 1, mask=over, other=0).to(tl.uint32, bitcast=True)
    # A shift by 32 is not defined, so the shift by 32 - shift is done in two steps. If no bit comes
    # from the second word, `second` is zero.
    bits = (first >> shift) | ((second << (31 - shift)) << 1)
    return bits.to(tl.int64) & ((1 << low) - 1)


@triton.jit(
    do_not_specialize=[
        "stride", "length", "size", "capacity", "low", "split", "words", "parts", "share",
    ]
)  # fmt: skip
def _entries(
    out, messages, counts, stride, length, size, capacity, low, split, words, parts, share,
    CODE: tl.constexpr, VALUES: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    rank, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    out += rank.to(tl.int64) * length
    messages += rank.to(tl.int64) * stride
    if part == 0:
        _frame(out, messages, length, 8 + 2 * capacity)
    body = messages + 8 + split + words
    out_values = (out + 8 + capacity).to(tl.pointer_type(tl.float32))
    p = tl.arange(0, PARTS)
    part_counts = tl.load(counts + rank * parts + p, mask=p < parts, other=0)
    base = tl.sum(tl.where(p < part, part_counts, 0))
    b = tl.arange(0, 32)[None, :]
    for tile in range(part * share, part * share + share):
        w = tile * WORDS + tl.arange(0, WORDS)
        word = tl.load(messages + 8 + split + w, mask=w < words, other=0)
        word = word.to(tl.uint32, bitcast=True)
        ones = ones_in(word)
        before = base + tl.cumsum(ones, axis=0) - ones
        earlier = word[:, None] & ((tl.full([1, 32], 1, tl.uint32) << b.to(tl.uint32)) - 1)
        i = before[:, None] + ones_in(earlier)
        real = (((word[:, None] >> b.to(tl.uint32)) & 1) != 0) & (i < capacity)
        index = w.to(tl.int64)[:, None] * 32 + b
        if CODE == PACKED:
            index = index - i
            if split > 0:
                index = (index << low) | _low_of(messages + 8, i, real, low)
        inside = (index >= 0) & (index < size)
        value = value_at(body, i, real & inside, capacity, VALUES)
        tl.store(out + 8 + i, tl.where(inside, index, size).to(tl.int32), mask=real)
        tl.store(out_values + i, value, mask=real)
        base += tl.sum(ones)
    # Entries without a bit, which only damaged messages and padded bitmaps have.
    total = tl.sum(part_counts)
    for start in range(total + part * TILE, capacity, parts * TILE):
        i = start + tl.arange(0, TILE)
        tl.store(out + 8 + i, tl.zeros([TILE], tl.int32) + size, mask=i < capacity)
        tl.store(out_values + i, tl.zeros([TILE], tl.float32), mask=i < capacity)


@triton.jit
def _local_index(words, i, real, blocks, size):
    """Return the index of entry i, from its block and its place in the block.

    The block is the first whose end is above i.
    """
    block = i * 0
    step = tl.full([], 1 << 15, tl.int32)
    while step > 0:
        inside = real & (step <= blocks - block)
        end = tl.load(words + block + step - 1, mask=inside, other=0x7FFFFFFF)
        block += tl.where(inside & (end <= i), step, 0)
        step >>= 1
    place = tl.load((words + blocks).to(tl.pointer_type(tl.int16)) + i, mask=real, other=0)
    index = block.to(tl.int64) * 65536 + (place.to(tl.int64) & 0xFFFF)
    return tl.where((block < blocks) & (index < size), index, size).to(tl.int32)


@triton.jit(do_not_specialize=["stride", "length", "size", "capacity", "split", "words", "tiles"])
def _each(
    out, messages, stride, length, size, capacity, split, words, tiles,
    CODE: tl.constexpr, VALUES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    rank, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    out += rank.to(tl.int64) * length
    messages += rank.to(tl.int64) * stride
    body = messages + 8 + split + words
    before = 8 if CODE == COMMON else 8 + capacity
    if tile == 0:
        _frame(out, messages, length, before + capacity)
    i = tile * TILE + tl.arange(0, TILE)
    real = i < capacity
    value = value_at(body, i, real, capacity, VALUES)
    if CODE != COMMON:
        if CODE == INT32:
            index = tl.load(messages + 8 + i, mask=real, other=0)
        else:
            index = _local_index(messages + 8, i, real, split, size)
        inside = (index >= 0) & (index < size)
        value = tl.where(inside, value, 0.0)
        tl.store(out + 8 + i, tl.where(inside, index, size), mask=real)
    tl.store((out + before).to(tl.pointer_type(tl.float32)) + i, value, mask=real)


_launch_count = Launcher(_count, "counts", num_warps=4)
_launch_entries = Launcher(_entries, "out counts", num_warps=8, enable_fp_fusion=False)
_launch_each = Launcher(_each, "out", num_warps=4, enable_fp_fusion=False)


def unpack_triton(
    messages: Tensor, size: int, capacity: int, encoding: Encoding, bare: bool = False
) -> Tensor:
    """Compute `unpack`.

    Moves the messages in and 8 bytes per entry out; bitmaps are read twice.
    """
    ranks, stride = len(messages), messages.stride(0) // 4
    indices = "common" if encoding.indices == "common" else "int32"
    length = nbytes(capacity, Encoding("fp32", indices), size)
    out = torch.empty(ranks, length, dtype=torch.uint8, device=messages.device)
    source, target = messages.view(torch.int32), out.view(torch.int32)
    split, words = parts_of(encoding.indices, size, capacity)
    code, values = INDICES[encoding.indices], NOTHING if bare else VALUES[encoding.values]
    if encoding.indices not in ("packed", "bitmap"):
        tiles = max(1, -(-capacity // TILE))
        _launch_each(
            ranks * tiles, out, target, source, stride, length // 4, size, capacity, split,
            words, tiles, code, values, TILE,
        )  # fmt: skip
        return out
    share = max(1, -(-words // (WORDS * PARTS)))
    parts = max(1, -(-words // (WORDS * share)))
    counts = torch.empty(ranks * parts, dtype=torch.int32, device=messages.device)
    _launch_count(ranks * parts, out, counts, source, stride, split, words, parts, share,
                  WORDS)  # fmt: skip
    _launch_entries(
        ranks * parts, out, target, source, counts, stride, length // 4, size, capacity,
        low_bits(size, capacity), split, words, parts, share, code, values, WORDS, PARTS, TILE,
    )  # fmt: skip
    return out
