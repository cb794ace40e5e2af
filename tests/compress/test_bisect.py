"""Threshold binary search: the tests done side by side are those of the loop."""

import pytest
import torch

from gradwire.kernels.bisect_list import HALVINGS, bisection_path
from tests.compress.test_selectors import choose, drawn
from tests.distributions import MAKERS


@pytest.mark.parametrize("goal", [0.0, 0.3, 0.5, 0.7071, 1.0])
def test_path_is_that_of_the_loop(goal):
    low, high, expected = 0.0, 1.0, []
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        expected.append(middle)
        low, high = (low, middle) if middle >= goal else (middle, high)
    assert bisection_path(torch.tensor(goal), HALVINGS).tolist() == expected


def loop(x, k):
    """n of the last test of the published loop."""
    mean, top, low, high = float(x.mean()), float(x.max()), 0.0, 1.0
    for _ in range(HALVINGS):
        ratio = (low + high) / 2
        n = int((x > mean + ratio * (top - mean)).sum())
        if k < n < 2 * k:
            break
        low, high = (low, ratio) if 2 * n < k else (ratio, high)
    return n


@pytest.mark.parametrize("kind", MAKERS)
def test_counts_are_those_of_the_loop(kind):
    """u is small enough to be its own sample; a rounding of t may move one entry or two."""
    u = drawn(kind, 30_016)
    for k in (30, 300, 3000):
        found = int(choose("bisect", u, k).count)
        assert found == pytest.approx(max(loop(u.abs(), k), k // 2), abs=2)
