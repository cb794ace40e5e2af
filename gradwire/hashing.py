"""The hashes of this package, each under its published name.

Every result is part of a format or of a reproducible run: never change a constant.
The same hashes for kernels on CUDA stand in kernels/triton/hashing.py.
"""

from hashlib import blake2b

from torch import Tensor

_WORD = 0xFFFFFFFF
"""A mask of the low 32 bits."""
GOLDEN = 0x9E3779B9
"""2^32 divided by the golden ratio."""
_LOWBIAS32 = 0x7FEB352D, 0x846CA68B
_FMIX32 = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32
# Factors of 64 bits stand as signed numbers, because torch has no unsigned arithmetic.
_SPLITMIX64 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_GOLDEN64 = 0x9E3779B97F4A7C15 - 2**64


def lowbias32(x: Tensor) -> Tensor:
    """Hash the low 32 bits of each int64 (lowbias32 of Wellons 2018).

    Return int64 in 0 .. 2^32 - 1.
    """
    x = x & _WORD
    x = ((x ^ (x >> 16)) * _LOWBIAS32[0]) & _WORD
    x = ((x ^ (x >> 15)) * _LOWBIAS32[1]) & _WORD
    return x ^ (x >> 16)


def lowbias32_int(x: int) -> int:
    """Return `lowbias32` of a Python int, without a tensor."""
    x &= _WORD
    x = ((x ^ (x >> 16)) * _LOWBIAS32[0]) & _WORD
    x = ((x ^ (x >> 15)) * _LOWBIAS32[1]) & _WORD
    return x ^ (x >> 16)


def fmix32(x: Tensor) -> Tensor:
    """Hash each int32 by the finaliser of MurmurHash3 (Appleby 2011); products wrap around."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FMIX32[0]
    x = (x ^ ((x >> 13) & 0x7FFFF)) * _FMIX32[1]
    return x ^ ((x >> 16) & 0xFFFF)


def splitmix64_(x: Tensor) -> Tensor:
    """Hash each int64 in place by the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = _fold_(x, 30).mul_(_SPLITMIX64[0])
    x = _fold_(x, 27).mul_(_SPLITMIX64[1])
    return _fold_(x, 31)


def _fold_(x: Tensor, shift: int) -> Tensor:
    # A shift of an int64 copies the sign: the mask removes the copies.
    return x.bitwise_xor_((x >> shift).bitwise_and_(2 ** (64 - shift) - 1))


def splitmix64_golden(x: Tensor) -> Tensor:
    """Hash each int64 as SplitMix64 does, with the golden ratio as the second factor."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _SPLITMIX64[0]
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _GOLDEN64
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def hash_words(*words: int) -> int:
    """Return one int64 for Python ints.

    The first round of SplitMix64 mixes in each word.
    """
    state = _GOLDEN64 % 2**64
    for word in words:
        state = ((state ^ (word & (2**64 - 1))) * 0xBF58476D1CE4E5B9) % 2**64
        state ^= state >> 31
    return state - 2**64 if state >= 2**63 else state


def blake2b_seed(*parts: int) -> int:
    """Return a seed in [0, 2^63) that depends on every part and on the order of the parts."""
    digest = blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
