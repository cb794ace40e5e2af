"""Phase 0 of topk for large vectors: launches of its own, and some of it beside the scan.

Its programs wait for memory most of the time, which leaves room for a scan. So where a scan knows
that k entries will be chosen, the head of the vector is pruned while the tail is still scanned. The
bound is one that k groups of the head reach: whatever the tail holds, at least k entries pass it.
"""

import contextlib

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.launch_triton import Launcher
from gradwire.kernels.plan_triton import PRUNE_WARPS, Plan, plan, processors, sure_rank
from gradwire.kernels.prune_triton import aim_at, prune
from gradwire.kernels.side import side
from gradwire.kernels.turns_triton import BOUND, CLEARED, DIGITS, FINE, SHIFT, clear
from gradwire.kernels.workspace_triton import capturing, lend, returned, stream, workspace

LARGE = 1 << 26
"""Entries from which on a head pays: it takes the host two events and two launches."""
TAIL = 8
"""One part in so many is the tail: just long enough to hide the rest behind its scan."""


@triton.jit(do_not_specialize=["n", "rank", "crowd"])
def _bound(work, maxima, threshold, words, n, rank, crowd, SAMPLE: tl.constexpr):
    """Leaves the bound in the header."""
    t, shift = aim_at(maxima, n, rank, crowd, threshold, words, SAMPLE)
    tl.store(work + BOUND, t)
    tl.store(work + SHIFT, shift)


@triton.jit(do_not_specialize=["before", "size", "n", "share", "room", "spill"])
def _prune(
    work, u, maxima, scratch, before, size, n, share, room, spill,
    PARTS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, THREADS: tl.constexpr,
    WHOLE: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """The candidates of one part: many parts hide each other's waits.

    Clears what the launch after it counts in.
    """
    cap = PARTS * room + spill
    cand = (scratch + 2 * PARTS).to(tl.pointer_type(tl.int64))
    ids = scratch + 2 * PARTS + cap + cap
    t = tl.load(work + BOUND)
    shift = tl.load(work + SHIFT)
    part = tl.program_id(0) + before
    clear(work + DIGITS, CLEARED, part, PARTS, 128)
    clear(work + FINE, 1 << shift, part, PARTS, 128)
    prune(
        work, u, maxima, ids, cand, scratch, size, n, t, shift, share, room, spill,
        part, PARTS, GROUP, ROWS, THREADS, WHOLE, COPIES,
    )  # fmt: skip


_launch_bound = Launcher(_bound, num_warps=8)
_launch_prune = Launcher(_prune, num_warps=PRUNE_WARPS)
Key = tuple[object, ...]


def key_of(p: Plan, u: Tensor, maxima: Tensor, *others: Tensor | None) -> Key:
    """What compiled kernels depend on: which others are there, and where slices begin."""
    return (
        p.shape, u.dtype, u.data_ptr() % 16, maxima.data_ptr() % 16,
        *[None if other is None else other.data_ptr() % 16 for other in others],
    )  # fmt: skip


class Head:
    """The parts of u that are pruned while the rest is scanned."""

    def __init__(self, u: Tensor, k: int, maxima: Tensor, words: Tensor, p: Plan) -> None:
        each = p.share * p.rows * 128 * p.group
        self.parts = -(-u.numel() // each) * (TAIL - 1) // TAIL
        self.entries = self.parts * each
        self.work, self.room = workspace(p.words, u.device)
        self._u, self._k, self._maxima, self._words, self._plan = u, k, maxima, words, p
        self._stream = stream(u.device)
        # A stream that goes first: its few programs take the places that the scan's leave.
        self._side = side(u.device, "head", -1) if u.is_cuda else None
        self.begun = False

    def begin(self) -> None:
        """What has been launched so far scans the head."""
        u, p, maxima, words = self._u, self._plan, self._maxima, self._words
        n = self.entries // p.group
        rank = sure_rank(self._k, n, p.sample)
        key = key_of(p, u, maxima, words)
        with contextlib.nullcontext() if self._side is None else self._side.work():
            _launch_bound(
                1, key, u, self.work, maxima, None, words, n, rank, 2 * rank + 64, p.sample
            )
            _launch(p, key, self.work, self.room, u, maxima, 0, self.parts)
        self.begun = True
        if not capturing(u.device):
            lend(u.device, self._drop)

    def serves(self, u: Tensor, k: int) -> bool:
        """Whether these are the candidates that a selection now would look for."""
        same = u.data_ptr() == self._u.data_ptr() and u.numel() == self._u.numel()
        return self.begun and same and k == self._k and stream(u.device) == self._stream

    def join(self) -> None:
        """What is launched next finds the head pruned."""
        if self._side is not None:
            self._side.join()
        returned(self._u.device)

    def _drop(self) -> None:
        if self._side is not None:
            self._side.join()
        self.work.zero_()
        self.begun = False


def head_of(u: Tensor, k: int, group: int, maxima: Tensor, words: Tensor) -> Head | None:
    """A head for a selection of k; None where u is too small, or no bound would help."""
    if u.numel() < LARGE:
        return None
    p = plan(u.numel(), k, group, processors(u.device))
    return Head(u, k, maxima, words, p) if p.begin and p.crowd >= 0 else None


def candidates(
    p: Plan, key: Key, work: Tensor, room: Tensor, u: Tensor, maxima: Tensor,
    threshold: Tensor | None, words: Tensor | None, head: Head | None,
) -> None:  # fmt: skip
    """All of phase 0, or what the head has left of it."""
    first = 0
    if head is None:
        _launch_bound(1, key, u, work, maxima, threshold, words, p.n, p.rank, p.crowd, p.sample)
    else:
        head.join()
        first = head.parts
    _launch(p, key, work, room, u, maxima, first, p.parts)


def _launch(
    p: Plan, key: Key, work: Tensor, room: Tensor, u: Tensor, maxima: Tensor, first: int, last: int
) -> None:
    _launch_prune(
        last - first, key, u, work, u, maxima, room, first, u.numel(), p.n, p.share, p.room,
        p.spill, p.parts, p.group, p.rows, p.threads, p.whole, p.copies,
    )  # fmt: skip
