"""How topk's launches are cut up: by size, by k, by the number of multiprocessors."""

import functools
import math
from dataclasses import dataclass

import torch

from gradwire.kernels.triton.select.turns import COPIES, MAX_ITEMS

WARPS = 8
PRUNE_WARPS = 4
LISTS = 8
UNIT = 2048
"""Entries whose block maxima the scan counts, or does not count, together."""
_CROWDS = {1: 2, 16: 3, 32: 16, 64: 16}
"""`LaunchSizes.crowd` by the size of a block: what `room` and `spill` below hold."""
ALONE = 8192
"""Maxima an item from which on phase 0 has launches of its own."""
MANY = 1 << 18
"""Entries from which on the last launch has twice the warps, and from a quarter of which on there
are copies of the coarse bins."""


@dataclass(frozen=True)
class LaunchSizes:
    """The arguments of the kernels for one size and k.

    items: programs of the last launch, and parts of the work in each of its phases. lists: parts of
    phase 0 an item. begin: 0 when phase 0 is part of the last launch, 1 when launches of their own
    do it. n: maxima, or entries where there are none. sample: how many of them the bound is taken
    from. rank: how many of those must reach it. crowd: more than that many times the rank means
    ties, for whose entries there would be no room; 0: no bound is looked for. counted: the rank
    where the scan has counted; loose: that of a quarter more entries. rows: tiles of phase 0, in
    rows of 128. threads: of its programs. share: tiles of maxima, or entries, a part. room:
    candidates a part keeps. spill: candidates in common. whole: no block is cut short. wide: tiles
    of 4096 entries an item, in the slower path. copies: of the coarse bins. warps: of the last
    launch. words: int32 of scratch.
    """

    items: int
    lists: int
    begin: int
    block: int
    n: int
    sample: int
    rank: int
    crowd: int
    counted: int
    loose: int
    rows: int
    threads: int
    share: int
    room: int
    spill: int
    whole: bool
    wide: int
    copies: int
    warps: int
    words: int

    @functools.cached_property
    def looks(self) -> int:
        """A power of two that holds the items."""
        return 1 << (self.items - 1).bit_length()

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """What the compiled kernels depend on."""
        return (
            self.items, self.lists, self.begin, self.block, self.rows, self.threads, self.whole,
            self.copies, self.warps,
        )  # fmt: skip


def every(size: int) -> int:
    """One in so many units is counted: a power of two, about a root of their number."""
    return 1 << max(0, (math.isqrt(size // UNIT) // 4).bit_length() - 1)


@functools.lru_cache(maxsize=512)
def launch_sizes(size: int, k: int, block: int, processors: int) -> LaunchSizes:
    """The plan for k of `size` entries with maxima of `block`; 1 looks at the entries themselves.

    Scratch: at most size / 8 + 8 k words with the maxima counted.
    """
    items = min(processors, MAX_ITEMS)
    n = -(-size // block)
    begin = int(n > items * ALONE)
    lists = LISTS if begin else 1
    parts = items * lists
    warps, sample = (PRUNE_WARPS, 8192) if begin else (WARPS, 4096)
    rows = 4 if begin and block == 1 else 2 * warps
    rank = _surely(k, n / sample)
    # Above a quarter, or with less than a block for an entry, no bound helps.
    hopeless = rank >= min(n, sample) or 4 * k > size
    if hopeless:
        room, spill = 0, 0
    elif block == 1:
        room, spill = k + k // 2, k // 2
    else:
        room, spill = (n, 4 * k) if block >= 32 else (2 * k, 2 * k)
    # A little more room for each, out of what is common.
    spill = max(spill // 2, spill - 64 * parts)
    room = -(-room // parts) + 64
    return LaunchSizes(
        items=items,
        lists=lists,
        begin=begin,
        block=block,
        n=n,
        sample=sample,
        rank=rank,
        crowd=0 if hopeless else _CROWDS[block],
        counted=_surely(k, every(size)),
        loose=_surely(k + k // 4, every(size)),
        rows=rows,
        threads=32 * warps,
        share=-(-n // (parts * rows * 128)),
        room=room,
        spill=spill,
        whole=size % block == 0,
        wide=-(-size // (items * 4096)),
        copies=COPIES if 4 * k > MANY else 1,
        warps=2 * WARPS if k > MANY else WARPS,
        words=2 * parts + 2 * (parts * room + spill) + (n if block > 1 else 0),
    )


def _surely(k: int, share: float) -> int:
    """How many of a sample, one in `share`, must reach what k of all surely do."""
    expected = k / max(1.0, share)
    return k if share <= 1 else math.ceil(expected + 4 * math.sqrt(expected) + 4)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for the interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
