"""Entries of many kinds, and the bytes that every encoding makes of them.

The scale of `sign` is a mean. Each block has a power of two of entries that are not zero, or one
or two that outweigh the rest, so the mean is exact in whatever order torch adds.
"""

import itertools

import numpy as np
import torch

from tests.golden.cases import (
    INDICES,
    STOCHASTIC,
    VALUES,
    Encoding,
    Noise,
    Sparse,
    decode,
    digest,
    encode,
    numbers,
)

SHOWN = 128
"""Messages of at most so many bytes are stored whole."""
WIDE = 1 << 20
"""Above this size a bitmap is too long for a test."""
LARGEST = 2**31 - 1
TINY = 2.0**-149


def entries(where, values, size, room=None):
    """A Sparse with room for `room` entries, or just for these."""
    room = len(where) if room is None else room
    indices = np.full(room, size, np.int32)
    indices[: len(where)] = where
    kept = np.zeros(room, np.float32)
    kept[: len(where)] = values
    count = torch.tensor(len(where), dtype=torch.int32)
    return Sparse(torch.from_numpy(indices), torch.from_numpy(kept), count, size)


def dyadic(seed, count):
    """Multiples of 2^-8 that are not zero, fp32."""
    sign = 1 - 2 * numbers(seed + 1, count, 0, 1)
    return (numbers(seed, count, 1, 4000) * sign).astype(np.float32) * np.float32(2.0**-8)


def places(seed, count, most):
    """`count` ascending indices with gaps of 1..most."""
    return np.cumsum(numbers(seed, count, 1, most)) - 1


def many():
    """1283 entries: five blocks of values and three more, one of them zero."""
    values = dyadic(3, 1283)
    values[-2] = 0
    return entries(places(4, 1283, 7), values, 6000)


def gaps():
    """Neighbours, and gaps of more than 65,536 entries."""
    where = [0, 1, 2, 3, 70_000, 70_001, 139_999, 140_000, 141_000, 141_001, 399_998, 399_999]
    return entries([*where, 400_003, 400_005, 400_007, 400_009], dyadic(5, 16), 400_010)


def far():
    """The longest vector there can be; its first and its last entry, and blocks without any."""
    where = [0, 1, 65_535, 65_536, 2**30, 2**30 + 3, 2**31 - 4, 2**31 - 2]
    return entries(where, dyadic(7, 8), LARGEST)


EXTREME = [-0.0, TINY, -TINY, 2.0**-127, -(2.0**-126), 3.25e38, -1.0e20, 2.0**-25]
HALVES = [1.00390625, 1.01171875, -1.00390625, 1.00048828125, 1.00146484375, 65519.0, 65520.0, -7e4]
"""Ties of bf16 and fp16, and what fp16 has to clamp."""
LEVELS = [127.0, 0.5, 1.5, -2.5, 63.5, -0.5, 7.0, 0.25]
"""Ties of int8, whose scale is 1 here."""
NIBBLES = [7.0, 0.5, 1.5, -2.5, 3.5, -0.5, -7.0, 0.25, 1.25]
"""Ties of int4, whose scale is 1 here; an odd number of them, of which `sign` sees eight."""

SETS = {
    "no room": lambda: entries([], [], 1000),
    "only padding": lambda: entries([], [], 1000, room=4),
    "one of one": lambda: entries([0], [-2.5], 1),
    "three, room for six": lambda: entries([0, 500, 999], [1.5, 0, -3.0], 1000, room=6),
    "not finite": lambda: entries([7], [-2.0], 1000),
    "extreme": lambda: entries([0, 1, 2, 63, 64, 65, 510, 511], EXTREME, 512),
    "halves": lambda: entries([3, 5, 8, 13, 21, 34, 55, 89], HALVES, 90),
    "levels": lambda: entries([1, 2, 3, 4, 5, 6, 7, 8], LEVELS, 100),
    "nibbles": lambda: entries(places(8, 9, 9), [*NIBBLES[:-1], 0.0], 100),
    "all": lambda: entries(np.arange(64), dyadic(6, 64), 64),
    "gaps": gaps,
    "far": far,
    "many": many,
}
NOT_FINITE = ("not finite",)
"""Sets whose sender says that its gradient was not finite."""
NOISE = {"bundle": 3, "rank": 2, "step": 7}


def encodings():
    """Every encoding of values, with every way of rounding, by every code of indices."""
    ways = [(values, "nearest") for values in VALUES]
    ways += [(values, "stochastic") for values in STOCHASTIC]
    for (values, rounding), indices in itertools.product(ways, [*INDICES, "auto"]):
        yield Encoding(values, indices, rounding)


def cases():
    """(name of the entries, encoding) of every message."""
    for name, encoding in itertools.product(SETS, encodings()):
        if not (name == "far" and encoding.indices == "bitmap"):
            yield name, encoding


def label(encoding):
    """How the record names an encoding."""
    return f"{way(encoding)} {encoding.indices}"


def way(encoding):
    """How the record names the rounding of values, which alone decides what they become."""
    return f"{encoding.values}{'~' if encoding.rounding == 'stochastic' else ''}"


def written(name, encoding):
    """The Message of these entries."""
    sparse = SETS[name]()
    if encoding.indices == "common":
        sparse = Sparse(sparse.indices, sparse.values, sparse.count, sparse.size, common=True)
    noise = None
    if encoding.rounding == "stochastic":
        noise = Noise(NOISE["bundle"], NOISE["rank"], torch.tensor(NOISE["step"]))
    return encode(sparse, torch.tensor(name not in NOT_FINITE), encoding, noise=noise)


def without_entries(finite, encoding):
    """The Message that only says whether its sender was finite."""
    return encode(None, torch.tensor(finite), encoding, 1000)


def shown(buffer):
    """A message as the record has it: its bytes, or of a long one length and sha256."""
    content = bytes(buffer.tolist()) if buffer.numel() <= SHOWN else b""
    return content.hex() if content else f"{buffer.numel()} bytes {digest(buffer)}"


def values_shown(values):
    """fp32 as the record has them: exact words, or of many the sha256."""
    if values.numel() > 16:
        return digest(values)
    return " ".join(float(value).hex() for value in values)


def read(name, encoding, buffer):
    """What `decode` makes of a message of these entries."""
    common = SETS[name]().indices if encoding.indices == "common" else None
    return decode(buffer, common)


def record():
    """All messages, and per set and way of rounding the values that readers see."""
    messages, seen = {}, {}
    for name, encoding in cases():
        message = written(name, encoding)
        messages.setdefault(name, {})[label(encoding)] = shown(message.buffer)
        values = read(name, encoding, message.buffer)[0].values
        seen.setdefault(name, {})[way(encoding)] = values_shown(values)
    for finite in (True, False):
        messages[f"without entries, finite {finite}"] = {
            label(e): shown(without_entries(finite, e).buffer) for e in encodings()
        }
    return {"messages": messages, "values": seen}
