"""unpack on CUDA: one launch, or two where entries are set bits.

The n-th set bit is entry n: the first launch counts the bits of each part of the bitmap, the second
adds up the counts before its own part and writes an entry for every bit.
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
"""In place of a code of values."""
PARTS = 512
"""Parts of a bitmap at most: each program adds up the counts of all."""


@triton.jit
def _frame(out, messages, length, used):
    """The header as it came, and zeros behind the entries."""
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
def _low_of(low_part, i, there, low):
    """The `low` bits of entry i."""
    at = i * low
    first = tl.load(low_part + (at >> 5), mask=there, other=0).to(tl.uint32, bitcast=True)
    shift = (at & 31).to(tl.uint32)
    over = there & ((at & 31) + low > 32)
    second = tl.load(low_part + (at >> 5) + 1, mask=over, other=0).to(tl.uint32, bitcast=True)
    # Shifting by 32 is not defined; where nothing is taken over, `second` is zero.
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
    given = (out + 8 + capacity).to(tl.pointer_type(tl.float32))
    p = tl.arange(0, PARTS)
    found = tl.load(counts + rank * parts + p, mask=p < parts, other=0)
    base = tl.sum(tl.where(p < part, found, 0))
    b = tl.arange(0, 32)[None, :]
    for tile in range(part * share, part * share + share):
        w = tile * WORDS + tl.arange(0, WORDS)
        word = tl.load(messages + 8 + split + w, mask=w < words, other=0)
        word = word.to(tl.uint32, bitcast=True)
        ones = ones_in(word)
        before = base + tl.cumsum(ones, axis=0) - ones
        earlier = word[:, None] & ((tl.full([1, 32], 1, tl.uint32) << b.to(tl.uint32)) - 1)
        i = before[:, None] + ones_in(earlier)
        there = (((word[:, None] >> b.to(tl.uint32)) & 1) != 0) & (i < capacity)
        where = w.to(tl.int64)[:, None] * 32 + b
        if CODE == PACKED:
            where = where - i
            if split > 0:
                where = (where << low) | _low_of(messages + 8, i, there, low)
        inside = (where >= 0) & (where < size)
        value = value_at(body, i, there & inside, capacity, VALUES)
        tl.store(out + 8 + i, tl.where(inside, where, size).to(tl.int32), mask=there)
        tl.store(given + i, value, mask=there)
        base += tl.sum(ones)
    # Entries without a bit, which only damaged messages and padded bitmaps have.
    every = tl.sum(found)
    for start in range(every + part * TILE, capacity, parts * TILE):
        i = start + tl.arange(0, TILE)
        tl.store(out + 8 + i, tl.zeros([TILE], tl.int32) + size, mask=i < capacity)
        tl.store(given + i, tl.zeros([TILE], tl.float32), mask=i < capacity)


@triton.jit
def _local_index(words, i, there, blocks, size):
    """Entry i's block, the first whose end is above i, and its place in it."""
    block = i * 0
    step = tl.full([], 1 << 15, tl.int32)
    while step > 0:
        inside = there & (step <= blocks - block)
        end = tl.load(words + block + step - 1, mask=inside, other=0x7FFFFFFF)
        block += tl.where(inside & (end <= i), step, 0)
        step >>= 1
    place = tl.load((words + blocks).to(tl.pointer_type(tl.int16)) + i, mask=there, other=0)
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
    there = i < capacity
    value = value_at(body, i, there, capacity, VALUES)
    if CODE != COMMON:
        if CODE == INT32:
            index = tl.load(messages + 8 + i, mask=there, other=0)
        else:
            index = _local_index(messages + 8, i, there, split, size)
        inside = (index >= 0) & (index < size)
        value = tl.where(inside, value, 0.0)
        tl.store(out + 8 + i, tl.where(inside, index, size), mask=there)
    tl.store((out + before).to(tl.pointer_type(tl.float32)) + i, value, mask=there)


_launch_count = Launcher(_count, "counts", num_warps=4)
_launch_entries = Launcher(_entries, "out counts", num_warps=8, enable_fp_fusion=False)
_launch_each = Launcher(_each, "out", num_warps=4, enable_fp_fusion=False)


def unpack_triton(
    messages: Tensor, size: int, capacity: int, encoding: Encoding, bare: bool = False
) -> Tensor:
    """See `unpack`. Moves the messages in and 8 bytes an entry out; bitmaps are read twice."""
    ranks, stride = len(messages), messages.stride(0) // 4
    indices = "common" if encoding.indices == "common" else "int32"
    length = nbytes(capacity, Encoding("fp32", indices), size)
    out = torch.empty(ranks, length, dtype=torch.uint8, device=messages.device)
    given, target = messages.view(torch.int32), out.view(torch.int32)
    split, words = parts_of(encoding.indices, size, capacity)
    code, values = INDICES[encoding.indices], NOTHING if bare else VALUES[encoding.values]
    if encoding.indices not in ("packed", "bitmap"):
        tiles = max(1, -(-capacity // TILE))
        _launch_each(
            ranks * tiles, out, target, given, stride, length // 4, size, capacity, split,
            words, tiles, code, values, TILE,
        )  # fmt: skip
        return out
    share = max(1, -(-words // (WORDS * PARTS)))
    parts = max(1, -(-words // (WORDS * share)))
    counts = torch.empty(ranks * parts, dtype=torch.int32, device=messages.device)
    _launch_count(ranks * parts, out, counts, given, stride, split, words, parts, share,
                  WORDS)  # fmt: skip
    _launch_entries(
        ranks * parts, out, target, given, counts, stride, length // 4, size, capacity,
        low_bits(size, capacity), split, words, parts, share, code, values, WORDS, PARTS, TILE,
    )  # fmt: skip
    return out
