"""scan and momentum in Triton: the reference's bits, in pieces, with gaps, with bad gradients."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire.kernels.momentum import momentum_torch
from gradwire.kernels.pieces import merge_runs, piece_tables
from gradwire.kernels.scan import LARGEST_U, scan_torch
from gradwire.kernels.triton.momentum import momentum_triton
from gradwire.kernels.triton.scan import TILE, scan_triton
from gradwire.types import align
from tests.kernels.compare import agree

LAYOUTS = {
    "one": [2 * TILE + 100],
    "exact": [2 * TILE],
    "merged": [TILE, 64, 128],
    "ugly": [1, 7, 63, 64, 65, TILE + 1],
}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def problem(layout, dtype, missing=None, shift=0, bad=None):
    """Residual and pieces; `missing` has no gradient, `shift` entries make the bucket unaligned."""
    generator = torch.Generator().manual_seed(1)
    lengths = LAYOUTS[layout]
    bucket = torch.randn(sum(lengths) + shift, generator=generator).to(dtype).to(DEVICE)[shift:]
    residual = torch.zeros(sum(map(align, lengths)))
    pieces, place, start = [], 0, 0
    for i, n in enumerate(lengths):
        residual[place : place + n] = torch.randn(n, generator=generator)
        if i != missing:
            pieces.append((place, bucket[start : start + n]))
        place, start = place + align(n), start + n
    if bad is not None:
        bucket[-1], bucket[0] = bad, -bad
    return residual.to(DEVICE), pieces


def both(reference, version, residual, pieces, block, maxima, *more, velocity=None):
    """Whether all entries were finite."""
    state = [] if velocity is None else [velocity]
    out = torch.full((residual.numel() // block,), -1.0, device=DEVICE) if maxima else None
    (finite,) = agree(reference, version, residual, *state, pieces, out, block, *more)
    return bool(finite)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("block", [16, 64])
def test_scan_equals_reference(layout, dtype, block):
    for shift in (0, 1):
        residual, pieces = problem(layout, dtype, shift=shift)
        assert both(scan_torch, scan_triton, residual, pieces, block, True)
        assert both(scan_torch, scan_triton, residual, pieces, block, False)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("maxima", [True, False])
def test_what_is_not_finite_stays_out(bad, maxima):
    for layout in LAYOUTS:
        residual, pieces = problem(layout, FP32, bad=bad)
        assert not both(scan_torch, scan_triton, residual, pieces, 32, maxima)


def test_a_sum_that_overflows_stays_out():
    residual, pieces = problem("one", FP32)
    residual[5] = pieces[0][1][5] = 3e38
    assert not both(scan_torch, scan_triton, residual, pieces, 32, True)


LARGE = [
    float("inf"),
    0.0,
    LARGEST_U,
    LARGEST_U * (1 + 2.0**-23),
    4 * LARGEST_U,
    3.4e38,
    -LARGEST_U,
    1e6,
]


@pytest.mark.parametrize("residual", LARGE)
@pytest.mark.parametrize("gradient", LARGE)
def test_the_largest_entry(residual, gradient):
    """Each of the two in each place, with fp32 and bf16 residuals and with momentum."""
    u, pieces = problem("ugly", FP32)
    u[64 + 3], pieces[1][1][3] = residual, gradient
    both(scan_torch, scan_triton, u, pieces, 32, True)
    both(scan_torch, scan_triton, u.to(BF16), pieces, 32, True)
    for size, nesterov in ((0.0, False), (1.0, True), (LARGEST_U, False), (LARGEST_U, True)):
        both(
            momentum_torch, momentum_triton, u, pieces, 32, True, 0.9, None, nesterov,
            velocity=size * torch.ones_like(u),
        )  # fmt: skip


def test_the_gradient_is_unscaled():
    residual, pieces = problem("ugly", FP16)
    unscale = torch.tensor(1 / 3, device=DEVICE)
    assert both(scan_torch, scan_triton, residual, pieces, 32, True, unscale)


@pytest.mark.parametrize("missing", [0, 2, 5])
def test_maxima_where_no_piece_is(missing):
    residual, pieces = problem("ugly", FP32, missing=missing)
    assert both(scan_torch, scan_triton, residual, pieces, 16, True)
    assert both(scan_torch, scan_triton, residual, [], 16, True)


def test_pieces_of_two_dtypes():
    residual, pieces = problem("ugly", FP32)
    pieces[1] = (pieces[1][0], pieces[1][1].to(BF16))
    assert both(scan_torch, scan_triton, residual, pieces, 16, True)


def test_a_bf16_residual():
    for layout in ("one", "ugly"):
        residual, pieces = problem(layout, FP32)
        assert both(scan_torch, scan_triton, residual.to(BF16), pieces, 32, True)
        pieces[0][1][0] = 3.4e38
        assert not both(scan_torch, scan_triton, residual.to(BF16), pieces, 32, True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_momentum_equals_reference(layout, bad):
    residual, pieces = problem(layout, FP32, bad=bad)
    velocity = residual.flip(0).clone()
    unscale = torch.tensor(0.25, device=DEVICE)
    for maxima, more in ((True, ()), (False, (unscale,)), (True, (unscale, True))):
        finite = both(
            momentum_torch, momentum_triton, residual, pieces, 32, maxima, 0.9, *more,
            velocity=velocity,
        )  # fmt: skip
        assert finite == (bad is None)


def test_momentum_leaves_other_parameters_alone():
    residual, pieces = problem("ugly", FP32, missing=2)
    both(
        momentum_torch, momentum_triton, residual, pieces, 32, True, 0.9, velocity=residual.clone()
    )


def test_slices_that_follow_each_other_are_one_run():
    _, pieces = problem("merged", FP32)
    assert len(merge_runs(pieces)) == 1
    assert merge_runs(pieces)[0][2:] == (TILE + 192, TILE + 192)
    _, pieces = problem("ugly", FP32)
    assert [length for _, _, length, _ in merge_runs(pieces)] == [1, 7, 63, 64 + 65, TILE + 1]


def test_any_number_of_pieces_is_one_launch_and_its_table_is_made_once():
    residual, pieces = problem("ugly", FP32)
    where = residual.numel(), residual.device
    first = piece_tables(*where, pieces, True, TILE)
    assert len(first) == 1
    assert piece_tables(*where, pieces, True, TILE)[0] is first[0]
    assert piece_tables(*where, pieces[1:], True, TILE)[0] is not first[0]


@gpu
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_full_size(dtype):
    LAYOUTS["full"] = [25_557_032, 1000, 77, 9_000_001]
    for shift in (0, 1):
        residual, pieces = problem("full", dtype, shift=shift)
        assert both(scan_torch, scan_triton, residual, pieces, 32, True)
