"""The sizes of the selection's launches, by size, k and the number of multiprocessors."""

import functools
import math
from dataclasses import dataclass

import torch

from gradwire.kernels.triton.select.turns import COPIES, MAX_ITEMS

WARPS = 8
"""Warps per program of `winners`; twice as many for a large k."""
PRUNE_WARPS = 4
"""Warps per program of `prune_parts`."""
_LISTS = 8
"""Parts of phase 0 per item, if phase 0 has launches of its own."""
UNIT = 2048
"""Entries per unit: the scan counts all block maxima of a unit, or none."""
_CROWDS = {1: 2, 16: 3, 32: 16, 64: 16}
"""`LaunchSizes.crowd` for each size of a block; more would not fit into `room` and `spill`."""
ALONE = 8192
"""Maxima per item above which phase 0 has launches of its own."""
_MANY = 1 << 18
"""A larger k doubles the warps of the last launch. A quarter of it adds copies of coarse bins."""


@dataclass(frozen=True)
class LaunchSizes:
    """The arguments of the kernels for one size and k. README.md tells of the phases."""

    items: int
    """Programs of `winners`, and parts of the work in each of its phases."""
    lists: int
    """Parts of phase 0 per item."""
    begin: int
    """The first phase of `winners`. 0: one launch does all. 1: phase 0 has launches of its own."""
    block: int
    """Entries per maximum; 1 if there are no maxima."""
    n: int
    """The number of maxima, or of entries if there are no maxima."""
    sample: int
    """The number of maxima, or entries, in the sample that the bound is taken from."""
    rank: int
    """The number of the sample that must reach the bound."""
    crowd: int
    """More than `crowd` times the rank means ties, for which room lacks. 0: no bound helps."""
    counted: int
    """The rank if the scan has counted."""
    rows: int
    """The size of a tile of phase 0, in rows of 128."""
    threads: int
    """Threads per program of phase 0."""
    share: int
    """Tiles of maxima, or of entries, per part of phase 0."""
    room: int
    """Candidates that each part keeps in its own list."""
    spill: int
    """Candidates in the list that all parts share."""
    whole: bool
    """True: the size is a multiple of `block`, so no block is cut short."""
    wide: int
    """Tiles of 4096 entries per item in the passes over all of u."""
    copies: int
    """Copies of the coarse bins."""
    warps: int
    """Warps per program of `winners`."""
    words: int
    """int32 words of scratch."""

    @functools.cached_property
    def looks(self) -> int:
        """The power of two that is `items` or the next above it."""
        return 1 << (self.items - 1).bit_length()


def units_per_count(size: int) -> int:
    """Return the number of units per counted unit: a power of two, about a root of all units."""
    return 1 << max(0, (math.isqrt(size // UNIT) // 4).bit_length() - 1)


@functools.lru_cache(maxsize=512)
def launch_sizes(size: int, k: int, block: int, processors: int) -> LaunchSizes:
    """Return the sizes for k of `size` entries with maxima of `block`; 1: there are no maxima.

    Scratch: at most size / 8 + 8 k words with the maxima counted.
    """
    items = min(processors, MAX_ITEMS)
    n = -(-size // block)
    begin = int(n > items * ALONE)
    lists = _LISTS if begin else 1
    parts = items * lists
    warps, sample = (PRUNE_WARPS, 8192) if begin else (WARPS, 4096)
    rows = 4 if begin and block == 1 else 2 * warps
    rank = _surely(k, n / sample)
    # No bound helps to choose more than a quarter, or if all of the sample must reach it.
    hopeless = rank >= min(n, sample) or 4 * k > size
    if hopeless:
        room, spill = 0, 0
    elif block == 1:
        room, spill = k + k // 2, k // 2
    else:
        room, spill = (n, 4 * k) if block >= 32 else (2 * k, 2 * k)
    # 64 more candidates of room for each part are taken from the common spill.
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
        counted=_surely(k, units_per_count(size)),
        rows=rows,
        threads=32 * warps,
        share=-(-n // (parts * rows * 128)),
        room=room,
        spill=spill,
        whole=size % block == 0,
        wide=-(-size // (items * 4096)),
        copies=COPIES if 4 * k > _MANY else 1,
        warps=2 * WARPS if k > _MANY else WARPS,
        words=2 * parts + 2 * (parts * room + spill) + (n if block > 1 else 0),
    )


def _surely(k: int, share: float) -> int:
    """Return the number of a sample, one in `share`, that surely stand for k of all entries.

    If this number of the sample reach a bound, k of all do. The margin is four standard deviations.
    """
    expected = k / max(1.0, share)
    return k if share <= 1 else math.ceil(expected + 4 * math.sqrt(expected) + 4)


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; a few for the interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
