"""Counts of block maxima: written by the scan, read by the selection.

A maximum is counted by its code, the 16 bits after the sign. There are 1024 bins around the last
threshold: from a sixth of it to three times as much. Bins for all codes would be too many to read,
and a few wide bins would all add to the same cache line. Neighbouring bins are on different cache
lines, because a line takes one addition at a time.
"""

import triton
import triton.language as tl

from gradwire.kernels.triton.bits import bits_of
from gradwire.kernels.triton.select.find import crossing_in_rows

LOW = tl.constexpr(15)
"""Bits of a magnitude that its code leaves out."""
BINS = tl.constexpr(1024)
BELOW = tl.constexpr(640)
"""Bins below the last threshold: 256 per power of two."""


@triton.jit
def lowest(edge):
    """Return the code of the first bin."""
    return tl.maximum((edge >> LOW) - BELOW, 0)


@triton.jit
def count_tile(
    counts, words, maxima, start, left, every,
    BLOCK: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Count the maxima of a tile that this program has written.

    Only one in `every` units is counted. Units are hashed, so that no period in the data goes
    unseen. Maxima are read again, because registers that hold them until here would be missing in
    every program.
    """
    unit = (start // UNIT).to(tl.uint32)
    if tl.umulhi(unit * 0x9E3779B1, every.to(tl.uint32)) == 0:
        tl.debug_barrier()
        row = tl.arange(0, TILE // BLOCK)
        real = row * BLOCK < left
        written = maxima + start // BLOCK + row
        bits = bits_of(tl.load(written, mask=real, other=0, cache_modifier=".cg"))
        bin = tl.minimum((bits >> LOW) - lowest(tl.load(words)), BINS - 1)
        ones = tl.full([TILE // BLOCK], 1, tl.int32)
        tl.atomic_add(counts + _bin_place(bin), ones, mask=real & (bin >= 0), sem="relaxed")


@triton.jit
def _bin_place(bin):
    return (bin & 31) * 32 + (bin >> 5)


@triton.jit
def read_counts(counts, rank):
    """Find the highest bin that `rank` of the counted maxima reach. Reads 4 kB.

    Return this bin, the number that reach it, the number of all, and the highest bin not empty.
    """
    bin = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    each = tl.load(counts + _bin_place(bin))
    crossed, above, total = crossing_in_rows(each, 0, rank, 32, 32)
    seen = above + tl.sum(tl.sum(tl.where(bin == crossed, each, 0), axis=1), axis=0)
    top = tl.max(tl.max(tl.where(each > 0, bin, 0), axis=1), axis=0)
    return crossed, seen, total, top
