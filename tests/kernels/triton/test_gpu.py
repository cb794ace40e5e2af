"""The path on a GPU: no host sync, capturable, repeatable, beside other work, within its memory."""

import contextlib

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire import kernels
from gradwire.accumulate.bundle import Bundle
from gradwire.compress import METHODS
from gradwire.config import Config
from gradwire.encode import encode
from gradwire.kernels.chunks import chunks_torch
from gradwire.kernels.draw import draw_torch, pick_torch
from gradwire.kernels.fill_run import fill_run_torch
from gradwire.kernels.find_by_counts import find_by_counts_torch
from gradwire.kernels.scan import scan_torch
from gradwire.kernels.select import topk_torch
from gradwire.kernels.side_stream import LARGE
from gradwire.state.choice import choose
from gradwire.types import Entries, Memory, Slot, Sparse

pytestmark = gpu

SIZE = 6_553_600
FINE = torch.zeros((), dtype=torch.bool, device=DEVICE)


@pytest.fixture
def no_sync():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def bundle(size=SIZE):
    slot = Slot("all", (size,), (1,), torch.float32, 0, size)
    return Bundle([slot], DEVICE, rank=0, index=0, dense=False)


def step(b, gradient, density=0.001):
    """accumulate to encode, then decode of two such messages."""
    choice = choose(b, Config(density=density), 0, 4, False)
    scan = b.accumulate([(0, gradient)], choice.block, FINE, maxima16=choice.maxima16)
    indices, values = kernels.select(b.u, choice.k, scan.maxima, scan.block, scan.edge)
    count = torch.full((), choice.k, dtype=torch.int32, device=DEVICE)
    sparse = Sparse(indices, values, count, b.size)
    message = encode(sparse, scan.finite)
    b.deliver(Entries(sparse), scan.finite)
    both = torch.stack([message.buffer, message.buffer])
    return indices, kernels.mean_of_messages(both, message.buffer, b.size, choice.k, torch.float32)[
        0
    ]


def test_no_host_sync(no_sync):
    torch.cuda.set_sync_debug_mode("default")
    b, gradient = bundle(), torch.randn(SIZE, device=DEVICE)
    step(b, gradient)
    torch.cuda.set_sync_debug_mode("error")
    for _ in range(3):
        step(b, gradient)


@pytest.mark.parametrize("size", [SIZE, 100_003])
def test_a_captured_step_replays_with_new_data(size):
    b, gradient = bundle(size), torch.randn(size, device=DEVICE)
    for _ in range(3):
        step(b, gradient)
    b.buffer.zero_()
    b.pending = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indices, mean = step(b, gradient)
    for seed in range(4):
        b.buffer.zero_()
        gradient.copy_(torch.randn(size, generator=torch.Generator().manual_seed(seed)))
        if seed == 3:
            gradient.fill_(1)
        graph.replay()
        expected = topk_torch(gradient, indices.numel())
        assert torch.equal(indices, expected)
        assert torch.equal(mean[expected.long()], gradient[expected.long()])
        assert int((mean != 0).sum()) == indices.numel()


@pytest.mark.parametrize(
    ("method", "size"),
    [
        *((m, SIZE) for m in ("chunked", "randk", "gaussiank", "trimmed", "mstopk", "dgc")),
        *((m, SIZE) for m in ("bisect", "sidco", "topk")),
        *((m, LARGE) for m in ("randk", "gaussiank", "topk")),
    ],
)
def test_methods_do_not_wait_and_can_be_captured(method, size):
    b, gradient = bundle(size), torch.randn(size, device=DEVICE)
    choice = choose(b, Config(method=method, density=0.001), 0, 4, False)
    bound = METHODS[method].bind({})

    def once():
        bound.prefetch(b.u, choice.k, b.memory)
        scan = b.accumulate([(0, gradient)], choice.block, FINE, maxima16=choice.maxima16)
        sparse = bound.choose(b.u, choice.k, b.memory, scan)
        b.deliver(Entries(sparse), scan.finite)
        return sparse

    once()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    b.pending = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse = once()
    seen = []
    for seed in range(3):
        b.buffer.zero_()
        gradient.copy_(torch.randn(size, device=DEVICE, generator=_generator(seed)))
        before = {name: tensor.clone() for name, tensor in b.memory.items()}
        graph.replay()
        twin = Memory()
        twin.update(before)
        twin.lay_out(b.slots, DEVICE)
        with reference():
            expected = METHODS[method].run(gradient.clone(), choice.k, twin)
        assert torch.equal(sparse.indices, expected.indices)
        assert torch.equal(sparse.values, expected.values)
        seen.append(sparse.indices.clone())
    assert not torch.equal(seen[0], seen[1])


@contextlib.contextmanager
def reference():
    """The torch versions of what is not exact top-k, wherever the tensors are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "chunks", chunks_torch)
        patch.setattr(kernels, "draw", draw_torch)
        patch.setattr(kernels, "pick", pick_torch)
        patch.setattr(kernels, "find_by_counts", find_by_counts_torch)
        patch.setattr(kernels, "fill_run", fill_run_torch)
        yield


@pytest.mark.parametrize("size", [SIZE, LARGE + 64])
def test_steps_follow_the_reference(size):
    """Ten steps of error feedback, bit for bit."""
    b, residual = bundle(size), torch.zeros(size, device=DEVICE)
    for seed in range(10):
        gradient = torch.randn(size, device=DEVICE, generator=_generator(seed))
        indices, _ = step(b, gradient)
        scan_torch(residual, [(0, gradient)], None, 32)
        expected = topk_torch(residual, indices.numel())
        assert torch.equal(indices, expected)
        assert torch.equal(b.u, residual)
        residual[expected.long()] -= residual[expected.long()]


def _generator(seed):
    return torch.Generator(DEVICE).manual_seed(seed)


def test_the_same_beside_other_work():
    """Programs of another stream take most of the GPU: results do not change, nothing waits."""
    u = torch.randn(SIZE, device=DEVICE)
    expected = topk_torch(u, 6554)
    other = torch.cuda.Stream()
    a = torch.randn(4096, 4096, device=DEVICE)
    torch.cuda.synchronize()
    for _ in range(20):
        with torch.cuda.stream(other):
            a = (a @ a).clamp(-1, 1)
        assert torch.equal(kernels.topk(u, 6554), expected)


def test_two_streams_select_at_once():
    vectors = [torch.randn(SIZE, device=DEVICE) for _ in range(4)]
    expected = [topk_torch(u, 6554) for u in vectors]
    streams = [torch.cuda.Stream() for _ in vectors]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for u, stream in zip(vectors, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(kernels.topk(u, 6554))
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected[i % 4]) for i, x in enumerate(found))


def test_memory_stays_within_its_limit():
    size, k = 138_357_544, 138_358
    u = torch.randn(size, device=DEVICE)
    kernels.topk(u, k)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernels.topk(u, k)
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 4 * (size / 8 + 8 * k) + (2 << 20)
