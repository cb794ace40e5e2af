"""ranked in Triton: the reference's bits."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire.kernels.ranked_torch import ranked_torch
from gradwire.kernels.ranked_triton import MOST, ranked_triton

DATA = {
    "normal": lambda n: torch.randn(n).abs(),
    "wide": lambda n: torch.randn(n).mul(20).exp(),
    "ties": lambda n: torch.randint(0, 3, (n,)).float(),
    "zeros": torch.zeros,
    "denormal": lambda n: torch.randint(0, 50, (n,), dtype=torch.int32).view(torch.float32),
    "largest": lambda n: torch.full((n,), torch.finfo(torch.float32).max),
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize(("n", "step"), [(1, 1), (4096, 1), (5001, 1), (9000, 7)])
def test_equals_the_reference(data, n, step):
    torch.manual_seed(n)
    values = DATA[data](n).to(DEVICE)
    seen = -(-n // step)
    for ranks in ((1,), (seen,), (seen + 1,), (1, seen), (seen // 3 + 1, seen // 2 + 1)):
        found, expected = (f(values, step, *ranks) for f in (ranked_triton, ranked_torch))
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), ranks


def test_more_than_one_program_holds():
    values = torch.rand(MOST + 5).to(DEVICE)
    assert torch.equal(
        ranked_triton(values, 1, 3, 90), values.sort(descending=True).values[[2, 89]]
    )


@gpu
def test_of_many_maxima():
    values = torch.rand(4_323_673, device=DEVICE)
    assert torch.equal(ranked_triton(values, 1051, 300, 400), ranked_torch(values, 1051, 300, 400))
