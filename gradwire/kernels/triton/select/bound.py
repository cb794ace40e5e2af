"""Find a bound that at least k entries reach, from the counts of the scan or from a sample.

The k-th largest block maximum is never above the k-th largest magnitude. A block whose maximum is
below it therefore cannot hold a winner. The bound comes from some of the maxima, and is a little
lower. The number of entries that reach the bound says if it was low enough.
"""

import triton
import triton.language as tl

from gradwire.kernels.triton.bits import INFINITY, bits_of
from gradwire.kernels.triton.select.counts import LOW, lowest, read_counts
from gradwire.kernels.triton.select.turns import COARSE_BINS, CROWDED, FINE_BITS

SECTOR = tl.constexpr(8)
# A factor on the last threshold. Of 45 selections of a ResNet-50 in training 7 took the slower path
# with it, and 22 without.
LOWERED = tl.constexpr(0.85)


@triton.jit
def _sample(values, n, STRATA: tl.constexpr):
    """Return the bits of STRATA sectors of 32 bytes; -1 past n.

    Each sector lies at a hashed place in its own stretch, so that no period in the data goes
    unseen.
    """
    stretch = tl.arange(0, STRATA)
    sector = stretch
    if n > STRATA * SECTOR:
        sectors = n // SECTOR
        width = sectors // STRATA
        hashed = tl.umulhi(stretch.to(tl.uint32) * 0x9E3779B1, width.to(tl.uint32)).to(tl.int32)
        sector = stretch * width + stretch * (sectors % STRATA) // STRATA + hashed
    at = sector[:, None] * SECTOR + tl.arange(0, SECTOR)[None, :]
    bits = bits_of(tl.load(values + at, mask=at < n, other=0))
    return tl.where(at < n, bits, -1)


@triton.jit
def _sampled(values, n, rank, SAMPLE: tl.constexpr):
    """Return a bound that `rank` of the sample reach, the number that reach it, and the largest.

    The last 15 bits of the bound are clear. It is at most 16 powers of two below the largest. Reads
    4 * SAMPLE bytes.
    """
    bits = _sample(values, n, SAMPLE // SECTOR)
    largest = tl.max(tl.max(bits, axis=1), axis=0)
    lowest = tl.maximum((largest >> 15 << 15) - (4095 << 15), 0)
    t = lowest
    count = tl.minimum(n, SAMPLE)
    for step in range(6):
        # Each round finds two bits of t, by three counts in one sum. A count has ten bits within a
        # sector, and twenty in the total.
        unit = 1 << (25 - 2 * step)
        marks = (bits >= t + unit).to(tl.int32)
        marks += (bits >= t + 2 * unit).to(tl.int32) << 10
        marks += (bits >= t + 3 * unit).to(tl.int32) << 20
        sector = tl.sum(marks, axis=1).to(tl.int64)
        counts = tl.sum(((sector >> 20) << 40) + (((sector >> 10) & 1023) << 20) + (sector & 1023))
        c1 = (counts & 0xFFFFF).to(tl.int32)
        c2 = ((counts >> 20) & 0xFFFFF).to(tl.int32)
        c3 = (counts >> 40).to(tl.int32)
        count = tl.where(c3 >= rank, c3, tl.where(c2 >= rank, c2, tl.where(c1 >= rank, c1, count)))
        t += unit * tl.where(c3 >= rank, 3, tl.where(c2 >= rank, 2, tl.where(c1 >= rank, 1, 0)))
    # If too few lie above the lowest bound, 0 asks for every entry but zeros.
    return tl.where(t == lowest, 0, t), count, largest


@triton.jit
def _lower(edge):
    return (edge.to(tl.float32, bitcast=True) * LOWERED).to(tl.int32, bitcast=True)


@triton.jit
def _counted(counts, record, rank):
    """Return the results of `_sampled` from the counts of the scan.

    The last threshold tells where the bins are.
    """
    edge = tl.load(record)
    bin, seen, total, top = read_counts(counts, rank)
    # With so few maxima near the last threshold, the winners lie together.
    few = total < rank
    t = tl.where(few, _lower(edge), (lowest(edge) + bin) << LOW)
    largest = (tl.minimum(lowest(edge) + top, 0xFFFF) << LOW) + 0x7FFF
    return t, tl.where(few, 0, seen), largest


@triton.jit
def lowered(record):
    """Return the last threshold, a little lowered, as bits, if that selection was crowded; else 0.

    Large entries may lie together, as those of a small layer do among larger layers. Few maxima
    then stand for many winners, and a bound from maxima lets far too many entries pass.
    """
    return tl.where(tl.load(record + CROWDED) != 0, _lower(tl.load(record)), 0)


@triton.jit
def find_bound(values, counts, n, rank, crowd, threshold, record, SAMPLE: tl.constexpr):
    """Return the bound, at least 1, or 0 if none helps; and the width of a coarse bin, in bits.

    With a threshold the bound is never below the smallest magnitude that passes.
    """
    if counts is None:
        t, seen, largest = _sampled(values, n, rank, SAMPLE)
    else:
        t, seen, largest = _counted(counts, record, rank)
    # If the sample is full of ties, so is the vector: nearly every entry would be a candidate.
    helps = (crowd > 0) & ((seen <= crowd * rank + 64) | (t == 0))
    shift = 10
    if record is not None:
        # The last threshold may give a higher bound. Wider bins are then needed above it.
        least = lowered(record)
        shift = tl.where(least > t, 13, 10)
        t = tl.maximum(t, least)
    # Bins are just wide enough to reach from the bound to the largest magnitude seen.
    while ((largest - t) >> shift >= COARSE_BINS - 1) & (shift < FINE_BITS):
        shift += 1
    t = tl.where(helps, tl.maximum(t, 1), 0)
    if threshold is not None:
        t = tl.maximum(t, least_of(threshold))
    return t, shift


@triton.jit
def least_of(threshold):
    """Return the smallest magnitude, as bits, that passes a threshold; 0 if even zeros pass."""
    bits = tl.load(threshold).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # -0 counts as 0. Nothing passes a NaN of any bits.
    least = tl.where((bits < 0) & (bits != -2147483648), 0, size + 1)
    return tl.where(size > INFINITY, INFINITY + 1, least)
