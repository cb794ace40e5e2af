"""The handshake of all ranks: a communicator of our own, after comparing all settings.

Every rank sends its configuration and its parameters as JSON. Each rank compares all of them with
those of rank 0, so every rank raises the same error.
"""

import gc
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.config import Config
from gradwire.encode.format import MAGIC
from gradwire.errors import ConfigError, GradwireError
from gradwire.ranks.communicator import take_communicator
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.group import uncounted
from gradwire.ranks.together import gather_words
from gradwire.torch_internals import backend_of, set_timeout
from gradwire.types import Slot
from gradwire.version import __version__

_VERSION = "gradwire"
"""The field that holds the version of gradwire."""


_groups: "weakref.WeakSet[DistributedGroup]" = weakref.WeakSet()
"""The groups of the wires of this process, those dropped and not collected yet among them."""
_MANY = 8
"""The number of groups from which on dropped wires are collected before a new one is made."""


def handshake(
    process_group: dist.ProcessGroup | None,
    config: Config,
    slots: Sequence[Slot],
    device: torch.device,
    more: Mapping[str, Any] | None = None,
) -> DistributedGroup:
    """Return a communicator over the ranks of `process_group` after comparing their settings.

    more: settings that ranks compare beside the config and the parameters. This is a collective
    call.
    """
    callers = process_group or dist.group.WORLD
    assert callers is not None
    if len(_groups) >= _MANY:
        # A model is often in a cycle of references, which keeps its wire and the descriptors.
        gc.collect()
    timeout = timedelta(seconds=config.timeout)
    group = take_group(callers, device, timeout, _priority_options(callers, device, timeout))
    fields = config.asdict() | dict(more or {})
    fields["parameters"] = [
        [s.name, list(s.shape), str(s.dtype), list(s.stride), s.unit] for s in slots
    ]
    try:
        with uncounted(group):
            compare_settings(group, fields)
    except GradwireError:
        group.leave(callers)
        raise
    group.open_mailbox()
    _groups.add(group)
    return group


def take_group(
    process_group: dist.ProcessGroup, device: torch.device, timeout: timedelta, options: Any = None
) -> DistributedGroup:
    """Return a communicator of our own over the ranks of `process_group`. A collective call.

    With a communicator of our own no message can mix with the user's collectives.
    """
    callers = DistributedGroup(process_group, device, timeout)
    ranks = dist.get_process_group_ranks(process_group)
    return DistributedGroup(take_communicator(ranks, timeout, callers, options), device, timeout)


def _priority_options(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Any:
    """Return NCCL options for a high-priority stream; None for other backends.

    The exchange ends the step, so its kernels go before the kernels of the backward pass.
    """
    # A group with a backend for each kind of device would give these options to all of them.
    if device.type != "cuda" or "," in dist.get_backend_config(group):
        return None
    kind = getattr(dist, "ProcessGroupNCCL", None)
    present = getattr(backend_of(group, device), "options", None)
    if kind is None or not isinstance(present, kind.Options):
        return None
    options = kind.Options(is_high_priority_stream=True)
    set_timeout(options, timeout)
    return options


def compare_settings(group: DistributedGroup, fields: Mapping[str, Any]) -> None:
    """Raise ConfigError on every rank, naming field and rank, unless all hold the same fields.

    The version of gradwire is the first field, because it explains a difference in the others.
    """
    known = {_VERSION: __version__, "wire_format": MAGIC >> 24, **fields}
    rows = gather_words(group, known, group.device)
    for rank, other in enumerate(rows):
        if other != rows[0]:
            raise ConfigError(_difference(rows[0], other, rank))


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """Return one line on the first field in which `rank` differs from rank 0."""
    if first.get(_VERSION) != other.get(_VERSION):
        return (
            f"ranks run different versions of gradwire: rank {rank} has "
            f"{other.get(_VERSION, 'another')}, rank 0 has {first.get(_VERSION, 'another')}. "
            f"Install the same on all."
        )
    field = next(k for k in {**first, **other} if first.get(k) != other.get(k))
    a, b = first.get(field), other.get(field)
    if field == "parameters" and isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"ranks differ: rank {rank} has {len(b)} parameters, rank 0 has {len(a)}"
        a, b = next((x, y) for x, y in zip(a, b, strict=True) if x != y)
    return f"ranks differ in {field}: rank {rank} has {b!r}, rank 0 has {a!r}. Give all the same."
