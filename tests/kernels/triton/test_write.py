"""pack and unpack in Triton: the reference's bits in every encoding, and nothing out of range."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire.encode import HEADER, Encoding
from gradwire.encode import format as codes
from gradwire.encode.format import INDICES, STOCHASTIC, index_bytes, template_of
from gradwire.encode.noise import Noise
from gradwire.encode.unpack import unpack_torch
from gradwire.encode.write import write_message_torch
from gradwire.kernels.triton import unpack as unpack_module
from gradwire.kernels.triton.unpack import unpack_triton
from gradwire.kernels.triton.write import write_message_triton
from tests.kernels.compare import agree
from tests.kernels.triton.test_messages import chosen

VALUES = [name for name in codes.VALUES if name != "sign"]
"""Those that have a kernel."""
CODES = [(v, "packed", "nearest") for v in VALUES] + [("int4", i, "nearest") for i in INDICES]
CODES += [("fp32", "int32", "nearest"), ("bf16", "common", "nearest")]
CODES += [(v, "local16", "stochastic") for v in STOCHASTIC]
CODES += [("two-bit", i, "nearest") for i in INDICES if i != "packed"]


def packed(sparse, encoding, finite=True):
    """The message and what receivers see, the same by both versions."""
    template = template_of(sparse.size, sparse.capacity, encoding, DEVICE)
    flag = torch.tensor(finite, device=DEVICE)
    noise = None
    if encoding.rounding == "stochastic":
        noise = Noise(3, 2, torch.tensor(11, device=DEVICE))
    args = (template, sparse, flag, encoding, noise)
    return agree(write_message_torch, write_message_triton, *args)[0]


@pytest.mark.parametrize(("values", "indices", "rounding"), CODES)
def test_pack_and_unpack_equal_the_reference(values, indices, rounding):
    encoding = Encoding(values, indices, rounding)
    long = 5000 if indices == "bitmap" else 70_000
    for size, k, padding in ((1, 1, 0), (3000, 2900, 100), (long, 1025, 40), (3000, 1, 1)):
        sparse = chosen(size, k, padding=padding, common=indices == "common")
        rows = torch.stack([packed(sparse, encoding, finite) for finite in (True, False)])
        (plain,) = agree(unpack_torch, unpack_triton, rows, size, k, encoding)
        if indices != "common":
            bare = rows[:, : HEADER + index_bytes(indices, size, k)]
            (plain,) = agree(unpack_torch, unpack_triton, bare, size, k, encoding, True)
        assert torch.equal(plain[:, :HEADER], rows[:, :HEADER])


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("scale", [1e-44, 3e38])
def test_very_small_and_very_large_values(values, scale):
    sparse = chosen(3000, 700)
    sparse.values.clamp_(-1, 1).mul_(scale)
    packed(sparse, Encoding(values, "common"))


def test_parts_of_several_tiles(monkeypatch):
    """A long bitmap is cut into parts of more than one tile; here into two parts of three."""
    monkeypatch.setattr(unpack_module, "PARTS", 2)
    encoding = Encoding("bf16", "bitmap")
    rows = packed(chosen(20_000, 300, padding=20), encoding).unsqueeze(0)
    agree(unpack_torch, unpack_triton, rows, 20_000, 300, encoding)


def test_indices_up_to_the_last():
    """Sizes at the border of int32, where positions and blocks must not wrap."""
    size = 2**31 - 1
    sparse = chosen(3000, 300)
    sparse.indices.copy_(size - 1 - 2 * torch.arange(300, device=DEVICE).flip(0))
    for name in ("packed", "local16") if DEVICE.type == "cuda" else ("packed",):
        encoding = Encoding("int8", name)
        big = type(sparse)(sparse.indices, sparse.values, sparse.count, size)
        rows = packed(big, encoding).unsqueeze(0)
        plain = unpack_triton(rows, size, 300, encoding)[0, HEADER:].view(torch.int32)
        assert torch.equal(plain[:300], sparse.indices)


@pytest.mark.parametrize("name", ["packed", "bitmap", "local16", "int32"])
def test_damaged_indices_stay_inside(name):
    """Random bytes in place of indices: every entry is inside or padding, as in the reference."""
    encoding = Encoding("int4", name)
    message = packed(chosen(3000, 130, padding=5), encoding)
    generator = torch.Generator().manual_seed(0)
    rows = message.repeat(6, 1)
    noise = torch.randint(0, 256, rows.shape, generator=generator, dtype=torch.uint8)
    for row, share in zip(range(6), (0.0, 0.01, 0.1, 0.5, 1.0, 1.0), strict=True):
        hit = torch.rand(message.shape, generator=generator) < share
        hit[:HEADER] = False
        rows[row][hit.to(DEVICE)] = noise[row][hit].to(DEVICE)
    rows[5, HEADER:] = 0
    plain = unpack_triton(rows, 3000, 130, encoding)
    entries = plain[:, HEADER : HEADER + 8 * 130].contiguous().view(torch.int32)
    indices, values = entries[:, :130], entries[:, 130:]
    assert 0 <= int(indices.min()) <= int(indices.max()) <= 3000
    assert not values[indices == 3000].any()
    if name != "local16":  # a search among ends that are not in order may end elsewhere
        assert torch.equal(plain, unpack_torch(rows, 3000, 130, encoding))


@gpu
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("indices", ["int32", "packed", "local16"])
def test_full_size(values, indices):
    size, k = 138_357_544, 138_358
    encoding = Encoding(values, indices)
    rows = torch.stack([packed(chosen(size, k, seed), encoding) for seed in range(2)])
    agree(unpack_torch, unpack_triton, rows, size, k, encoding)


@gpu
def test_a_dense_bitmap():
    size, k = 6_553_600, 3_000_000
    rows = packed(chosen(size, k), Encoding("bf16", "bitmap")).unsqueeze(0)
    agree(unpack_torch, unpack_triton, rows, size, k, Encoding("bf16", "bitmap"))


@gpu
def test_no_host_sync_and_capturable():
    sparse = chosen(6_553_600, 6554)
    encoding = Encoding("int8", "packed", "stochastic")
    noise = Noise(0, 0, torch.zeros((), dtype=torch.int64, device=DEVICE))
    template = template_of(sparse.size, sparse.capacity, encoding, DEVICE)
    flag = torch.ones((), dtype=torch.bool, device=DEVICE)

    def step():
        noise.step.add_(1)
        message, _ = write_message_triton(template, sparse, flag, encoding, noise)
        return message, unpack_triton(message.unsqueeze(0), sparse.size, 6554, encoding)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        message, plain = step()
    seen = set()
    for _ in range(3):
        graph.replay()
        expected, _ = write_message_torch(template, sparse, flag, encoding, noise)
        assert torch.equal(message, expected)
        assert torch.equal(plain[0, HEADER:].view(torch.int32)[:6554], sparse.indices)
        seen.add(message.cpu().numpy().tobytes())
    assert len(seen) == 3
