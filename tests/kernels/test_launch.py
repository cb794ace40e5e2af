"""The launcher: a compilation is reused only for arguments it was made for."""

import inspect
from dataclasses import replace

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip
import triton.language as tl

from gradwire import torch_internals
from gradwire.encode import Encoding
from gradwire.encode.format import template_of
from gradwire.encode.noise import Noise
from gradwire.kernels.find_by_counts import Aim
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.side_stream import Target
from gradwire.kernels.triton import (
    bisect_list,
    chunks,
    draw,
    fill_run,
    find_by_counts,
    join,
    launch,
    mean,
    messages,
    momentum,
    scan,
    scatter,
    sidco,
    sketch,
    target,
    threshold,
    unpack,
    write,
)
from gradwire.kernels.triton.launch import Launcher
from gradwire.kernels.triton.select import entry
from gradwire.types import Sparse
from tests.kernels.specialisation import specialisation


class Kernel:
    """Stands in for a jitted kernel; what it returns stands in for a compiled one."""

    function, packed_metadata = "function", "metadata"

    @staticmethod
    def fn(first, second=None, last: tl.constexpr = None): ...

    def __init__(self):
        self.compiled, self.reused = [], []

    def __getitem__(self, grid):
        def first(*args, **options):
            self.compiled.append((grid, args, options))
            return self

        return first

    def run(self, *args):
        self.reused.append(args)


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.setattr(torch_internals, "raw_stream", lambda device: 7)
    monkeypatch.setattr(launch, "REUSE", True)
    return Launcher(Kernel(), num_warps=4)


def test_the_second_launch_goes_past_triton(launcher):
    on = torch.zeros(1)
    for grid in (3, 5):
        launcher(grid, on, on, on, 2)
    kernel = launcher._kernel
    assert kernel.compiled == [((3,), (on, on, 2), {"num_warps": 4})]
    assert kernel.reused == [(5, 1, 1, 7, "function", "metadata", None, None, None, on, on, 2)]


def test_without_reuse_triton_does_every_launch(launcher, monkeypatch):
    monkeypatch.setattr(launch, "REUSE", False)
    for _ in range(2):
        launcher(3, torch.zeros(1), None, None, 1)
    assert len(launcher._kernel.compiled) == 2
    assert not launcher._kernel.reused


def test_another_key_is_another_compilation(launcher):
    on = torch.zeros(1)
    launcher(3, on, on, None, 1)
    launcher(3, on, on, None, 2)
    assert len(launcher._kernel.compiled) == 2


@pytest.mark.parametrize("can", [False, True])
def test_an_overlapping_launch_tells_the_kernel(launcher, monkeypatch, can):
    monkeypatch.setattr(launch, "overtakes", lambda device: can)
    overlapping = Launcher(Kernel(), overlap_launch=True, num_warps=4)
    for _ in range(2):
        overlapping(3, torch.zeros(1), None, None)
    options = {"num_warps": 4} | ({"launch_pdl": True} if can else {})
    assert overlapping._kernel.compiled == [((3,), (None, None, can), options)]
    assert overlapping._kernel.reused[0][-3:] == (None, None, can)


def test_a_name_that_the_kernel_does_not_have_is_an_error():
    with pytest.raises(AssertionError, match="third"):
        Launcher(Kernel(), "first third")


# --- the keys of all kernels against Triton's own specialisation ---


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


def select_apart(monkeypatch):
    """The selection of a large vector: with launches of its own for the bound and the pruning."""
    honest = entry.launch_sizes
    monkeypatch.setattr(entry, "launch_sizes", lambda *a: replace(honest(*a), begin=1))
    entry.topk_triton(torch.rand(3000, device=DEVICE), 20)


def written(encoding, noise=None):
    sparse = Sparse(torch.arange(8, dtype=torch.int32, device=DEVICE), zeros(8), zeros(()), 100)
    template = template_of(100, 8, encoding, DEVICE)
    return write.write_message_triton(template, sparse, zeros((), dtype=bool), encoding, noise)[0]


def unpacked(indices):
    encoding = Encoding("bf16", indices)
    unpack.unpack_triton(written(encoding).unsqueeze(0), 100, 8, encoding)


def averaged():
    message = written(Encoding())
    messages.mean_of_messages_triton(message.unsqueeze(0), message, 100, 8, torch.float32)


NO, LONG = zeros((), dtype=torch.bool), zeros((), dtype=torch.int64)
INDICES = torch.arange(40, dtype=torch.int32, device=DEVICE)
PIECE = [(0, zeros(4096))]
CALLS = {
    "scan": lambda _: scan.scan_triton(
        zeros(4096), PIECE, zeros(64), 64, zeros(()), LastSelection(DEVICE), NO
    ),
    "momentum": lambda _: momentum.momentum_triton(
        zeros(4096), zeros(4096), PIECE, zeros(64), 64, 0.9
    ),
    "settle": lambda _: scatter.settle_triton(zeros(100), INDICES, zeros(40), NO),
    "above": lambda _: entry.above_triton(zeros(3000), zeros(()), 20, zeros(47), 64),
    "select": select_apart,
    "few of a chunk": lambda _: chunks.chunks_triton(zeros(4096), 1024, 2, 0, zeros(64), 64),
    "many of a chunk": lambda _: chunks.chunks_triton(zeros(4096), 1024, 2, 0),
    "draw": lambda _: draw.draw_triton(
        9, 800, 832, LONG.clone(), 5, zeros(4).long(), zeros(4).long()
    ),
    "pick": lambda _: draw.pick_triton(zeros(100), INDICES),
    "join": lambda _: join.join_triton(INDICES, zeros(100)),
    "mean": lambda _: mean.mean_triton(zeros(2, 50)),
    "mean of messages": lambda _: averaged(),
    "insert": lambda _: sketch.insert_triton(zeros(99), 20, INDICES[:3], zeros(()).double()),
    "query": lambda _: sketch.query_triton(zeros(3, 20), INDICES[:3], 99, 16),
    "target": lambda _: target.zero_triton(Target(100, DEVICE)),
    "fill_run": lambda _: fill_run.fill_run_triton(INDICES, zeros(40), zeros(()), 20, LONG, 99),
    "by counts": lambda _: [
        find_by_counts.find_by_counts_triton(zeros(640), ladder, span, Aim(3, 4, 3, 4), maxima, 64)
        for ladder, span in ((zeros(9), None), (None, zeros(2)))
        for maxima in (None, zeros(10), zeros(10, dtype=torch.int16))
    ],
    "once": lambda _: threshold.first_threshold_triton(zeros(()), zeros(99), 3, 1.0),
    "sidco_fit": lambda _: sidco.sidco_fit_triton(zeros(99), 1, 0.1, LONG, 3),
    "sidco_adapt": lambda _: sidco.sidco_adapt_triton(
        LONG.clone(), LONG.clone(), zeros(()), zeros((), dtype=torch.int32), 5, 3
    ),
    "bisect_list": lambda _: bisect_list.bisect_list_triton(zeros(99), 3, INDICES, zeros(40), 20),
    "write": lambda _: written(Encoding()),
    "write, rounded": lambda _: written(Encoding("int8", rounding="stochastic"), Noise(0, 0, LONG)),
    "unpack": lambda _: unpacked("int32"),
    "unpack bits": lambda _: unpacked("bitmap"),
}


def variants(value, parameter, fixed):
    """Other values of one argument, as callers may pass them."""
    if parameter.annotation is tl.constexpr:
        return [value + 1] if type(value) is int else []
    if isinstance(value, torch.Tensor) or value is None:
        some = zeros(64) if value is None else value
        room = torch.empty(some.numel() + 1, dtype=some.dtype, device=some.device)
        free = [room[:-1], room[1:], some.double(), some.bfloat16(), room.half()[1:], some.short()]
        return [None] if fixed else [None, *free]
    if isinstance(value, int):
        return [1, 16, -5, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63]
    return [None, 3.5]


@pytest.mark.parametrize("name", CALLS)
def test_keys_are_equal_where_triton_would_compile_once(name, monkeypatch):
    launches = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, *args: launches.append((self, args[2:])))
    CALLS[name](monkeypatch)
    assert launches
    for launcher, args in launches:
        args = (*args, False) if launcher._overlap_launch else args
        parameters = inspect.signature(launcher._kernel.fn).parameters.values()
        tried = [args]
        for i, (value, parameter) in enumerate(zip(args, parameters, strict=True)):
            others = variants(value, parameter, parameter.name in launcher.fixed)
            tried += [(*args[:i], other, *args[i + 1 :]) for other in others]
        pairs = {(launcher.key(0, *t), specialisation(launcher._kernel, t)) for t in tried}
        assert len(pairs) == len({key for key, _ in pairs}) == len({own for _, own in pairs})
        assert len({launcher.key(device, *args) for device in (0, 1)}) == 2
