"""The grouping of parameters into bundles, and the offset of each parameter in its bundle."""

import fnmatch
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.errors import ConfigError
from gradwire.types import MAX_SIZE, Slot, align

_SMALLEST, _LARGEST, _SHARE = 25e6, 200e6, 0.4


def bundle_bytes(megabytes: float | None, device: torch.device, entries: int) -> float:
    """Return the fp32 bytes at which a bundle is closed; `entries` is the size of the model.

    `megabytes` is the user's choice. None leaves the choice to this function:
    - On CUDA a bundle holds 0.4 of the model, from 25 to 200 MB. At density 0.001 and 28 bits an
      entry, 200 MB of gradient become a message of 175 kB. The message takes 0.14 ms at 10 Gbit/s,
      less than the fixed cost of one more exchange. The fixed cost decides for networks of few,
      large layers. With one bundle, however, nothing is exchanged before the backward pass ends.
    - On the CPU compressing takes longer than sending. The backward pass can hide bundles of 25 MB.
    """
    if megabytes is not None:
        return 1e6 * megabytes
    if device.type != "cuda":
        return _SMALLEST
    return min(max(_SHARE * 4 * entries, _SMALLEST), _LARGEST)


def arrange(slots: Sequence[Slot], bundle_bytes: float, dense: Sequence[str]) -> list[list[Slot]]:
    """Return the bundles: the slots in their order, cut by unit, dtype, dense rule and size.

    A bundle holds one dtype of one unit, and is dense or compressed as a whole. A bundle is closed
    when it has `bundle_bytes` of fp32 entries or more. DDP closes its buckets by the same rule, so
    buckets and bundles end at nearly the same layer. No small parameter before a large one travels
    alone. The last bundle, which no backward pass can hide, is small.
    """
    _check_rules(slots, dense)
    open_bundles: dict[tuple[object, ...], list[Slot]] = {}
    done: list[list[Slot]] = []
    for slot in slots:
        key = (slot.unit, slot.dtype, is_dense(slot.name, dense))
        bundle = open_bundles.setdefault(key, [])
        bundle.append(replace(slot, offset=_end(bundle)))
        if 4 * _end(bundle) >= bundle_bytes:
            done.append(open_bundles.pop(key))
    return done + list(open_bundles.values())


def assign_offsets(slots: Sequence[Slot]) -> list[Slot]:
    """Return the slots of one bundle with their offsets, one slot behind the other."""
    bundle: list[Slot] = []
    for slot in slots:
        bundle.append(replace(slot, offset=_end(bundle)))
    return bundle


def size_of(bundle: Sequence[Slot]) -> int:
    """Return the entries of a bundle, including the padding of its slots."""
    size = _end(bundle)
    if size > MAX_SIZE:
        raise ConfigError(
            f"{bundle[0].name}: a bundle of {size:,} entries exceeds {MAX_SIZE:,}, what int32 "
            f"indices reach. Split the parameter, or lower bundle_mb."
        )
    return size


def is_packed(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if the entries lie side by side, in whatever order."""
    step = 1
    for each, size in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n != 1):
        if each != step:
            return False
        step *= size
    return True


def is_dense(name: str, dense: Sequence[str]) -> bool:
    """Return True if a rule keeps this parameter dense."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in dense)


def _check_rules(slots: Sequence[Slot], dense: Sequence[str]) -> None:
    """Raise ConfigError for a rule that no parameter matches: the rule would have no effect."""
    for pattern in dense:
        if not any(fnmatch.fnmatchcase(slot.name, pattern) for slot in slots):
            examples = ", ".join(slot.name for slot in slots[:4])
            raise ConfigError(
                f"dense={pattern!r} matches no parameter. Names look like: {examples}"
            )


def _end(bundle: Sequence[Slot]) -> int:
    return bundle[-1].offset + align(bundle[-1].numel) if bundle else 0
