"""The largest of each piece: what topk would choose of each alone."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels.largest import largest_in_pieces_cpu, largest_in_pieces_torch
from tests.kernels.test_select import KINDS, sorted_topk, vector

BLOCK = 16


def definition(u, bounds, wanted, capacity):
    pieces = zip(itertools.pairwise(bounds), wanted, strict=True)
    found = torch.cat([sorted_topk(u[a:b], min(k, b - a)) + a for (a, b), k in pieces])
    found = found[u[found] != 0]
    if found.numel() > capacity:
        found = found[sorted_topk(u[found], capacity)]
    return found.to(torch.int32)


@pytest.mark.parametrize("version", [largest_in_pieces_torch, largest_in_pieces_cpu])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    blocks=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    ragged=st.integers(0, BLOCK - 1),
    share=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
    room=st.sampled_from([0.3, 1.0, 3.0]),
    data=st.data(),
)
def test_definition(version, kind, blocks, ragged, share, room, data):
    bounds = [BLOCK * n for n in itertools.accumulate(blocks, initial=0)]
    bounds[-1] -= ragged
    u = vector(kind, bounds[-1])
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    wanted = [data.draw(st.sampled_from([0, round(share * n), n])) for n in sizes]
    capacity = max(1, round(room * sum(wanted)))
    maxima = torch.stack([part.abs().max() for part in u.split(BLOCK)])
    given = torch.tensor(bounds), torch.tensor(wanted), capacity, maxima, BLOCK
    indices, values, count = version(u, *given)
    expected = definition(u, bounds, wanted, capacity)
    n = expected.numel()
    assert indices.dtype == count.dtype == torch.int32
    assert values.dtype == u.dtype
    assert int(count) == n
    assert torch.equal(indices[:n], expected)
    assert torch.equal(values[:n], u[expected.long()])
    assert bool((indices[n:] == u.numel()).all())
    assert not values[n:].any()
