"""A head that is pruned while the tail is scanned changes nothing, whatever the data."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, ON_GPU, gpu  # isort: skip
from gradwire.accumulate.bundle import Bundle
from gradwire.choose import choose
from gradwire.compress import METHODS
from gradwire.config import Config
from gradwire.kernels import candidates_triton, plan_triton
from gradwire.kernels.edge import Edge
from gradwire.kernels.pieces import Pieces, table
from gradwire.kernels.scan_torch import scan_torch
from gradwire.kernels.scan_triton import TILE, scan_triton
from gradwire.kernels.topk_torch import topk_torch
from gradwire.kernels.topk_triton import topk_triton
from gradwire.kernels.workspace_triton import workspace
from gradwire.types import Delivered, Slot

GROUP = 16
SIZE = 65_536 * (64 if ON_GPU else 1) - 192
K = SIZE // 1000
NEVER = torch.zeros((), dtype=torch.bool, device=DEVICE)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Phase 0 and heads for vectors as small as these."""
    monkeypatch.setattr(candidates_triton, "LARGE", 1 << 14)
    monkeypatch.setattr(plan_triton, "ALONE", 16)
    plan_triton.plan.cache_clear()
    yield
    plan_triton.plan.cache_clear()


def noise(seed=0):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def with_tail(factor):
    x = noise()
    x[SIZE * 7 // 8 :] *= factor
    return x


def with_head(factor):
    x = noise()
    x[: SIZE * 15 // 16] *= factor
    return x


KINDS = {
    "noise": noise,
    "tail a thousand times larger": lambda: with_tail(1000),
    "tail of zeros": lambda: with_tail(0),
    "head of zeros": lambda: with_head(0),
    "all equal": lambda: torch.full((SIZE,), 3.0, device=DEVICE),
    "fewer than k": lambda: torch.where(torch.arange(SIZE, device=DEVICE) % 7919 == 0, noise(), 0),
}


class Stepping:
    """Scans and selections of one vector with error feedback, and what they must be."""

    def __init__(self):
        self.u = torch.zeros(SIZE, device=DEVICE)
        self.maxima = torch.zeros(SIZE // GROUP, device=DEVICE)
        self.edge, self.heads = Edge(DEVICE), 0
        self.expected = torch.zeros(SIZE, device=DEVICE)

    def scan(self, gradient, pieces=None, k=K):
        head = self.edge.give_head(self.u, k, GROUP, self.maxima)
        assert head is not None
        assert 0 < head.entries < SIZE
        pieces = [(0, gradient)] if pieces is None else pieces
        scan_triton(self.u, pieces, self.maxima, GROUP, None, self.edge, NEVER, head)
        scan_torch(self.expected, [(0, gradient)], None, GROUP)
        assert torch.equal(self.u, self.expected)

    def select(self, k=K):
        head = self.edge._head
        self.heads += head is not None and head.serves(self.u, k)
        indices, values = topk_triton(self.u, k, self.maxima, GROUP, self.edge)
        wanted = topk_torch(self.expected, k)
        assert torch.equal(indices, wanted.int())
        assert torch.equal(values, self.expected[wanted])
        self.expected[wanted] = 0
        counters, _ = workspace(0, self.u.device)
        assert not counters[:160].any(), "counters are zero between selections"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_entries_are_chosen(kind):
    steps = Stepping()
    for _ in range(2):
        steps.scan(KINDS[kind]())
        steps.select()
    assert steps.heads == 2, "both selections had a head"


def test_a_gradient_in_pieces_and_one_that_is_missing():
    steps, gradient = Stepping(), noise(1)
    gradient[30_016:40_000] = 0
    pieces = [(40_000, gradient[40_000:]), (0, gradient[:10_000].clone())]
    pieces.append((10_048, gradient[10_048:30_016].clone()))
    gradient[10_000:10_048] = 0
    steps.scan(gradient, Pieces(pieces))
    steps.select()
    assert steps.heads == 1


def test_tiles_before_an_entry_hold_all_that_comes_before_it():
    gradient = noise(1)
    pieces = [(40_000, gradient[40_000:]), (0, gradient[:10_000].clone())]
    (part,) = table(SIZE, DEVICE, pieces, True, TILE)
    assert [place for place, _ in part.begins] == [0, 10_048, 40_000]
    ends = [10_048, 40_000, SIZE]
    for entry in (64, 10_000, 10_048, 39_936, 40_000, 40_064, SIZE):
        tiles = part.before(entry, TILE)
        runs = zip(part.begins, ends, strict=True)
        scanned = max(min(e, p + (tiles - f) * TILE) for (p, f), e in runs if tiles > f)
        assert entry <= scanned < entry + TILE


def test_a_head_that_nobody_took_leaves_no_trace():
    steps, other = Stepping(), Stepping()
    steps.scan(noise(1))
    # Another vector on the same stream wants the workspace, as after an error.
    other.scan(noise(2))
    other.select()
    steps.select()
    assert (steps.heads, other.heads) == (0, 1)
    steps.scan(noise(3))
    steps.select(K // 2)
    assert steps.heads == 0, "it was for another k"
    steps.scan(noise(4))
    steps.select()
    assert steps.heads == 1


@gpu
def test_a_step_of_a_large_bundle_needs_no_host_and_can_be_captured(monkeypatch):
    monkeypatch.undo()
    plan_triton.plan.cache_clear()
    size = candidates_triton.LARGE + 64 * 999
    slot = Slot("all", (size,), (1,), torch.float32, 0, size)
    bundle = Bundle([slot], DEVICE, rank=0, index=0, dense=False)
    gradient, expected = torch.randn(size, device=DEVICE), torch.zeros(size, device=DEVICE)
    choice = choose(bundle, Config(density=0.001), 0, 4, False)

    def step():
        scan = bundle.accumulate([(0, gradient)], choice.group, NEVER, ahead=choice.ahead)
        assert bundle._edge._head.begun
        sparse = METHODS["topk"].run(bundle.u, choice.k, bundle.memory, scan)
        bundle.delivered = Delivered(scan.finite, sparse.indices, sparse.values)
        return sparse

    def check(sparse):
        expected.add_(gradient)
        wanted = topk_torch(expected, choice.k)
        assert torch.equal(sparse.indices, wanted.int())
        assert torch.equal(sparse.values, expected[wanted])
        expected[wanted] = 0

    check(step())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sparse = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(sparse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse = step()
    for _ in range(2):
        gradient.copy_(torch.randn(size, device=DEVICE))
        graph.replay()
        check(sparse)
