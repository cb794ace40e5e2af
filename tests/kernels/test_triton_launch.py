"""The launcher: a compilation is reused only for arguments it was made for."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip
from gradwire.kernels.last_selection import LastSelection
from gradwire.kernels.threshold import Rule
from gradwire.kernels.triton import bisect_list, chunks, draw, launch, scatter, sidco, threshold
from gradwire.kernels.triton import momentum as momentum_module
from gradwire.kernels.triton import scan as scan_module
from gradwire.kernels.triton.launch import Launcher


class Kernel:
    """Stands in for a jitted kernel; what it returns stands in for a compiled one."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.compiled, self.reused = [], []

    def __getitem__(self, grid):
        def first(*args, **options):
            self.compiled.append((grid, args, options))
            return self

        return first

    def run(self, *args):
        self.reused.append(args)


class Driver:
    @staticmethod
    def get_current_stream(_):
        return 7


@pytest.fixture
def launcher(monkeypatch):
    monkeypatch.setattr(launch, "driver", type("D", (), {"active": Driver}))
    monkeypatch.setattr(launch, "REUSE", True)
    return Launcher(Kernel(), num_warps=4)


def test_the_second_launch_goes_past_triton(launcher):
    on = torch.zeros(1)
    for grid in (3, 5):
        launcher(grid, "key", on, 1, 2)
    kernel = launcher._kernel
    assert kernel.compiled == [((3,), (1, 2), {"num_warps": 4})]
    assert kernel.reused == [(5, 1, 1, 7, "function", "metadata", None, None, None, 1, 2)]


def test_without_reuse_triton_does_every_launch(launcher, monkeypatch):
    monkeypatch.setattr(launch, "REUSE", False)
    for _ in range(2):
        launcher(3, "key", torch.zeros(1), 1)
    assert len(launcher._kernel.compiled) == 2
    assert not launcher._kernel.reused


def test_another_key_is_another_compilation(launcher):
    on = torch.zeros(1)
    launcher(3, "key", on, 1)
    launcher(3, "other", on, 1)
    assert len(launcher._kernel.compiled) == 2


@pytest.mark.parametrize("can", [False, True])
def test_an_early_launch_tells_the_kernel(launcher, monkeypatch, can):
    monkeypatch.setattr(launch, "overtakes", lambda device: can)
    early = Launcher(Kernel(), overlap_launch=True, num_warps=4)
    for _ in range(2):
        early(3, "key", torch.zeros(1), 1, 2)
    options = {"num_warps": 4} | ({"launch_pdl": True} if can else {})
    assert early._kernel.compiled == [((3,), (1, 2, can), options)]
    assert early._kernel.reused[0][-3:] == (1, 2, can)


def scan(pieces, maxima, block=32, unscale=None):
    residual = torch.zeros(8192, device=DEVICE)
    scan_module.scan_triton(residual, pieces, maxima, block, unscale)


def momentum(pieces, maxima, block=32, unscale=None, nesterov=False):
    residual = torch.zeros(8192, device=DEVICE)
    velocity = torch.zeros(8192, device=DEVICE)
    momentum_module.momentum_triton(
        residual, velocity, pieces, maxima, block, 0.9, unscale, nesterov
    )


@pytest.mark.parametrize(("module", "call"), [(scan_module, scan), (momentum_module, momentum)])
def test_whatever_changes_the_code_changes_the_key(module, call, monkeypatch):
    keys = []
    monkeypatch.setattr(module, "_launch", lambda grid, key, *args: keys.append(key))
    gradient = torch.zeros(8193, device=DEVICE)
    whole, shifted, maxima = gradient[:-1], gradient[1:], torch.zeros(512, device=DEVICE)
    one = torch.ones((), device=DEVICE)
    call([(0, whole)], maxima)
    call([(0, whole)], None)
    call([(0, shifted)], maxima)
    call([(0, whole.bfloat16())], maxima)
    call([(0, whole)], maxima, block=16)
    call([(0, whole)], maxima, unscale=one)
    call([(0, whole[:64]), (128, whole[64:200])], maxima)
    call([(0, shifted[:64]), (128, shifted[64:200])], maxima)
    if call is momentum:
        call([(0, whole)], maxima, nesterov=True)
    assert len(set(keys)) == len(keys) == (9 if call is momentum else 8)


def test_the_keys_of_chunks(monkeypatch):
    keys = []

    def few(grid, key, *args):
        keys.append(key)

    def many(grid, key, *args):
        keys.append(("many", key))

    monkeypatch.setattr(chunks, "_launch_few", few)
    monkeypatch.setattr(chunks, "_launch_many", dict.fromkeys((1, 2, 4, 8, 16, 32), many))
    room, maxima = torch.zeros(8193, device=DEVICE), torch.zeros(513, device=DEVICE)
    whole, shifted = room[:-1], room[1:]

    def call(u=whole, chunk=4096, each=4, maxima=maxima[:-1], block=64):
        chunks.chunks_triton(u, chunk, each, 0, maxima, block)

    call()
    call(each=5)
    call(each=16)
    call(chunk=2048)
    call(block=32)
    call(shifted)
    call(maxima=maxima[1:])
    call(whole.bfloat16())
    call(maxima=None)
    call(maxima=None, chunk=2048)
    call(shifted, maxima=None)
    call(whole.bfloat16(), maxima=None)
    assert len(set(keys)) == len(keys) == 12


def test_the_keys_of_draw(monkeypatch):
    keys = {"drop": [], "rank": []}
    for name, seen in keys.items():
        note = lambda grid, key, *args, seen=seen: seen.append(key)  # noqa: E731
        monkeypatch.setattr(draw, f"_launch_{name}", note)
    draws = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    ends = torch.zeros(9, dtype=torch.int64, device=DEVICE)

    def call(k=10, draws=draws[0], stream=2**40, places=()):
        draw.draw_triton(k, 8000, 8192, draws, stream, *places)

    call()
    call(stream=5)
    assert len(set(keys["drop"])) == 2
    keys["drop"].clear()
    keys["rank"].clear()
    call()
    call(draws=draws[1])
    call(k=4000)
    call(places=(ends[:4], ends[:4]))
    call(places=(ends[:8], ends[:8]))
    call(places=(ends[1:5], ends[:4]))
    call(places=(ends[:4], ends[1:5]))
    assert keys["drop"][0] != keys["drop"][1]
    assert len(set(keys["rank"])) == len(keys["rank"]) == 7


def test_the_keys_of_pick(monkeypatch):
    keys = []
    monkeypatch.setattr(draw, "_launch_pick", lambda grid, key, *_: keys.append(key))
    room, places = torch.zeros(65, device=DEVICE), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for u in (room[:64], room[1:], room[:64].bfloat16()):
        draw.pick_triton(u, places)
    assert len(set(keys)) == 3


def test_two_misalignments_have_two_keys(monkeypatch):
    """One of the arguments off a multiple of 16, then the other: not the same compilation."""
    keys = []
    monkeypatch.setattr(scatter, "_launch", lambda grid, key, *_: keys.append(key))
    room = torch.zeros(260, device=DEVICE)
    places = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    never = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for buffer, indices in ((room[1:257], places[:4]), (room[:256], places[1:])):
        scatter.settle_triton(buffer, indices, torch.zeros(4, device=DEVICE), never)
    assert len(set(keys)) == 2


def test_the_keys_of_thresholds(monkeypatch):
    keys = []
    launchers = (
        (threshold, "_launch_level"), (threshold, "_launch_once"), (bisect_list, "_launch"),
        (sidco, "_launch_fit"),
    )  # fmt: skip
    for module, name in launchers:
        monkeypatch.setattr(module, name, lambda grid, key, *_: keys.append(key))
    room, places = torch.zeros(8200, device=DEVICE), torch.zeros(41, dtype=torch.int32)
    whole, shifted, places = room[:-8], room[1:-7], places.to(DEVICE)
    two = torch.zeros(3, dtype=torch.int64, device=DEVICE)

    def distinct(call, *variants):
        keys.clear()
        for variant in variants:
            call(*variant)
        assert len(set(keys)) == len(keys) == len(variants)

    def level(rule, u=whole, maxima=whole, every=1, far=whole):
        threshold.find_threshold_triton(rule, u, 3, maxima, every, (1, 2), 1.0, far)

    half, other = whole.bfloat16(), (whole, 1, shifted)
    distinct(
        level, (Rule.NORMAL,), (Rule.LADDER,), (Rule.HALVES,), (Rule.LIST,), (Rule.HALVES, shifted),
        (Rule.HALVES, half), (Rule.HALVES, whole, shifted), (Rule.HALVES, whole, whole, 2),
        (Rule.HALVES, whole, *other), (Rule.HALVES, whole, whole, 1, half), (Rule.LIST, half),
    )  # fmt: skip
    e = LastSelection(DEVICE)
    distinct(
        lambda u, i, v, *edge: bisect_list.bisect_list_triton(u, 3, i, v, 20, *edge),
        (whole, places[:40], whole[:40]), (shifted, places[:40], whole[:40]),
        (whole, places[1:], whole[:40]), (whole, places[:40], shifted[:40]),
        (whole, places[:40], whole[:40], e), (half, places[:40], half[:40]),
    )  # fmt: skip
    distinct(
        lambda u, at, step=1: sidco.sidco_fit_triton(u, step, 0.1, at, 3),
        (whole, two[0]), (shifted, two[0]), (whole, two[1]), (half, two[0]), (whole, two[0], 8),
    )  # fmt: skip
    distinct(
        lambda u, kept: threshold.first_threshold_triton(kept, u, 3, 1.0),
        (whole, room[0]), (shifted, room[0]), (whole, room[1]), (half, room[0]),
    )  # fmt: skip
