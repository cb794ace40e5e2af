"""Find a threshold by counting the entries of u above some tests, a bounded number of times.

Block maxima save most of the reading. If more blocks than `most` hold an entry above a test, then
so many entries lie above it, and none of them has to be read.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.dispatch import versions
from gradwire.kernels.select import as_numpy, block_maxima, block_size, entries_in_blocks

TESTS = 7
"""Thresholds of one pass between two known ones; an eighth of the range is left."""
HALVINGS = 25
"""Halvings of a span, unless the caller wants fewer."""
PASSES = 12
"""Passes that leave one fp32 of all: 31 bits by three bits a pass, and one for the rounding."""
_INFINITY = 0x7F800000


class Aim(NamedTuple):
    """The numbers of entries that a search looks for.

    least, most: of the ladder. The highest test that at least `least` entries pass is taken if at
    most `most` pass; otherwise the range above it is searched.
    fine_least, fine_most: of that range. The search ends at a test that so many entries pass.
    """

    least: int
    most: int
    fine_least: int
    fine_most: int

    def sure(self, size: int) -> int:
        """Return the number of entries above a test of the ladder that ends its counting."""
        return self.most if self.most < size else self.least - 1


def find_by_counts(
    u: Tensor, ladder: Tensor | None, span: Tensor | None, aim: Aim,
    maxima: Tensor | None = None, block: int = 0, halvings: int = HALVINGS,
) -> Tensor:  # fmt: skip
    """Return two thresholds, fp32 [2]: the one found, and the lowest one known to be too high.

    An entry passes a threshold t if |u| > t. There is either a ladder or a span:
    ladder: fp32, descending. Its tests are counted from the top. If even the last is passed by too
    few entries, the last is found.
    span: fp32 [2]. The range between the two is halved `halvings` times, at most 30, and its second
    end is known to be too high. 0 is found if no halving reaches `aim.fine_least` entries.
    If ties leave no threshold with a right number, the next one that more entries pass is found.
    maxima: max |u| of every `block` consecutive entries, if a scan left them.
    """
    return _find_by_counts_on(u.device)(u, ladder, span, aim, maxima, block, halvings)


Counter = Callable[[Tensor, int], Tensor]
"""(descending tests, sure) -> entries above each; any number above `sure` if there are more."""


def find_by_counts_torch(
    u: Tensor, ladder: Tensor | None, span: Tensor | None, aim: Aim,
    maxima: Tensor | None = None, block: int = 0, halvings: int = HALVINGS,
) -> Tensor:  # fmt: skip
    """Compute `find_by_counts` with torch ops, which read all of u at every test."""
    magnitude = u.abs().to(torch.promote_types(u.dtype, torch.float32))

    def count(tests: Tensor, sure: int) -> Tensor:
        return torch.stack([(magnitude > test).sum() for test in tests.unbind()])

    return _search(count, u, ladder, span, aim, halvings)


def find_by_counts_cpu(
    u: Tensor, ladder: Tensor | None, span: Tensor | None, aim: Aim,
    maxima: Tensor | None = None, block: int = 0, halvings: int = HALVINGS,
) -> Tensor:  # fmt: skip
    """Compute `find_by_counts` with numpy, which reads only blocks that pass a test."""
    if maxima is None:
        block = block_size(u.numel(), aim.least)
        maxima = block_maxima(u, block) if block else None
    entries = as_numpy(u)
    if maxima is None:
        magnitude = np.abs(entries)

        def count(tests: Tensor, sure: int) -> Tensor:
            found = [np.count_nonzero(magnitude > test) for test in tests.numpy()]
            return torch.tensor(found, dtype=torch.int64)

    else:
        largest = as_numpy(maxima)

        def count(tests: Tensor, sure: int) -> Tensor:
            return torch.from_numpy(_count_in_blocks(entries, largest, block, tests.numpy(), sure))

    return _search(count, u, ladder, span, aim, halvings)


def _count_in_blocks(
    entries: np.ndarray, largest: np.ndarray, block: int, tests: np.ndarray, sure: int
) -> np.ndarray:
    found = np.full(tests.size, sure + 1, np.int64)
    for i, test in enumerate(tests):
        blocks = np.flatnonzero(largest > test)
        if blocks.size > sure:
            break
        magnitude = entries_in_blocks(entries, blocks, block, test, np.greater)[1]
        found[i] = magnitude.size
    return found


def _search(
    count: Counter, u: Tensor, ladder: Tensor | None, span: Tensor | None, aim: Aim, halvings: int
) -> Tensor:
    """Return the result of `find_by_counts`. Nothing waits for the host, except on a CPU."""
    device = u.device
    done = torch.zeros((), dtype=torch.bool, device=device)
    if ladder is not None:
        low, high, done = _descend(count(ladder, aim.sure(u.numel())), ladder, aim)
        bottom, top = (x.view(torch.int32).long() for x in (low, high))
    else:
        bottom = torch.zeros((), dtype=torch.int64, device=device)
        top = bottom + (1 << halvings)
    steps = torch.arange(TESTS, 0, -1, dtype=torch.int64, device=device)
    for _ in range(PASSES):
        if device.type == "cpu" and bool(done):
            break
        places = bottom + ((top - bottom) * steps >> 3)
        n = count(threshold_at(places, span, halvings), aim.fine_most)
        first = (n < aim.fine_least).sum()
        reached = first < TESTS
        here = first.clamp(max=TESTS - 1)
        too_high = places.take((first - 1).clamp(min=0))
        bottom = torch.where(reached & ~done, places.take(here), bottom)
        top = torch.where((first > 0) & ~done, too_high, top)
        done = done | (reached & (n.take(here) <= aim.fine_most)) | (top - bottom <= 1)
    found = threshold_at(torch.stack([bottom, top]), span, halvings)
    if span is not None:
        # Too few entries pass the lower end.
        found[0] = torch.where(bottom == 0, 0.0, found[0])
    return found


def _descend(n: Tensor, ladder: Tensor, aim: Aim) -> tuple[Tensor, Tensor, Tensor]:
    """Return the highest rung that enough entries pass, the one above, and True if all is done."""
    last = ladder.numel() - 1
    first = (n < aim.least).sum()
    here = first.clamp(max=last)
    infinite = torch.full((), float("inf"), dtype=torch.float32, device=ladder.device)
    above = torch.where(first > 0, ladder.take((first - 1).clamp(min=0)), infinite)
    return ladder.take(here), above, (first > last) | (n.take(here) <= aim.most)


def threshold_at(places: Tensor, span: Tensor | None, halvings: int) -> Tensor:
    """Return the thresholds (fp32) at places (int64): their bits, or even steps along a span."""
    if span is None:
        return places.to(torch.int32).view(torch.float32)
    low, high = span.double().unbind()
    return (low + places.double() * 2.0**-halvings * (high - low)).float()


# Its only run on a GPU ended in an illegal access. The mend has run in the interpreter alone.
_find_by_counts_on = versions(
    find_by_counts_torch,
    cpu=find_by_counts_cpu,
    triton="gradwire.kernels.triton.find_by_counts.find_by_counts_triton",
    unseen=True,
)
