"""The scan: residual += gradient with block maxima, and nothing non-finite gets in."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.kernels.scan import LARGEST_U, STRETCH, scan_cpu, scan_torch
from gradwire.types import align


def problem(lengths, dtype, seed, bad=()):
    generator = torch.Generator().manual_seed(seed)
    offset, pieces = 0, []
    for n in lengths:
        pieces.append((offset, torch.randn(n, generator=generator).to(dtype)))
        offset += align(n)
    residual = torch.zeros(offset)
    for start, g in pieces:
        residual[start : start + g.numel()] = torch.randn(g.numel(), generator=generator)
    for piece, where, value in bad:
        pieces[piece % len(pieces)][1][where % lengths[piece % len(pieces)]] = value
    return residual, pieces


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    block=st.sampled_from([16, 64]),
    unscale=st.sampled_from([None, 1 / 1024, 1 / 3]),
    bad=st.lists(
        st.tuples(
            st.integers(0, 5),
            st.integers(0, 399),
            st.sampled_from([float("inf"), float("-inf"), float("nan")]),
        ),
        max_size=3,
    ),
    seed=st.integers(0, 99),
)
def test_cpu_equals_reference(lengths, dtype, block, unscale, bad, seed):
    residual, pieces = problem(lengths, dtype, seed, bad)
    factor = None if unscale is None else torch.tensor(unscale)
    results = []
    for version in (scan_torch, scan_cpu):
        u, maxima = residual.clone(), torch.full((residual.numel() // block,), float("nan"))
        finite = version(u, pieces, maxima, block, factor)
        assert bool(finite) == (not bad)
        assert torch.isfinite(u).all()
        assert torch.equal(maxima, u.abs().view(-1, block).amax(1))
        results.append(u)
    if unscale is None:
        assert torch.equal(*results)
    else:
        # torch.add(alpha=) multiplies and adds with one rounding, the reference with two.
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_a_bad_entry_keeps_its_residual_and_its_neighbours_go_on():
    residual, pieces = problem([100], torch.float32, 0, [(0, 7, float("nan"))])
    for version in (scan_torch, scan_cpu):
        u = residual.clone()
        assert not bool(version(u, pieces, None, 64, None))
        expected = residual[:100] + pieces[0][1].nan_to_num(0)
        assert torch.equal(u[:100], expected)


def test_finite_entries_whose_sum_overflows_count_as_not_finite():
    huge = torch.full((64,), torch.finfo(torch.float32).max)
    for version in (scan_torch, scan_cpu):
        u = huge.clone()
        assert not bool(version(u, [(0, huge)], None, 64, None))
        assert torch.equal(u, huge)


BEYOND = LARGEST_U * (1 + 2.0**-23)


@pytest.mark.parametrize(
    ("residual", "gradient", "gets_in"),
    [
        (0.0, LARGEST_U, True),
        (0.0, -BEYOND, False),
        (-LARGEST_U, -LARGEST_U, False),
        (LARGEST_U, 1e6, True),
        (-BEYOND, 1e6, True),
        (4 * LARGEST_U, -LARGEST_U, True),
        (4 * LARGEST_U, LARGEST_U, False),
        (4 * LARGEST_U, float("nan"), False),
        (LARGEST_U, -3 * LARGEST_U, False),
    ],
)
def test_the_largest_entry(residual, gradient, gets_in):
    """An old entry beyond the largest may stay and shrink, but not grow."""
    for version in (scan_torch, scan_cpu):
        u, maxima = torch.zeros(64), torch.zeros(1)
        u[3], u[4] = residual, 1.0
        pieces = [(0, torch.zeros(64))]
        pieces[0][1][3], pieces[0][1][4] = gradient, 2.0
        assert bool(version(u, pieces, maxima, 64, None)) == gets_in
        assert float(u[3]) == (residual + gradient if gets_in else residual)
        assert float(u[4]) == 3.0
        assert float(maxima) == float(u.abs().amax())


@pytest.mark.parametrize("size", [STRETCH - 1, STRETCH, STRETCH + 1, 2 * STRETCH + 77])
def test_pieces_longer_than_a_block(size):
    residual, pieces = problem([size], torch.float32, 1)
    u, maxima = residual.clone(), torch.empty(residual.numel() // 64)
    assert bool(scan_cpu(u, pieces, maxima, 64, None))
    assert torch.equal(u[:size], residual[:size] + pieces[0][1])
    assert torch.equal(maxima, u.abs().view(-1, 64).amax(1))
