"""Which maxima a method wants from the scan."""

import pytest
import torch

from gradwire import kernels
from gradwire.accumulate.bundle import Bundle
from gradwire.compress import METHODS
from gradwire.config import Config
from gradwire.kernels.select import block_size
from gradwire.state.choice import choose
from gradwire.types import Slot

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZE = 138_357_568


@pytest.mark.parametrize(
    ("device", "density", "chunk", "block"),
    [
        (CUDA, 0.001, 4096, 64),
        (CUDA, 0.0039, 4096, 64),
        (CUDA, 0.01, 4096, 0),
        (CPU, 0.01, 4096, 16),
        (CPU, 0.1, 4096, 0),
        (CUDA, 0.001, 96, 16),
        (CUDA, 0.001, 160, 32),
        (CUDA, 0.001, 1000, 0),
    ],
)
def test_chunked_wants_blocks_that_divide_its_chunks(device, density, chunk, block):
    k = round(density * SIZE)
    assert METHODS["chunked"].bind({"chunk": chunk}).block(k, SIZE, device) == block


def test_randk_wants_none_and_others_what_topk_wants():
    for k in (SIZE // 10_000, SIZE // 1000, SIZE // 100, SIZE // 10):
        assert METHODS["randk"].bind({}).block(k, SIZE, CUDA) == 0
        for method in ("topk", "gaussiank", "trimmed"):
            for device in (CPU, CUDA):
                block = METHODS[method].bind({}).block(k, SIZE, device)
                assert block == block_size(SIZE, k, device)


@pytest.mark.parametrize(("method", "wanted"), [("chunked", 16), ("randk", 0), ("topk", 64)])
def test_the_scan_of_a_step_is_told(method, wanted):
    slot = Slot("w", (30_000,), (1,), torch.float32, 0, 30_000)
    bundle = Bundle([slot], CPU, rank=0, index=0, dense=False)
    options = {"chunk": 112} if method == "chunked" else {}
    choice = choose(bundle, Config(method=method, density=0.001, options=options), 0, 4, False)
    assert choice.block == wanted


def test_chunked_hands_its_maxima_on(monkeypatch):
    """With the maxima of another u the blocks that they name are looked at."""
    slot = Slot("w", (8192,), (1,), torch.float32, 0, 8192)
    bundle = Bundle([slot], CPU, rank=0, index=0, dense=False)
    seen = []
    real = kernels.chunks
    monkeypatch.setattr(kernels, "chunks", lambda *a: seen.append(a[4:]) or real(*a))
    choice = choose(bundle, Config(method="chunked", density=0.001), 0, 4, False)
    scan = bundle.accumulate([(0, torch.randn(8192))], choice.block, torch.tensor(False))
    METHODS["chunked"].run(bundle.u, choice.k, bundle.memory, scan)
    ((maxima, block),) = seen
    assert block == 64
    assert torch.equal(maxima, bundle.u.view(-1, 64).abs().amax(1))
