"""Which parameters travel together."""

import fnmatch
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.errors import ConfigError
from gradwire.types import MAX_SIZE, Slot, align

SMALLEST, LARGEST, SHARE = 25e6, 200e6, 0.4


def bundle_bytes(megabytes: float | None, device: torch.device, entries: int) -> float:
    """fp32 bytes at which a bundle is closed, in a model of so many entries; None leaves it to us.

    On CUDA 0.4 of the model, from 25 to 200 MB. At density 0.001 and 28 bits an entry 200 MB of
    gradient are a message of 175 kB, 0.14 ms at 10 Gbit/s: less than what one more exchange costs
    whatever it carries, which is what counts for networks of few, large layers. But with one bundle
    nothing is exchanged until the backward pass is over. On the CPU compressing takes longer than
    sending, and bundles of 25 MB let the backward pass hide it.
    """
    if megabytes is not None:
        return 1e6 * megabytes
    if device.type != "cuda":
        return SMALLEST
    return min(max(SHARE * 4 * entries, SMALLEST), LARGEST)


def arrange(slots: Sequence[Slot], bundle_bytes: float, dense: Sequence[str]) -> list[list[Slot]]:
    """The bundles: slots in the order given, cut where the dtype, the rule or the size asks for it.

    A bundle holds one dtype of one unit, is dense or compressed as a whole, and is closed when it
    has `bundle_bytes` of fp32 entries or more. DDP closes its buckets by the same rule: both then
    end at nearly the same layer, no small parameter before a large one travels alone, and what is
    left for the end of the backward pass, which nothing hides, is small.
    """
    check_rules(slots, dense)
    open_bundles: dict[tuple[object, ...], list[Slot]] = {}
    done: list[list[Slot]] = []
    for slot in slots:
        key = (slot.unit, slot.dtype, is_dense(slot.name, dense))
        bundle = open_bundles.setdefault(key, [])
        bundle.append(replace(slot, offset=_end(bundle)))
        if 4 * _end(bundle) >= bundle_bytes:
            done.append(open_bundles.pop(key))
    return done + list(open_bundles.values())


def place(slots: Sequence[Slot]) -> list[Slot]:
    """The slots of one bundle, one behind the other."""
    bundle: list[Slot] = []
    for slot in slots:
        bundle.append(replace(slot, offset=_end(bundle)))
    return bundle


def size_of(bundle: Sequence[Slot]) -> int:
    """Entries of a bundle, the padding of its slots included."""
    size = _end(bundle)
    if size > MAX_SIZE:
        raise ConfigError(
            f"{bundle[0].name}: a bundle of {size:,} entries exceeds {MAX_SIZE:,}, what int32 "
            f"indices reach. Split the parameter, or lower bundle_mb."
        )
    return size


def is_dense(name: str, dense: Sequence[str]) -> bool:
    """Whether a rule keeps this parameter dense."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in dense)


def check_rules(slots: Sequence[Slot], dense: Sequence[str]) -> None:
    """Raises for a rule that no parameter matches: it would be accepted and dropped."""
    for pattern in dense:
        if not any(fnmatch.fnmatchcase(slot.name, pattern) for slot in slots):
            some = ", ".join(slot.name for slot in slots[:4])
            raise ConfigError(f"dense={pattern!r} matches no parameter. Names look like: {some}")


def _end(bundle: Sequence[Slot]) -> int:
    return bundle[-1].offset + align(bundle[-1].numel) if bundle else 0
