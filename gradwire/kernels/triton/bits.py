"""Magnitudes as bits, and words that programs share. Positive floats sort as their bits do."""

import numpy as np
import triton
import triton.language as tl

from gradwire.kernels.scan import LARGEST_U

INFINITY = tl.constexpr(0x7F800000)
LARGEST = tl.constexpr(int(np.float32(LARGEST_U).view(np.int32)))


@triton.jit
def magnitude(x):
    """Return the bits of |x| as fp32; they sort as the magnitudes do."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def is_bad(new, old):
    """Return True where `new` may not take the place of `old`: see `usable` in kernels/scan.py."""
    return magnitude(new) > tl.minimum(tl.maximum(magnitude(old), LARGEST), INFINITY - 1)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Round fp32 to `DTYPE`, ties to even; x is finite.

    bf16 is rounded by hand, because Triton's interpreter would cut off the lower bits.
    """
    if DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def bits_of(maximum):
    """Return the bits of a block maximum.

    An int16 maximum holds only the first 16 bits after the sign; the others become 0.
    """
    if maximum.dtype == tl.int16:
        return (maximum.to(tl.int32) & 0xFFFF) << 15
    else:
        return magnitude(maximum)


@triton.jit
def load_shared(word):
    """Load a word that another program of this launch may have written."""
    return tl.load(word, cache_modifier=".cg")
