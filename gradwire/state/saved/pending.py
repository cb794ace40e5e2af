"""Conversion of a bundle's pending delivery to its saved form and back.

In the saved form values None means Everything, and indices None means Rounded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradwire.accumulate.delivery import Pending
from gradwire.accumulate.owned import OWNED
from gradwire.types import Delivered, Entries, Everything, Rounded, Sparse

if TYPE_CHECKING:
    from gradwire.accumulate import Bundle


def pack_pending(bundle: "Bundle") -> dict[str, Any] | None:
    """Return the pending delivery in the saved form; None when there is none."""
    pending = bundle.pending
    if pending is None:
        return None
    indices: Tensor | None = None
    values: Tensor | None = None
    match pending.delivered:
        case Rounded(values):
            pass
        case Entries(sparse):
            indices, values = sparse.indices, sparse.values
    tensors = {
        "indices": indices,
        "values": values,
        "loss": pending.mean_rounding,
        "masked": pending.masked,
        "owned": pending.owned_rounding,
    }
    packed = {name: None if tensor is None else tensor.cpu() for name, tensor in tensors.items()}
    return packed | {
        "ok": pending.ok.cpu(),
        "held": [[offset, kept.cpu()] for offset, kept in pending.withheld],
        "forget": pending.forget,
    }


def unpack_pending(
    packed: Mapping[str, Any] | None, bundle: "Bundle", strides: Mapping[str, Sequence[int]]
) -> Pending | None:
    """Return the delivery for a bundle whose parameters may have other strides than when saved."""
    if packed is None:
        return None
    device, places = bundle.buffer.device, _new_places(bundle, strides)
    indices, values, rounding, masked = (
        None if (t := packed.get(name)) is None else t.to(device)
        for name in ("indices", "values", "loss", "masked")
    )
    delivered: Delivered
    if values is None:
        delivered = Everything()
    elif indices is None:
        delivered = Rounded(_move(values, places))
    else:
        count = (indices < bundle.size).sum(dtype=torch.int32)
        delivered = Entries(Sparse(_translate(indices, places), values, count, bundle.size))
    withheld = [
        (int(offset), _move(kept.to(device), places, int(offset)))
        for offset, kept in packed["held"]
    ]
    return Pending(
        delivered,
        packed["ok"].to(device),
        None if rounding is None else _move(rounding, places),
        None if masked is None else _translate(masked, places),
        bool(packed.get("forget")),
        withheld,
        None if (owned := packed.get("owned")) is None else owned.to(device),
    )


def fold_moved(bundle: "Bundle", strides: Mapping[str, Sequence[int]], skipped: Tensor) -> None:
    """Move what an owner keeps into the residual if the saved strides were others.

    Owners have blocks of entries, and with other strides an entry may lie in another block.
    """
    places = _new_places(bundle, strides) if bundle.keeps_owned else None
    if places is not None:
        moved = _move(bundle.owned_vector(skipped), places)
        bundle.u.add_(moved, alpha=bundle.memory.ranks)
        bundle.memory.pop(OWNED, None)
        if bundle.pending is not None:
            bundle.pending.owned_rounding = None


def _new_places(bundle: "Bundle", strides: Mapping[str, Sequence[int]]) -> Tensor | None:
    """Return the place in `bundle` of each place in the saved bundle, None if all are equal.

    The order of a parameter's entries follows its strides, which a new model may change.
    """
    changed = [s for s in bundle.slots if tuple(strides.get(s.name, s.stride)) != s.stride]
    if not changed:
        return None
    numbers = torch.arange(bundle.size + 1, dtype=torch.int64, device=bundle.buffer.device)
    places = numbers.clone()
    for slot in changed:
        saved = replace(slot, stride=tuple(strides[slot.name]))
        bundle.view(places, saved).copy_(bundle.view(numbers, slot))
    return places


def _translate(indices: Tensor, places: Tensor | None) -> Tensor:
    """Return the new places of saved indices."""
    return indices if places is None else places[indices.long()].to(indices.dtype)


def _move(vector: Tensor, places: Tensor | None, offset: int = 0) -> Tensor:
    """Return the part of a bundle that begins at `offset`, with every entry at its new place."""
    if places is None:
        return vector
    moved = torch.empty_like(vector)
    moved[places[offset : offset + vector.numel()] - offset] = vector
    return moved
