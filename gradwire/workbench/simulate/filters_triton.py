"""Compute `filters.filter_gradients` on CUDA.

Each program multiplies tiles of output gradients with tiles of inputs, over some of the pixels.
The sums of the programs are then added up in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1056
"""Programs to launch if there are enough pixels: eight per multiprocessor of an H200."""
TILES = 4
"""Tiles of pixels per program, at least."""


@triton.jit
def _products(
    x, slope, out, images, height, width, rows, columns, pixels, share, parts,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PADDED: tl.constexpr, SIDE: tl.constexpr,
    STRIDE: tl.constexpr, PADDING: tl.constexpr, WEIGHTS: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add up the gradients of WEIGHTS weights of one worker over one part of the output's pixels.

    Program (worker, block, part) handles all outputs, and weights from block * WEIGHTS on. Weight j
    belongs to input j % INPUTS at position j // INPUTS of the window.
    """
    worker, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    j = tl.program_id(1) * WEIGHTS + tl.arange(0, WEIGHTS)
    all_weights: tl.constexpr = INPUTS * SIDE * SIDE
    down, right = j // INPUTS // SIDE - PADDING, j // INPUTS % SIDE - PADDING
    output = tl.arange(0, PADDED)
    x += worker * images * height * width * INPUTS
    slope += worker * pixels * OUTPUTS
    total = tl.zeros([PADDED, WEIGHTS], tl.float32)
    for first in range(part * share, tl.minimum(part * share + share, pixels), TILE):
        pixel = first + tl.arange(0, TILE)
        image, position = pixel // (rows * columns), pixel % (rows * columns)
        valid = (pixel[None, :] < pixels) & (output[:, None] < OUTPUTS)
        slopes = tl.load(slope + pixel[None, :] * OUTPUTS + output[:, None], valid, 0.0)
        row = (position // columns * STRIDE)[:, None] + down[None, :]
        column = (position % columns * STRIDE)[:, None] + right[None, :]
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        inside &= (pixel[:, None] < pixels) & (j[None, :] < all_weights)
        source = (image[:, None] * height + row) * width + column
        inputs = tl.load(x + source * INPUTS + (j % INPUTS)[None, :], inside, 0.0)
        total = tl.dot(slopes, inputs, total, input_precision=PRECISION)
    out_offsets = ((worker * parts + part) * OUTPUTS + output[:, None]) * all_weights + j[None, :]
    tl.store(out + out_offsets, total, (output[:, None] < OUTPUTS) & (j[None, :] < all_weights))


def filter_gradients_triton(
    x: Tensor, slope: Tensor, workers: int, width: int, stride: int, padding: int
) -> Tensor:
    """Compute `filter_gradients`; the same inputs give the same bits."""
    x, slope = (part.contiguous(memory_format=torch.channels_last) for part in (x, slope))
    _, inputs, high, wide = x.shape
    _, outputs, rows, columns = slope.shape
    images, weights = x.shape[0] // workers, inputs * width * width
    pixels = images * rows * columns
    tile = 64 if x.dtype == torch.float32 else 128
    block = 64 if inputs >= 16 else 32
    blocks = triton.cdiv(weights, block)
    parts = max(1, min(triton.cdiv(PROGRAMS, workers * blocks), pixels // (tile * TILES)))
    share = triton.cdiv(triton.cdiv(pixels, tile), parts) * tile
    parts = triton.cdiv(pixels, share)
    out = torch.empty(workers, parts, outputs, weights, dtype=torch.float32, device=x.device)
    precision = "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"
    _products[(workers, blocks, parts)](
        x, slope, out, images, high, wide, rows, columns, pixels, share, parts,
        inputs, outputs, max(16, triton.next_power_of_2(outputs)), width, stride, padding, block,
        tile, precision,
    )  # fmt: skip
    gradients = out.sum(1).view(workers, outputs, width, width, inputs)
    return gradients.permute(0, 1, 4, 2, 3).contiguous()
