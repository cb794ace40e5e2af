"""average: compressed averaging for a training loop without DistributedDataParallel."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.integrate.handshake import handshake
from gradwire.integrate.refuse import DTYPES
from gradwire.ranks.group import uncounted
from gradwire.state.state import State
from gradwire.types import Slot


@torch.no_grad()
def average(tensors: Sequence[Tensor] | Mapping[str, Tensor], state: State) -> None:
    """Replace gradients by their compressed mean over all ranks, in place.

        state = gradwire.State(method="topk", density=0.01)
        loss.backward()
        gradwire.average({name: p.grad for name, p in model.named_parameters()}, state)
        optimizer.step()

    This is a collective call. `state` keeps the residuals by name, or by position for a list. The
    number and the shapes of the tensors must be the same at every call.
    """
    named = _by_name(tensors)
    if not state.opened:
        _open_state(named, state)
    _check_unchanged(named, state)
    state.check_drift()
    state.begin()
    for bundle in state.bundles:
        with uncounted(state.group):
            state.agree("average", bundle)
        gradients = [named[slot.name].reshape(-1).contiguous() for slot in bundle.slots]
        update = state.process(bundle, gradients)
        for slot in bundle.slots:
            part = update[slot.offset : slot.offset + slot.numel]
            named[slot.name].copy_(part.view(slot.shape))


def _by_name(tensors: Sequence[Tensor] | Mapping[str, Tensor]) -> dict[str, Tensor]:
    named = dict(tensors) if isinstance(tensors, Mapping) else dict(_numbered(tensors))
    missing = [name for name, tensor in named.items() if tensor is None]
    if missing:
        raise ConfigError(
            f"average needs a tensor for every name, got None for {', '.join(missing[:3])}: give "
            f"parameters without a gradient zeros, or leave them out at every call"
        )
    return named


def _numbered(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((str(number), tensor) for number, tensor in enumerate(tensors))


def _open_state(named: dict[str, Tensor], state: State) -> None:
    if not named:
        raise ConfigError("average needs at least one tensor, got none")
    for name, tensor in named.items():
        if tensor.dtype not in DTYPES:
            raise ConfigError(f"{name} is {tensor.dtype}: use fp32, bf16 or fp16")
    slots = slots_of(named)
    device = next(iter(named.values())).device
    state.open(slots, device, handshake(state.process_group, state.config, slots, device))


def slots_of(named: Mapping[str, Tensor]) -> list[Slot]:
    """Return a slot per tensor, in the memory order of a contiguous tensor."""
    return [
        Slot(
            name,
            tuple(t.shape),
            torch.empty(t.shape, dtype=t.dtype, device="meta").stride(),
            t.dtype,
            0,
            t.numel(),
        )
        for name, t in named.items()
    ]


def _check_unchanged(named: dict[str, Tensor], state: State) -> None:
    known = {slot.name: slot for bundle in state.bundles for slot in bundle.slots}
    if named.keys() != known.keys():
        changed = sorted(named.keys() ^ known.keys())[:3]
        raise ConfigError(f"average was called with other tensors than before: {changed} differ")
    for name, tensor in named.items():
        if tuple(tensor.shape) != known[name].shape:
            raise ConfigError(f"{name} has shape {tuple(tensor.shape)}, before {known[name].shape}")
        if tensor.dtype != known[name].dtype:
            raise ConfigError(f"{name} is {tensor.dtype}, before {known[name].dtype}")
