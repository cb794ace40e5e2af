"""A threshold that enough entries pass, from a sample of u and from block maxima."""

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions

STEP = 0.02
ROUNDS = 25


class Rule(enum.IntEnum):
    """How a method comes to its threshold.

    NORMAL: scale sqrt(mean u^2), held between `sure` and what the ranks[1]-th largest is. LADDER:
    the highest even step in log t, of 50 from max |u| down to mean |u|, that is not above sure.
    HALVES: 25 halvings of the range between these two. LIST: the smallest |u|.
    """

    NORMAL = 0
    LADDER = 1
    HALVES = 2
    LIST = 3


def find_threshold(
    rule: Rule, u: Tensor, step: int, maxima: Tensor, every: int, ranks: Sequence[int],
    scale: float = 1.0, whole: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The fp32 (0-d) just below the magnitude that `rule` finds, which is never above `sure`.

    sure: the ranks[0]-th largest, from 1 on, of every `every`-th of the maxima (flat fp32, at least
    0), 0 where there are fewer. Over every `step`-th entry of u a mean is taken; see `Rule`.
    whole: max |u| is that of this vector. Versions may differ in the last bits of a mean, and by
    what follows from that.
    """
    return _find_threshold_on(u.device)(rule, u, step, maxima, every, ranks, scale, whole)


def first_threshold(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """The fp32 (0-d) just below `kept`; which is set first where it is 0.

    It becomes `scale` times the norm of every `step`-th entry of u. kept: 0-d fp32, at least 0.
    Versions may differ in the last bits of the norm.
    """
    return _first_threshold_on(u.device)(kept, u, step, scale)


def find_threshold_torch(
    rule: Rule, u: Tensor, step: int, maxima: Tensor, every: int, ranks: Sequence[int],
    scale: float = 1.0, whole: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `find_threshold`."""
    seen = u[::step].abs().to(torch.promote_types(u.dtype, torch.float32))
    sure, *low = ranked(maxima, every, *ranks)
    if rule == Rule.NORMAL:
        guess = torch.linalg.vector_norm(seen) * (scale / seen.numel() ** 0.5)
        return just_below(torch.clamp(guess.float(), low[0], sure))
    if rule == Rule.LIST:
        return just_below(torch.minimum(seen.amin().float(), sure))
    assert whole is not None, "the largest entry is asked for"
    top = torch.linalg.vector_norm(whole, float("inf")).float()
    if rule == Rule.LADDER:
        return just_below(rung(seen.mean().float(), top, sure))
    return just_below(halved(seen.mean(dtype=torch.float64), top, sure))


def ranked(values: Tensor, every: int, *ranks: int) -> list[Tensor]:
    """For each rank, ascending, that largest of every `every`-th value; 0 where there are fewer."""
    seen = values[::every]
    largest = seen.topk(min(ranks[-1], seen.numel())).values
    return [largest[r - 1] if r <= largest.numel() else values.new_zeros(()) for r in ranks]


def rung(mean: Tensor, top: Tensor, sure: Tensor) -> Tensor:
    """The highest step from `top` towards `mean` that is not above `sure`."""
    step = torch.log(top / mean) * STEP
    found = mean * torch.exp(torch.floor(torch.log(sure / mean) / step) * step)
    # Where all magnitudes are alike, or few are not zero, there is no scale to step on.
    return torch.where(found <= sure, found, sure)


def halved(mean: Tensor, top: Tensor, sure: Tensor) -> Tensor:
    """The highest end of a halving between `mean` and `top` that is not above `sure`."""
    ratio = torch.floor((sure - mean) / (top - mean) * 2**ROUNDS) / 2**ROUNDS
    found = (mean + ratio.clamp(min=0) * (top - mean)).float()
    # Below the mean the halvings find nothing; where all magnitudes are alike there is no range.
    return torch.where(found <= sure, found, sure)


def just_below(magnitude: Tensor) -> Tensor:
    """The next smaller fp32: what is above it reaches `magnitude`. Of 0 it is 0."""
    return torch.nextafter(magnitude, torch.zeros_like(magnitude))


def first_threshold_torch(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """See `first_threshold`."""
    seen = u[::step].abs().to(torch.promote_types(u.dtype, torch.float32))
    kept.copy_(torch.where(kept > 0, kept, torch.linalg.vector_norm(seen) * scale))
    return just_below(kept)


_find_threshold_on = versions(
    find_threshold_torch, triton="gradwire.kernels.triton.threshold.find_threshold_triton"
)
_first_threshold_on = versions(
    first_threshold_torch, triton="gradwire.kernels.triton.threshold.first_threshold_triton"
)
