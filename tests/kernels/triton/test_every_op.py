"""Every op in Triton against its reference on ugly sizes: the same bits, or sums that round.

An op with a Triton version has a row in OPS. What is peculiar to an op is in the test of its name.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.kernels.triton_device import DEVICE, ON_GPU  # isort: skip
import gradwire
from gradwire.encode import Encoding
from gradwire.encode.format import template_of
from gradwire.kernels.find_by_counts import Aim
from gradwire.types import Sparse, align
from tests.kernels.compare import agree
from tests.kernels.test_select import vector

KINDS = ["gaussian", "few values", "all zero", "one hot"]
SIZES = [1, 63, 64, 65, 1000, 4097]


class Op(NamedTuple):
    """The file of the Triton version, and a function of a vector that returns calls' arguments.

    If its sums round, the op has a tolerance, and the place of the argument that the reference gets
    in fp64: in fp32 its squares and sums may overflow, or vanish.
    """

    file: str
    inputs: Callable
    tolerance: float = 0.0
    wide: int = 0


def constant(value, dtype=None):
    return torch.tensor(value, dtype=dtype, device=DEVICE)


def integers(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def places(size, count):
    """`count` indices out of `size`, ascending."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(count))
    return order[:count].sort().values.int().to(DEVICE)


def largest(u, k):
    """The 2k largest as `select` gives them."""
    order = torch.sort(u.abs(), descending=True, stable=True).indices[: 2 * k].sort().values
    return order.int(), u[order]


def sparse_of(u):
    k = -(-u.numel() // 5)
    indices = places(u.numel(), k)
    return Sparse(indices, u[indices.long()].float(), constant(k, torch.int32), u.numel())


def settled(u):
    """u with its spare last entry, and what was sent of it, with padding."""
    sparse = sparse_of(u)
    return (
        torch.cat([u, u[:1]]),
        torch.cat([sparse.indices, integers(u.numel())]),
        torch.cat([sparse.values, u.new_zeros(1)]),
    )


def scanned(u):
    """A residual with room to a multiple of 64, and its gradient, not aligned."""
    room = torch.zeros(align(u.numel()), device=DEVICE)
    bucket = torch.cat([u.new_zeros(1), u])[1:]
    pieces, maxima = [(0, bucket)], room.new_zeros(room.numel() // 64)
    return room + 1, pieces, maxima


def accelerated(u):
    residual, pieces, maxima = scanned(u)
    return residual, residual / 3, pieces, maxima


def maxima_of(u, block):
    return torch.stack([part.abs().max().float() for part in u.split(block)])


ENCODINGS = [Encoding(), Encoding("bf16", "packed"), Encoding("int4", "bitmap")]


def unwritten(u, encoding):
    sparse = sparse_of(u)
    template = template_of(sparse.size, sparse.capacity, encoding, DEVICE)
    return template, sparse, constant(True), encoding, None


def written(u, encoding):
    return reference_of("gradwire.encode.write", "write_message")(*unwritten(u, encoding))[0]


def gathered(u, rank_count=3):
    message = written(u, Encoding())
    return torch.stack([message] * rank_count), message, u.numel(), sparse_of(u).capacity


def reference_of(module, name):
    return getattr(importlib.import_module(module), f"{name}_torch")


def listed(u):
    """Every entry that is not zero, and padding."""
    found = u.nonzero().flatten().int()
    padding = u.numel() - found.numel()
    indices = torch.cat([found, found.new_full((padding,), u.numel())])
    return indices, torch.cat([u[found.long()], u.new_zeros(padding)])


SEEDS = integers(11, -22, 33)
TRITON = "gradwire.kernels.triton."
OPS = {
    "scan": Op("scan", lambda u: [(*scanned(u), 64), (*scanned(u), 64, constant(1 / 3))]),
    "momentum": Op(
        "momentum", lambda u: [(*accelerated(u), 64, 0.9), (*accelerated(u), 64, 0.9, None, True)]
    ),
    "settle": Op(
        "scatter",
        lambda u: [(*settled(u), constant(skipped)) for skipped in (True, False)],
    ),
    "above": Op(
        "select.entry",
        lambda u: [(u, u.abs().median().float(), n) for n in (1, u.numel() // 2, u.numel() + 3)],
    ),
    "bisect_list": Op(
        "bisect_list", lambda u: [(u, 1, *largest(u, k), k) for k in (1, -(-u.numel() // 9))]
    ),
    "chunks": Op("chunks", lambda u: [(u, 64, 3, min(3, u.numel() % 64)), (u, 16, 16, 0)]),
    "draw": Op(
        "draw",
        lambda u: [(k, u.numel(), u.numel(), constant(2), -9) for k in (0, 1, u.numel())],
    ),
    "pick": Op("draw", lambda u: [(u, places(u.numel(), -(-u.numel() // 3)))]),
    "join": Op("join", lambda u: [(torch.cat([places(u.numel(), -(-u.numel() // 7))] * 2), u)]),
    "mean": Op("mean", lambda u: [(torch.stack([u, 3 * u, u.flip(0)]),), (u.bfloat16()[None],)]),
    "mean_of_messages": Op("messages", lambda u: [(*gathered(u), torch.float32)]),
    "insert": Op("sketch", lambda u: [(u, 37, SEEDS, constant(2.0**20, torch.float64))]),
    "query": Op("sketch", lambda u: [(u.expand(3, -1).clone(), SEEDS, 999, b) for b in (0, 16)]),
    "fill_run": Op(
        "fill_run",
        lambda u: [
            (*listed(u), t, k, constant(n), u.numel())
            for t in (u.abs().median().float(), constant(0.0), constant(9e9))
            for k, n in ((1, 0), (-(-u.numel() // 3), 2**61 + 5), (u.numel(), 7))
        ],
    ),
    "find_by_counts": Op(
        "find_by_counts",
        lambda u: [
            (u, u.abs().max() * 2.0 ** -torch.arange(9.0), None, Aim(2, 3, 2, 3)),
            (u, None, torch.stack([u.abs().median(), u.abs().max()]).float(), Aim(2, 2, 2, 2)),
        ],
    ),
    "first_threshold": Op(
        "threshold",
        lambda u: [(constant(kept), u, 3, 0.1) for kept in (0.0, 0.3)],
        tolerance=2e-6,
        wide=1,
    ),
    "sidco_fit": Op(
        "sidco",
        lambda u: [(u, 1, 0.01, constant(stages), 6) for stages in (1, 4)],
        tolerance=2e-6,
    ),
    "sidco_adapt": Op(
        "sidco",
        lambda u: [
            (constant(s), constant(4), constant(0.4), integers(n)[0], 300, 6)
            for s, n in ((1, 200), (6, 900), (3, u.numel()))
        ],
    ),
    "write_message": Op("write", lambda u: [unwritten(u, e) for e in ENCODINGS]),
    "unpack": Op(
        "unpack",
        lambda u: [(written(u, e)[None], u.numel(), sparse_of(u).capacity, e) for e in ENCODINGS],
    ),
}


def homes():
    """By Triton path, the module that chooses the version: read from the sources."""
    package = Path(gradwire.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for found in re.findall(r'triton="([\w.]+)_triton"', path.read_text()):
            module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
            yield found, module


HOMES = dict(homes())
"""topk is not here: its Triton version gives the values too."""


def test_every_op_with_a_triton_version_has_a_row():
    rows = {f"{TRITON}{op.file}.{name}" for name, op in OPS.items()}
    assert set(HOMES) - rows <= {f"{TRITON}select.entry.topk"}
    assert rows <= set(HOMES)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPS)
def test_triton_agrees_with_the_reference(name, kind):
    op = OPS[name]
    path = f"{TRITON}{op.file}.{name}"
    reference = reference_of(HOMES[path], name)
    version = getattr(importlib.import_module(TRITON + op.file), f"{name}_triton")
    # The interpreter is slow: every other size with every other kind, so that all meet an op.
    sizes = SIZES if ON_GPU else SIZES[(KINDS.index(kind) + 1) % 2 :: 2]
    for size in sizes:
        for args in op.inputs(vector(kind, size).to(DEVICE)):
            agree(reference, version, *args, tolerance=op.tolerance, wide=op.wide)
