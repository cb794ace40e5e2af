"""The hashes of `gradwire.hashing` that kernels compute, bit for bit."""

import triton


@triton.jit
def lowbias32(x):
    """Hash uint32: see `gradwire.hashing.lowbias32`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def fmix32(x):
    """Hash uint32: see `gradwire.hashing.fmix32`."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def splitmix64_golden(x):
    """Hash int64: see `gradwire.hashing.splitmix64_golden`."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7046029254386353131
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
