"""halve in Triton: what the reference chooses, and where it ends."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire.kernels.bisect_list import bisect_list_torch
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.select import topk_torch
from gradwire.kernels.triton.bisect_list import bisect_list_triton
from gradwire.kernels.triton.select.entry import topk_triton
from gradwire.kernels.triton.select.turns import HEADER
from gradwire.kernels.triton.workspace import workspace
from tests.compress.test_degenerate import INPUTS, K
from tests.distributions import draw
from tests.kernels.compare import agree

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def check(u, k, step):
    """As the reference has it, the counters at rest, and the edge just behind what passed."""
    u = u.to(DEVICE)
    edge = LastSelection(DEVICE)
    indices, values = topk_triton(u, min(2 * k, u.numel()), None, 0, edge)
    found = bisect_list_triton(u, step, indices, values, k, edge)
    # In fp32 the reference's sum may overflow.
    expected = bisect_list_torch(u.double(), step, indices, values, k)
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    assert not workspace(0, u.device)[0][: HEADER.value].any()
    assert edge.is_of(*found[:2])
    bound, last, crowded = edge.record.tolist()
    bits = u.float().abs().view(torch.int32)
    place = torch.arange(u.numel(), device=DEVICE)
    sent = (bits > bound) | ((bits == bound) & (place <= last))
    assert torch.equal(place[sent & (bits > 0)].int(), found[0][: int(found[2])])
    assert not crowded or int(found[2]) == indices.numel()
    return int(found[2])


@pytest.mark.parametrize("kind", ["gaussian", "t3", "layers", "zeros", "uniform"])
def test_every_kind_of_data(kind):
    u = draw(kind, 9_011)
    for k, step in ((1, 1), (301, 7), (2500, 1)):
        assert min(k / 2, u.count_nonzero()) <= check(u, k, step) <= 2 * k


@pytest.mark.parametrize("name", INPUTS)
def test_what_has_no_range(name):
    for k in (1, K):
        check(INPUTS[name], k, 1)


def test_ties_are_cut_by_position():
    """Three values: all halvings end between two of them."""
    u = torch.randint(1, 4, (5000,)).float()
    for k in (10, 900, 4000):
        check(u, k, 1)


def test_one_entry_and_other_dtypes():
    check(torch.tensor([-3.0]), 1, 1)
    check(torch.randn(4001).to(torch.bfloat16), 60, 1)


def test_many_items_and_nobody_to_tell():
    u, k = draw("t3", 40_000).to(DEVICE), 9000
    indices = topk_torch(u, 2 * k)
    args = (u, 3, indices, u[indices.long()], k)
    agree(bisect_list_torch, bisect_list_triton, *args)


@gpu
@pytest.mark.parametrize("kind", ["gaussian", "t3", "layers"])
def test_full_size(kind):
    u = draw(kind, 6_553_600).to(DEVICE)
    for k in (6554, 200_000):
        check(u, k, 397)
        indices = topk_torch(u, 2 * k)
        args = (u, 397, indices, u[indices.long()], k)
        first = bisect_list_triton(*args)
        for _ in range(20):
            assert all(
                torch.equal(a, b) for a, b in zip(bisect_list_triton(*args), first, strict=True)
            )
