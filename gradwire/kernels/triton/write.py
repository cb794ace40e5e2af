"""write_message on CUDA: one launch writes the whole message.

Some programs write values, the others words of indices. A program searches for the entries that
have bits in its words. Nothing is added up, and nothing has to be cleared before.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.encode.format import (
    FLOATS,
    INDICES,
    LARGEST,
    LEVELS,
    VALUES,
    Encoding,
    index_bytes,
    low_bits,
    word_parts,
)
from gradwire.encode.values import FULL, REFITS
from gradwire.kernels.triton.bits import rounded
from gradwire.kernels.triton.codes import (
    BITMAP,
    BLOCK,
    FP16,
    FP32,
    INT8,
    INT32,
    LOCAL16,
    PACKED,
    TWO_BIT,
    count_below,
    position,
    quantised,
    random_halves,
)
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.two_bit import put_two_bits
from gradwire.types import Sparse

if TYPE_CHECKING:
    from gradwire.encode.noise import Noise

TILE = 1024
WORDS = 128


@triton.jit
def _put_floats(
    body, seen, values, step, key, tile, capacity, room, limit,
    VALUES: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    i = tile * TILE + tl.arange(0, TILE)
    value = tl.load(values + i, mask=i < capacity, other=0).to(tl.float32)
    value = tl.minimum(tl.maximum(value, -limit), limit)
    # Behind the entries `value` is zero, which is the padding of the message.
    if VALUES == FP32:
        tl.store(body.to(tl.pointer_type(tl.float32)) + i, value, mask=i < room)
    elif VALUES == FP16:
        value = value.to(tl.float16)
        tl.store(body.to(tl.pointer_type(tl.float16)) + i, value, mask=i < room)
    else:
        if STOCHASTIC:
            half = random_halves(step, key, i).to(tl.int32)
            half = (value.to(tl.int32, bitcast=True) + tl.where(i < capacity, half, 0)) >> 16
        else:
            half = rounded(value, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
        tl.store(body.to(tl.pointer_type(tl.int16)) + i, half.to(tl.int16), mask=i < room)
        value = (half << 16).to(tl.float32, bitcast=True)
    if seen is not None:
        tl.store(seen + i, value.to(tl.float32), mask=i < capacity)


@triton.jit
def _put_levels(
    body, seen, values, step, key, tile, capacity, room, limit,
    VALUES: tl.constexpr, STOCHASTIC: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    # Neighbouring entries in pairs, because int4 stores two in a byte.
    r = tl.arange(0, TILE // BLOCK)[:, None]
    c = tl.arange(0, BLOCK // 2)[None, :]
    pair = (tile * (TILE // BLOCK) + r) * (BLOCK // 2) + c
    i = 2 * pair
    first = tl.load(values + i, mask=i < capacity, other=0).to(tl.float32)
    second = tl.load(values + i + 1, mask=i + 1 < capacity, other=0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)[:, None]
    scale = tl.div_rn(tl.minimum(largest, limit), LEVELS + tl.zeros_like(largest))
    inverse_scale = tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(scale > 0, scale, 1.0))
    low, high = pair, pair
    if STOCHASTIC:
        low, high = random_halves(step, key, i), random_halves(step, key, i + 1)
    first = quantised(first * inverse_scale, low, LEVELS, STOCHASTIC)
    second = quantised(second * inverse_scale, high, LEVELS, STOCHASTIC)
    block = tile * (TILE // BLOCK) + r
    blocks = (capacity + BLOCK - 1) // BLOCK
    tl.store(body.to(tl.pointer_type(tl.float32)) + block, scale, mask=block < blocks)
    if VALUES == INT8:
        codes = (body + blocks).to(tl.pointer_type(tl.int8)) + i
        tl.store(codes, first.to(tl.int8), mask=i < room)
        tl.store(codes + 1, second.to(tl.int8), mask=i + 1 < room)
    else:
        nibbles = (first + 8) | ((second + 8) << 4)
        nibbles = tl.where(i < capacity, nibbles, 0)
        codes = (body + blocks).to(tl.pointer_type(tl.uint8)) + pair
        tl.store(codes, nibbles.to(tl.uint8), mask=pair < room)
    tl.store(seen + i, first.to(tl.float32) * scale, mask=i < capacity)
    tl.store(seen + i + 1, second.to(tl.float32) * scale, mask=i + 1 < capacity)


@triton.jit
def _low_words(indices, w, capacity, low, WORDS: tl.constexpr):
    """Return words w of the low bits of all indices, stored side by side."""
    first = w * 32 // low
    word = tl.zeros([WORDS], tl.uint32)
    for j in range(32 // low + 2):
        i = first + j
        at = i * low - w * 32
        index = tl.load(indices + i, mask=(i < capacity) & (at < 32), other=0)
        bits = (index & ((1 << low) - 1)).to(tl.uint32)
        left = tl.maximum(at, 0).to(tl.uint32)
        right = tl.maximum(-at, 0).to(tl.uint32)
        word |= tl.where(at < 32, (bits << left) >> right, 0)
    return word.to(tl.int32, bitcast=True)


@triton.jit
def _set_bits(indices, w, capacity, size, low, CODE: tl.constexpr, WORDS: tl.constexpr):
    """Return words w of a bitmap of the positions."""
    begin = w.to(tl.int64) * 32
    base = count_below(indices, begin, capacity, low, CODE, WORDS)
    word = tl.zeros([WORDS], tl.uint32)
    for j in range(32):
        i = base + j
        real = i < capacity
        at = position(indices, i, real, low, CODE)
        real &= at < begin + 32
        if CODE == BITMAP:
            real &= at < size
        bit = tl.where(real, at - begin, 0).to(tl.uint32)
        word |= tl.where(real, tl.full([WORDS], 1, tl.uint32) << bit, 0)
    return word.to(tl.int32, bitcast=True)


@triton.jit
def _places(indices, w, capacity, size):
    """Return words w of the 16-bit places, two entries per word."""
    first = tl.load(indices + 2 * w, mask=2 * w < capacity, other=0)
    second = tl.load(indices + 2 * w + 1, mask=2 * w + 1 < capacity, other=0)
    first = tl.where(first < size, first & 0xFFFF, 0)
    second = tl.where(second < size, second & 0xFFFF, 0)
    return first | (second << 16)


@triton.jit
def _put_words(
    out, indices, tile, split, words, capacity, size, low, CODE: tl.constexpr, WORDS: tl.constexpr
):
    """Write a tile of the first part (`split` words) or of the second; no tile has both."""
    tiles = (split + WORDS - 1) // WORDS
    if tile < tiles:
        w = tile * WORDS + tl.arange(0, WORDS)
        if CODE == PACKED:
            word = _low_words(indices, w, capacity, low, WORDS)
        else:
            ends = tl.minimum((w.to(tl.int64) + 1) * 65536, size)
            word = count_below(indices, ends, capacity, low, CODE, WORDS)
        tl.store(out + w, word, mask=w < split)
    else:
        w = (tile - tiles) * WORDS + tl.arange(0, WORDS)
        if CODE == INT32:
            word = tl.load(indices + w, mask=w < words, other=0)
        elif CODE == LOCAL16:
            word = _places(indices, w, capacity, size)
        else:
            word = _set_bits(indices, w, capacity, size, low, CODE, WORDS)
        tl.store(out + split + w, word, mask=w < words)


@triton.jit(
    do_not_specialize=["key", "capacity", "size", "low", "split", "words", "room", "tiles"],
    do_not_specialize_on_alignment=["count", "finite", "step"],
)
def _write_message(
    out, seen, template, indices, values, count, finite, step, key, capacity, size, low, split,
    words, room, tiles, limit, CODE: tl.constexpr, VALUES: tl.constexpr, LEVELS: tl.constexpr,
    STOCHASTIC: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr, REFITS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    body = out + 8 + split + words
    if tile >= tiles:
        _put_words(out + 8, indices, tile - tiles, split, words, capacity, size, low, CODE, WORDS)
    elif VALUES <= FP16:
        _put_floats(
            body, seen, values, step, key, tile, capacity, room, limit, VALUES, STOCHASTIC, TILE
        )
    elif VALUES == TWO_BIT:
        put_two_bits(
            body, seen, indices, values, tile, capacity, size, room, limit, TILE, LEVELS, REFITS
        )
    else:
        _put_levels(
            body, seen, values, step, key, tile, capacity, room, limit, VALUES, STOCHASTIC, TILE,
            LEVELS,
        )  # fmt: skip
    if tile == 0:
        w = tl.arange(0, 8)
        word = tl.load(template + w)
        word = tl.where(w == 3, tl.load(count).to(tl.int32), word)
        word = tl.where(w == 4, tl.load(finite).to(tl.int32), word)
        tl.store(out + w, word)


_launch = Launcher(_write_message, "out seen template limit", num_warps=4, enable_fp_fusion=False)


def write_message_triton(
    template: Tensor, sparse: Sparse, finite: Tensor, encoding: Encoding, noise: "Noise | None"
) -> tuple[Tensor, Tensor]:
    """Compute `write_message` in one launch.

    Moves 8 bytes per entry in, and the message and `seen` out.
    """
    out = torch.empty_like(template)
    values, indices, capacity = sparse.values, sparse.indices, sparse.capacity
    same = encoding.values == "fp32" and values.dtype == torch.float32
    seen = None if same else torch.empty(capacity, dtype=torch.float32, device=out.device)
    split, words = parts_of(encoding.indices, sparse.size, capacity)
    # The codes and the padding behind them, which is less than 16 bytes, follow the scales.
    left = out.numel() - 32 - 4 * (split + words)
    if encoding.values in FLOATS:
        limit = torch.finfo(FLOATS[encoding.values]).max
        room = left // FLOATS[encoding.values].itemsize
        tiles = -(-room // TILE)
    else:
        two_bit = encoding.values == "two-bit"
        limit = torch.finfo(torch.bfloat16).max if two_bit else LARGEST
        room = left - 4 * -(-capacity // BLOCK.value)
        tiles = -(-room // (TILE // {"int8": 1, "int4": 2, "two-bit": 4}[encoding.values]))
    tiles = max(1, tiles)
    # Moved into the range of int32, so that every key has the same type.
    step, key = (None, 0) if noise is None else (noise.step, noise.key - (1 << 31))
    _launch(
        tiles + -(-split // WORDS) + -(-words // WORDS), out, out.view(torch.int32), seen,
        template.view(torch.int32), indices, values, sparse.count, finite, step, key, capacity,
        sparse.size, low_bits(sparse.size, capacity), split, words, room, tiles, limit,
        INDICES[encoding.indices], VALUES[encoding.values], LEVELS.get(encoding.values, FULL),
        noise is not None, TILE, WORDS, REFITS,
    )  # fmt: skip
    return out, values if seen is None else seen


def parts_of(name: str, size: int, capacity: int) -> tuple[int, int]:
    """Return the words of the two parts of an index code; a single part is the second."""
    if name in ("packed", "local16") and capacity:
        return word_parts(name, size, capacity)
    return 0, index_bytes(name, size, capacity) // 4
