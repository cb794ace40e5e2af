"""Made inputs, and all that the golden tests take from inside gradwire.

Inputs are integers from a counter, scaled by powers of two: the same bits with every NumPy and
every torch. When modules move, only the imports of this file change.
"""

import hashlib
from pathlib import Path

import numpy as np
import torch

from gradwire.encode import Encoding, decode, encode
from gradwire.encode.format import INDICES, STOCHASTIC, VALUES
from gradwire.encode.noise import Noise
from gradwire.types import Sparse

__all__ = [
    "DATA",
    "INDICES",
    "STOCHASTIC",
    "VALUES",
    "Encoding",
    "Noise",
    "Sparse",
    "decode",
    "digest",
    "encode",
    "gradient",
    "momentum_of",
    "numbers",
    "words",
]

DATA = Path(__file__).parent / "data"


def words(seed, count):
    """`count` words of 64 bits: SplitMix64 of seed and place, the same for all time."""
    golden, first, second = (
        np.uint64(word) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
    )
    start = np.full(count, seed, np.uint64) << np.uint64(32)
    x = (start + np.arange(1, count + 1, dtype=np.uint64)) * golden
    x = (x ^ (x >> np.uint64(30))) * first
    x = (x ^ (x >> np.uint64(27))) * second
    return x ^ (x >> np.uint64(31))


def numbers(seed, count, low, high):
    """`count` int64 in low..high, both included."""
    span = np.uint64(high - low + 1)
    return (words(seed, count) % span).astype(np.int64) + low


def gradient(rank, step, size):
    """fp32, a part that all ranks share and one of the rank's own; one entry in 32 is large.

    Integers times 2^-16: squares add up exactly in fp64.
    """
    shared = numbers(1000 + step, size, -255, 255) * numbers(2000 + step, size, 1, 255)
    large = 1 + 31 * (numbers(3000 + step, size, 0, 31) == 0)
    seed = 10_000 + 1000 * rank + step
    own = numbers(seed, size, -255, 255) * numbers(seed + 50_000, size, 1, 255)
    return (shared * large + own).astype(np.float32) * np.float32(2.0**-16)


def digest(*arrays):
    """sha256 of the bytes of arrays or tensors, one after the other."""
    found = hashlib.sha256()
    for array in arrays:
        array = array.detach().numpy() if isinstance(array, torch.Tensor) else array
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def momentum_of(wire):
    """The momentum of every parameter as the next step finds it; nothing without momentum."""
    skipped = wire.was_skipped()
    return {
        slot.name: bundle.view(bundle.momentum(skipped), slot).clone()
        for bundle in wire.bundles
        if bundle.velocity is not None
        for slot in bundle.slots
    }
