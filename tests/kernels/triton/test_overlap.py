"""A scan that is launched early: it waits for what the kernel before it writes."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, ON_GPU, gpu  # isort: skip
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer

from gradwire.kernels.pieces import PieceTable
from gradwire.kernels.triton.launch import overtakes
from gradwire.kernels.triton.scan import TILE, scan_part

pytestmark = [
    gpu,
    pytest.mark.skipif(ON_GPU and not overtakes(0), reason="needs a GPU of Hopper's or later"),
]


@triton.jit
def _late(out, value, count, nanoseconds, TILE: tl.constexpr):
    """Lets the kernel after it begin, and writes when that has long begun."""
    gdc_launch_dependents()
    begin = globaltimer()
    now = begin
    while now - begin < nanoseconds:
        now = globaltimer()
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + i, value, mask=i < count)


@pytest.mark.parametrize("tiles", [1, 8, 500])
def test_it_waits_for_what_is_before_it(tiles):
    """Of a kernel that allows it to begin at once; most allow it when they end."""
    count = tiles * TILE - 7
    gradient = torch.zeros(count, device=DEVICE)
    for value in range(1, 6):
        residual = torch.zeros(count, device=DEVICE)
        torch.cuda.synchronize()
        _late[(tiles,)](gradient, float(value), count, 300_000, TILE)
        scan_part(residual, PieceTable.whole(gradient, count, TILE), None, 64)
        assert torch.equal(residual, torch.full_like(residual, value))
