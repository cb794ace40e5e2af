"""Find a threshold that enough entries pass, from a sample of u and from block maxima."""

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions

STEP = 0.02
"""One rung of the ladder, in log t, as a part of the whole ladder."""
ROUNDS = 25
"""Halvings of `Rule.HALVES`."""


class Rule(enum.IntEnum):
    """The rule by which a method finds its threshold.

    `sure` is a magnitude that enough entries reach: see `find_threshold`.
    NORMAL: scale * sqrt(mean u^2), held between `sure` and the ranks[1]-th largest maximum.
    LADDER: the highest of 50 even steps in log t, from max |u| down to mean |u|, not above `sure`.
    HALVES: the end of 25 halvings of the range from mean |u| to max |u|, not above `sure`.
    LIST: the smallest |u|.
    """

    NORMAL = 0
    LADDER = 1
    HALVES = 2
    LIST = 3


def find_threshold(
    rule: Rule, u: Tensor, step: int, maxima: Tensor, every: int, ranks: Sequence[int],
    scale: float = 1.0, whole: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the fp32 (0-d) just below the magnitude that `rule` finds.

    No rule finds more than `sure`: the ranks[0]-th largest of every `every`-th maximum, counted
    from 1, or 0 if there are fewer maxima. Means are taken over every `step`-th entry of u.
    maxima: flat fp32, at least 0. whole: the vector that max |u| is taken from.
    Versions may differ in the last bits of a mean, and therefore in the threshold.
    """
    return _find_threshold_on(u.device)(rule, u, step, maxima, every, ranks, scale, whole)


def first_threshold(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """Return the fp32 (0-d) just below `kept`, and set `kept` first if it is 0.

    kept: 0-d fp32, at least 0. It becomes `scale` times the norm of every `step`-th entry of u.
    Versions may differ in the last bits of the norm.
    """
    return _first_threshold_on(u.device)(kept, u, step, scale)


def find_threshold_torch(
    rule: Rule, u: Tensor, step: int, maxima: Tensor, every: int, ranks: Sequence[int],
    scale: float = 1.0, whole: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `find_threshold` with torch ops."""
    sample = u[::step].abs().to(torch.promote_types(u.dtype, torch.float32))
    sure, *lower = ranked_values(maxima, every, *ranks)
    if rule == Rule.NORMAL:
        guess = torch.linalg.vector_norm(sample) * (scale / sample.numel() ** 0.5)
        return just_below(torch.clamp(guess.float(), lower[0], sure))
    if rule == Rule.LIST:
        return just_below(torch.minimum(sample.amin().float(), sure))
    assert whole is not None, "the largest entry is asked for"
    top = torch.linalg.vector_norm(whole, float("inf")).float()
    if rule == Rule.LADDER:
        return just_below(highest_rung(sample.mean().float(), top, sure))
    return just_below(highest_halving(sample.mean(dtype=torch.float64), top, sure))


def ranked_values(values: Tensor, every: int, *ranks: int) -> list[Tensor]:
    """Return the rank-th largest of every `every`-th value for each rank, ascending.

    It is 0 if there are fewer values.
    """
    sample = values[::every]
    largest = sample.topk(min(ranks[-1], sample.numel())).values
    zero = values.new_zeros(())
    return [largest[rank - 1] if rank <= largest.numel() else zero for rank in ranks]


def highest_rung(mean: Tensor, top: Tensor, sure: Tensor) -> Tensor:
    """Return the highest step from `top` towards `mean` that is not above `sure`."""
    step = torch.log(top / mean) * STEP
    threshold = mean * torch.exp(torch.floor(torch.log(sure / mean) / step) * step)
    # If all magnitudes are alike, or few are not zero, there is no ladder and the threshold is NaN.
    return torch.where(threshold <= sure, threshold, sure)


def highest_halving(mean: Tensor, top: Tensor, sure: Tensor) -> Tensor:
    """Return the highest end of a halving between `mean` and `top` that is not above `sure`."""
    ratio = torch.floor((sure - mean) / (top - mean) * 2**ROUNDS) / 2**ROUNDS
    threshold = (mean + ratio.clamp(min=0) * (top - mean)).float()
    # Below the mean the halvings find nothing. If all magnitudes are alike there is no range.
    return torch.where(threshold <= sure, threshold, sure)


def just_below(magnitude: Tensor) -> Tensor:
    """Return the next smaller fp32, so that exactly `magnitude` and more lies above it; 0 for 0."""
    return torch.nextafter(magnitude, torch.zeros_like(magnitude))


def first_threshold_torch(kept: Tensor, u: Tensor, step: int, scale: float) -> Tensor:
    """Compute `first_threshold` with torch ops."""
    norm = torch.linalg.vector_norm(u[::step], dtype=torch.float64)  # fp32 squares may be infinite
    kept.copy_(torch.where(kept > 0, kept, norm * scale))
    return just_below(kept)


_find_threshold_on = versions(
    find_threshold_torch, triton="gradwire.kernels.triton.threshold.find_threshold_triton"
)
_first_threshold_on = versions(
    first_threshold_torch, triton="gradwire.kernels.triton.threshold.first_threshold_triton"
)
