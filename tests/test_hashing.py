"""Hashes: the published values. Tests of draw, sketch and codes compare them with the kernels."""

import torch

from gradwire import hashing


def test_published_values():
    """MurmurHash3's finaliser of 1, and the first output of SplitMix64 from 0."""
    one = hashing.fmix32(torch.tensor([1], dtype=torch.int32))
    assert int(one) % 2**32 == 0x514E28B7
    first = hashing.splitmix64_(torch.tensor([0x9E3779B97F4A7C15 - 2**64]))
    assert int(first) % 2**64 == 0xE220A8397B1DCDAF


def test_words_hash_into_one_by_their_order():
    seen = {hashing.hash_words(*words) for words in ((1, 2), (2, 1), (12,), (1, 2, 0))}
    assert len(seen) == 4
    assert all(-(2**63) <= h < 2**63 for h in seen)
