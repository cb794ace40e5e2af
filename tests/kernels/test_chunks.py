"""Top-k inside every chunk: what topk would choose of each alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels.chunks import chunks_cpu, chunks_torch
from tests.kernels.test_select import KINDS, sorted_topk, vector


def definition(u, chunk, each, last):
    whole = u.numel() // chunk * chunk
    parts = [sorted_topk(u[i : i + chunk], each) + i for i in range(0, whole, chunk)]
    return torch.cat([*parts, sorted_topk(u[whole:], last) + whole]).to(torch.int32)


@pytest.mark.parametrize("version", [chunks_torch, chunks_cpu])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 5000),
    chunk=st.sampled_from([64, 192, 1024]),
    share=st.sampled_from([0.001, 0.02, 0.3, 1.0]),
    grouped=st.booleans(),
)
def test_definition(version, kind, size, chunk, share, grouped):
    u = vector(kind, size)
    each, last = max(1, round(share * chunk)), round(share * (size % chunk))
    maxima, block = None, 0
    if grouped:
        maxima, block = torch.stack([part.abs().max() for part in u.split(16)]), 16
    indices, values = version(u, chunk, each, last, maxima, block)
    assert indices.dtype == torch.int32
    assert torch.equal(indices, definition(u, chunk, each, last))
    assert torch.equal(values, u[indices.long()])
