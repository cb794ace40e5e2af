"""A scan that clears what the last selection chose: the residual of the reference, to the bit."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, ON_GPU  # isort: skip
from gradwire.kernels.bisect_list import bisect_list_torch
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.scan import scan_torch
from gradwire.kernels.select import above_torch, topk_torch
from gradwire.kernels.triton.bisect_list import bisect_list_triton
from gradwire.kernels.triton.scan import scan_triton
from gradwire.kernels.triton.select.entry import above_triton, topk_triton
from gradwire.kernels.triton.select.strategy import BY_BINS
from gradwire.kernels.triton.select.turns import BOUND, STRATEGY
from gradwire.kernels.triton.workspace import workspace
from gradwire.types import align
from tests.kernels.test_select import vector

NO = torch.zeros((), dtype=torch.bool, device=DEVICE)
YES = torch.ones((), dtype=torch.bool, device=DEVICE)


class Steps:
    """The same steps by the kernels, whose scan clears what was sent, and by the reference."""

    def __init__(self, size, k, block=64, dtype=torch.float32, maxima16=False):
        self.size, self.k, self.block = align(size), k, block
        self.edge = LastSelection(torch.device(DEVICE))
        self.mine = torch.zeros(self.size, device=DEVICE, dtype=dtype)
        self.theirs = self.mine.clone()
        kind = torch.int16 if maxima16 else torch.float32
        self.maxima = torch.zeros(self.size // block, dtype=kind, device=DEVICE)
        self.sent = None

    def step(self, pieces, skipped=NO, k=None):
        if isinstance(pieces, torch.Tensor):
            pieces = [(0, pieces)]
        k = self.k if k is None else k
        pieces = [(place, g.to(DEVICE)) for place, g in pieces]
        sent = (self.edge, None if self.sent is None else skipped)
        if self.sent is not None and not bool(skipped):
            self.theirs[self.sent.long()] = 0
        finite = scan_triton(self.mine, pieces, self.maxima, self.block, None, *sent)
        other = torch.zeros(self.size // self.block, device=DEVICE)
        assert bool(finite) == bool(scan_torch(self.theirs, pieces, other, self.block))
        assert torch.equal(self.mine, self.theirs)
        assert torch.equal(self.maxima, cut(other) if self.maxima.dtype == torch.int16 else other)
        indices, values, self.sent = self.choose(k)
        assert torch.equal(indices[: len(self.sent)], self.sent)
        assert self.edge.is_of(indices, values)
        assert not self.edge.is_of(indices.clone(), values)
        assert not self.edge.counts.any(), "the counts must be zero for the next scan"
        return indices

    def choose(self, k):
        indices, values = topk_triton(self.mine, k, self.maxima, self.block, self.edge)
        return indices, values, topk_torch(self.theirs, k)


def cut(maxima):
    """The 16 bits after the sign."""
    return (maxima.view(torch.int32) >> 15).to(torch.int16)


@pytest.mark.parametrize(("size", "k", "block"), [(9000, 20, 64), (3001, 30, 16)])
@pytest.mark.parametrize("maxima16", [False, True])
def test_steps_of_training(size, k, block, maxima16):
    run = Steps(size, k, block, maxima16=maxima16)
    torch.manual_seed(1)
    for _ in range(3):
        run.step(torch.randn(size))


@pytest.mark.parametrize("kind", ["all equal", "zeros", "one hot", "denormal"])
def test_other_ways_to_the_winners(kind):
    run = Steps(3003, 25, 32, maxima16=kind != "zeros")
    for step in range(2):
        run.step(vector(kind, 3003) * (1 + step))


def test_a_step_that_was_skipped_clears_nothing():
    run = Steps(3000, 30)
    torch.manual_seed(3)
    for skipped in (NO, YES, NO, YES, NO):
        run.step(torch.randn(3000), skipped)


def test_pieces_in_any_order_and_gaps():
    run = Steps(4096 + 640, 20)
    torch.manual_seed(5)
    for _ in range(3):
        run.step([(3072, torch.randn(1000)), (0, torch.randn(70)), (128, torch.randn(2001))])


def test_ties_are_cleared_up_to_the_last_that_was_sent():
    run = Steps(3000, 40)
    torch.manual_seed(6)
    for _ in range(3):
        run.step(torch.randint(-2, 3, (3000,)).float())


def test_a_bad_entry_keeps_its_residual_which_may_have_been_sent():
    run = Steps(3000, 30)
    torch.manual_seed(7)
    sent = run.step(torch.randn(3000))
    bad = torch.randn(3000)
    bad[sent[3]] = float("nan")
    bad[sent[4] + 1] = float("inf")
    run.step(bad)
    run.step(torch.randn(3000))


def test_bf16_residual():
    run = Steps(3000, 30, 64, torch.bfloat16)
    torch.manual_seed(8)
    for _ in range(3):
        run.step(torch.randn(3000).bfloat16())


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU; the interpreter ran the small sizes")
@pytest.mark.parametrize("density", [1e-4, 1e-3, 1e-2])
def test_full_size(density):
    block = 64 if density < 5e-3 else 16
    run = Steps(25_557_032, int(25_557_032 * density), block, maxima16=density < 1e-3)
    for _ in range(5):
        run.step(torch.randn(25_557_032, device=DEVICE))


def small_layer(size, layer, scale=100.0):
    """Large entries that lie together, as those of a small layer do."""
    u = torch.randn(size)
    u[1000 : 1000 + layer] *= scale
    return u


def header(word):
    """What the last selection left in the workspace."""
    work, _ = workspace(1, torch.zeros(0, device=DEVICE).device)
    return int(work[word.value])


def test_after_a_crowded_selection_the_last_edge_is_the_bound():
    torch.manual_seed(8)
    run, edges = Steps(20_000, 300, 32), []
    for step in range(4):
        run.step(small_layer(20_000, 400))
        bound = torch.tensor(header(BOUND), dtype=torch.int32).view(torch.float32)
        if step:
            assert bound == edges[-1] * 0.85
        else:
            assert bound < 3, "all a sample of the maxima can say: most winners are above 20"
        edges.append(run.edge.record[0].cpu().view(torch.float32).clone())
        assert edges[-1] > 20
        if step or not ON_GPU:
            # A GPU has so many parts that one of them has no room for all of this layer at first.
            assert header(STRATEGY) == BY_BINS.value


def test_an_edge_that_fell_far_is_no_bound():
    torch.manual_seed(9)
    run, fell = Steps(20_000, 300, 32), False
    for scale in (1.0, 1.0, 1e-4, 1e-4, 1e4, 1e4):
        run.mine.zero_()
        run.theirs.zero_()
        run.step(small_layer(20_000, 400) * scale)
        if scale == 1e-4 and not int(run.edge.record[2]):
            fell = True
    assert fell, "after a selection with too few candidates the sample has its turn again"


@pytest.mark.parametrize("block", [16, 32, 64])
def test_groups_full_of_winners(block):
    torch.manual_seed(10)
    run = Steps(12_000, 200, block, maxima16=True)
    for layer in (0, 9, 64, 300, 64, 3000):
        run.step(small_layer(12_000, layer))


class Thresholds(Steps):
    """The same where winners are what passes a threshold, at most k."""

    def choose(self, k):
        indices, values, count = above_triton(
            self.mine, self.threshold, k, self.maxima, self.block, self.edge
        )
        theirs, _, number = above_torch(self.theirs, self.threshold, k)
        assert int(count) == int(number)
        return indices, values, theirs[: int(number)]

    def step(self, gradient, threshold):
        self.threshold = torch.tensor(threshold, device=DEVICE)
        return super().step(gradient)


@pytest.mark.parametrize(
    ("kind", "block"),
    [("gaussian", 16), ("gaussian", 64), ("ties", 32), ("all equal", 16), ("small layer", 32)],
)
def test_what_passed_a_threshold_is_cleared(kind, block):
    run = Thresholds(6000, 60, block, maxima16=kind != "ties")
    torch.manual_seed(11)
    for threshold in (2.9, 2.0, 4.0, 1e9, 0.5, 3.0, 0.0, 3.0):
        g = torch.randn(6000)
        if kind == "ties":
            g = g.round()
        elif kind == "all equal":
            g = torch.ones(6000)
        elif kind == "small layer":
            g = small_layer(6000, 70)
        run.step(g, threshold)


class Halvings(Steps):
    """Half of k or more of the 2k largest are sent."""

    def choose(self, k):
        listed = topk_triton(self.mine, 2 * k, self.maxima, self.block, self.edge)
        indices, values, count = bisect_list_triton(self.mine, 1, *listed, k, self.edge)
        theirs = topk_torch(self.theirs, 2 * k)
        where, _, number = bisect_list_torch(self.theirs, 1, theirs, self.theirs[theirs.long()], k)
        assert int(count) == int(number)
        return indices, values, where[: int(number)]


@pytest.mark.parametrize("kind", ["gaussian", "all equal", "layers", "one hot"])
def test_what_the_halvings_left_of_a_list_is_cleared(kind):
    run = Halvings(3003, 25, 32)
    torch.manual_seed(6)
    for step in range(4):
        run.step(vector(kind, 3003) * (1 + step))
