"""The digest that replicas are compared by."""

import pytest
import torch

from gradwire.state import drift as watch
from gradwire.state.drift import digest

M = 2**64 - 1


def reference(words):
    """The formula in Python's whole numbers."""
    total = 0
    for i, word in enumerate(words):
        x = ((i << 32) + word) & M
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M
        total += x ^ (x >> 31)
    return total & M


@pytest.mark.parametrize("at_once", [3, 2**16])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool],
)
def test_the_formula(monkeypatch, dtype, at_once):
    monkeypatch.setattr(watch, "WORDS_CPU", at_once)
    for shape in ((), (0,), (1,), (7,), (3, 5)):
        tensor = torch.randn(shape).to(dtype)
        view = {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize, torch.int32)
        assert int(digest(tensor)) & M == reference(tensor.reshape(-1).view(view).tolist())


def test_every_bit_and_every_place_counts():
    tensor = torch.randn(67)
    seen = {int(digest(tensor))}
    for bit in range(67 * 32):
        other = tensor.clone()
        other.view(torch.int32)[bit // 32] ^= -(2**31) if bit % 32 == 31 else 1 << bit % 32
        seen.add(int(digest(other)))
    seen.update(int(digest(tensor.roll(n))) for n in range(1, 67))
    seen.update(int(digest(torch.cat([tensor, torch.zeros(n)]))) for n in range(1, 4))
    assert len(seen) == 1 + 67 * 32 + 66 + 3


def test_signs_that_change_in_pairs_do_not_cancel():
    """A top bit flipped twice, which a plain weighted sum of words would miss."""
    zeros = torch.zeros(50)
    seen = {int(digest(zeros))}
    for i in range(50):
        for j in range(i):
            other = zeros.clone()
            other[[i, j]] = -0.0
            seen.add(int(digest(other)))
    assert len(seen) == 1 + 50 * 49 // 2


def test_layout_in_memory_does_not_count():
    tensor = torch.randn(2, 3, 4, 5)
    other = tensor.to(memory_format=torch.channels_last)
    assert int(digest(other)) == int(digest(tensor))
