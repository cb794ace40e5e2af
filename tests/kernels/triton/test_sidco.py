"""fit and adapt in Triton: the reference's stages, up to the rounding of its sums."""

import pytest
import torch

from tests.kernels.triton_device import DEVICE, gpu  # isort: skip
from gradwire import kernels
from gradwire.kernels.sidco import sidco_adapt_torch, sidco_fit_torch
from gradwire.kernels.triton import sidco as module
from gradwire.kernels.triton.sidco import sidco_adapt_triton, sidco_fit_triton
from gradwire.types import Memory
from tests.compress.test_degenerate import INPUTS
from tests.compress.test_selectors import choose
from tests.distributions import draw
from tests.kernels.compare import agree

MOST = 6


def check(u, step, share, stages, most=MOST):
    args = (u.to(DEVICE), step, share, torch.tensor(stages, device=DEVICE), most)
    (threshold,) = agree(sidco_fit_torch, sidco_fit_triton, *args, tolerance=2e-6)
    return threshold


@pytest.mark.parametrize("kind", ["gaussian", "t3", "layers", "zeros", "uniform", "gennormal"])
def test_every_kind_of_data(kind):
    u = draw(kind, 9_011)
    for step, share, stages in ((1, 0.1, 1), (3, 0.1, 2), (1, 0.01, 3), (7, 0.001, 6)):
        check(u, step, share, stages)


@pytest.mark.parametrize("name", INPUTS)
def test_what_has_no_tail(name):
    for share, stages in ((0.01, 1), (0.01, 2), (0.001, 5), (0.6, 3)):
        check(INPUTS[name], 1, share, stages)


def test_few_items_with_much_to_do(monkeypatch):
    monkeypatch.setattr(module, "LIMIT", 2)
    for stages in (1, 4):
        check(draw("t5", 9_011), 1, 0.001, stages)


def test_one_entry_one_stage_and_other_dtypes():
    check(torch.tensor([-3.0]), 1, 0.01, 4)
    check(draw("laplace", 3000), 1, 0.3, 1, most=1)
    check(draw("laplace", 3000).to(torch.bfloat16), 1, 0.01, 3)


def test_adapt_is_the_reference():
    for start, most in ((1, 6), (3, 3), (6, 6), (2, 1)):
        kept = [torch.tensor(x, device=DEVICE) for x in (start, 0, 0.0)]
        for call in range(25):
            n = (200, 270, 330, 400, 900)[call // 5]
            count = torch.tensor(n, dtype=torch.int32, device=DEVICE)
            agree(sidco_adapt_torch, sidco_adapt_triton, *kept, count, 300, most)
            sidco_adapt_torch(*kept, count, 300, most)


def test_sidco_with_both(monkeypatch):
    u, counts, stages = draw("gaussian", 9_600).to(DEVICE), [], []
    for ours in (False, True):
        memory = Memory()
        if ours:
            monkeypatch.setattr(kernels, "sidco_fit", sidco_fit_triton)
            monkeypatch.setattr(kernels, "sidco_adapt", sidco_adapt_triton)
        counts.append([int(choose("sidco", u, 96, memory).count) for _ in range(7)])
        stages.append(int(memory["stages"]))
    assert counts[0] == counts[1]
    assert stages[0] == stages[1]


@gpu
@pytest.mark.parametrize("kind", ["gaussian", "t3", "layers"])
def test_full_size(kind):
    u = draw(kind, 6_553_600).to(DEVICE)
    for stages in range(1, MOST + 1):
        found = check(u, 47, 0.001, stages)
        at = torch.tensor(stages, device=DEVICE)
        assert all(sidco_fit_triton(u, 47, 0.001, at, MOST) == found for _ in range(20))
