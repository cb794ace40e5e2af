"""Gaussian_k's threshold from what the scan counted: between the bounds of k and 1.25 k blocks."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, ON_GPU  # isort: skip
from gradwire.compress.gaussiank import gaussiank
from gradwire.kernels.select import topk_torch
from gradwire.kernels.triton.scan import scan_triton
from gradwire.kernels.triton.select.entry import above_triton, quantile_triton
from gradwire.kernels.triton.select.sizes import UNIT, launch_sizes, processors
from gradwire.kernels.triton.select.turns import BOUND
from gradwire.types import Memory, Scan
from tests.kernels.test_select import vector
from tests.kernels.triton.test_last_selection import NO, Steps, header
from tests.kernels.triton.test_select_counts import SIZE, counted_entries, counted_units, few

__all__ = ["few"]


class Quantiles(Steps):
    """The k largest beyond `scale` root mean squares, zeros never."""

    scale = 3.0

    def choose(self, k):
        zero = torch.zeros((), device=DEVICE)
        known = (self.maxima, self.block, self.edge)
        if self.edge.has_counts:
            found = quantile_triton(self.mine, self.scale, k, *known)
        else:
            found = above_triton(self.mine, zero, k, *known)
        indices, values, count = found
        largest = topk_torch(self.theirs, k)
        largest = largest[self.theirs[largest.long()] != 0]
        assert int(count) == len(largest)
        assert torch.equal(values[: len(largest)], self.theirs[largest.long()])
        assert bool((indices[len(largest) :] == self.size).all())
        return indices, values, largest


DATA = ["gaussian", "layers", "all equal", "zeros", "one hot"]
CASES = [(3.0, kind) for kind in DATA]
# Far bounds with some kinds each, because the interpreter is slow; on a GPU with all.
CASES += [(1e-9, kind) for kind in (DATA if ON_GPU else DATA[:2])]
CASES += [(1e9, kind) for kind in (DATA if ON_GPU else DATA[2::2])]


@pytest.mark.parametrize(("scale", "kind"), CASES)
def test_whatever_the_quantile_the_k_largest_are_found(scale, kind):
    run = Quantiles(3003, 25, 32, maxima16=kind != "layers")
    run.scale = scale
    torch.manual_seed(1)
    for step in range(3):
        run.step(vector(kind, 3003) * (1 + step))


@pytest.mark.parametrize("scale", [0.1, 2.68, 40.0])
def test_the_bound_is_the_quantile_held_between_two_counts(scale, few):
    """Of 0.1 the lower of these, of 40 the upper one."""
    torch.manual_seed(2)
    k, block = 100, 32
    run = Quantiles(SIZE, k, block, maxima16=True)
    run.scale = scale
    run.step(torch.randn(SIZE))
    run.step(torch.randn(SIZE))
    p = launch_sizes(SIZE, k, block, processors(DEVICE))
    units = torch.tensor(counted_units(SIZE, few))
    seen = run.maxima.cpu().view(-1, UNIT // block)[units].flatten().int() & 0xFFFF
    seen = seen.sort(descending=True).values << 15
    sure, low = int(seen[p.counted - 1]), int(seen[p.loose - 1])
    assert low < sure
    guess = scale * counted_entries(run.theirs, few).square().mean().sqrt().float()
    guess = int(guess.view(torch.int32))
    assert [0.1, 2.68, 40.0].index(scale) == (guess > low) + (guess > sure)
    assert header(BOUND) == pytest.approx(min(max(guess, low), sure), abs=2)


def test_after_a_scan_that_counted_gaussiank_takes_its_threshold_from_it(monkeypatch):
    torch.manual_seed(3)
    run, memory = Steps(3003, 25, 32, maxima16=True), Memory()
    asked = []
    monkeypatch.setitem(gaussiank.__globals__, "level", lambda *a, **b: asked.append(a))
    run.step(torch.randn(3003))
    scan_triton(run.mine, [(0, torch.randn(3003).to(DEVICE))], run.maxima, 32, None, run.edge, NO)
    scan = Scan(torch.ones(()), run.maxima, 32, run.edge)
    found = gaussiank(run.mine, 25, memory, scan)
    assert not asked
    assert not run.edge.has_counts
    assert torch.equal(found.indices, topk_torch(run.mine, 25))
    assert ON_GPU or int(found.count) == 25
