"""Ranks meet: a group of our own, and proof that all of them mean the same."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.config import Config
from gradwire.encode.format import MAGIC
from gradwire.errors import ConfigError, GradwireError
from gradwire.ranks.communicator import take
from gradwire.ranks.group import DistributedGroup, uncounted
from gradwire.ranks.together import gather_words
from gradwire.torch_internals import backend_of, set_timeout
from gradwire.types import Slot
from gradwire.version import __version__

VERSION = "gradwire"


def meet(
    process_group: dist.ProcessGroup | None,
    config: Config,
    slots: Sequence[Slot],
    device: torch.device,
    more: Mapping[str, Any] | None = None,
) -> DistributedGroup:
    """A communicator of our own over the ranks of `process_group`, after comparing what they hold.

    A collective call; `more` is compared too.
    """
    theirs = process_group or dist.group.WORLD
    assert theirs is not None
    ranks = dist.get_process_group_ranks(theirs)
    timeout = timedelta(seconds=config.timeout)
    over = DistributedGroup(theirs, device, timeout)
    own = take(ranks, timeout, over, _urgent(theirs, device, timeout))
    group = DistributedGroup(own, device, timeout)
    fields = config.asdict() | dict(more or {})
    fields["parameters"] = [
        [s.name, list(s.shape), str(s.dtype), list(s.stride), s.unit] for s in slots
    ]
    try:
        with uncounted(group):
            compare(group, fields)
    except GradwireError:
        group.leave(theirs)
        raise
    return group


def _urgent(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Any:
    """For NCCL: its kernels before those of the backward pass; the step ends with them."""
    # A group with a backend for each kind of device would give these options to all of them.
    if device.type != "cuda" or "," in dist.get_backend_config(group):
        return None
    kind = getattr(dist, "ProcessGroupNCCL", None)
    theirs = getattr(backend_of(group, device), "options", None)
    if kind is None or not isinstance(theirs, kind.Options):
        return None
    options = kind.Options(is_high_priority_stream=True)
    set_timeout(options, timeout)
    return options


def compare(group: DistributedGroup, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError on every rank, naming field and rank, unless all hold the same fields.

    The version of gradwire is one of them, and the first that is looked at.
    """
    known = {VERSION: __version__, "wire_format": MAGIC >> 24, **fields}
    rows = gather_words(group, known, group.device)
    for rank, other in enumerate(rows):
        if other != rows[0]:
            raise ConfigError(difference(rows[0], other, rank))


def difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    """One line on the first field in which `rank` differs from rank 0."""
    if first.get(VERSION) != other.get(VERSION):
        return (
            f"ranks run different versions of gradwire: rank {rank} has "
            f"{other.get(VERSION, 'another')}, rank 0 has {first.get(VERSION, 'another')}. "
            f"Install the same on all."
        )
    field = next(k for k in {**first, **other} if first.get(k) != other.get(k))
    a, b = first.get(field), other.get(field)
    if field == "parameters" and isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"ranks differ: rank {rank} has {len(b)} parameters, rank 0 has {len(a)}"
        a, b = next((x, y) for x, y in zip(a, b, strict=True) if x != y)
    return f"ranks differ in {field}: rank {rank} has {b!r}, rank 0 has {a!r}. Give all the same."
