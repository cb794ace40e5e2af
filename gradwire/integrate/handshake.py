"""Ranks meet: a group of our own, and proof that all of them mean the same."""

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.cluster.group import DistributedGroup
from gradwire.config import Config
from gradwire.errors import ConfigError
from gradwire.types import Slot


def meet(
    process_group: dist.ProcessGroup | None,
    config: Config,
    slots: Sequence[Slot],
    device: torch.device,
    auto: Mapping[str, Any] | None = None,
) -> DistributedGroup:
    """A communicator of our own over the ranks of `process_group`, after comparing what they hold.

    A collective call. Its own communicator, because sharing DDP's would mix up the order.
    """
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    everyone = len(ranks) == dist.get_world_size()
    timeout = timedelta(seconds=config.timeout)
    own = dist.new_group(ranks, timeout=timeout, use_local_synchronization=not everyone)
    group = DistributedGroup(own, device, timeout)
    fields = config.asdict() | {"bounds of method='auto'": auto}
    fields["parameters"] = [[s.name, list(s.shape), str(s.dtype)] for s in slots]
    compare(group, fields)
    group.bytes_sent = group.rounds = 0
    return group


def compare(group: DistributedGroup, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError on every rank, naming field and rank, unless all hold the same fields.

    The fields travel as JSON, never as pickle.
    """
    text = json.dumps(dict(fields), sort_keys=True, default=repr).encode()
    length = torch.tensor([len(text)], dtype=torch.int64, device=group.device)
    longest = int(group.all_gather(length).max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = group.all_gather(padded.to(group.device)).cpu()
    first: dict[str, Any] = {}
    for rank, row in enumerate(rows):
        other = json.loads(bytes(row.tolist()).rstrip(b"\0"))
        first = first or other
        if other != first:
            raise ConfigError(_difference(first, other, rank))


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    field = next(k for k in {**first, **other} if first.get(k) != other.get(k))
    a, b = first.get(field), other.get(field)
    if field == "parameters" and isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return f"ranks differ: rank {rank} has {len(b)} parameters, rank 0 has {len(a)}"
        a, b = next((x, y) for x, y in zip(a, b, strict=True) if x != y)
    return f"ranks differ in {field}: rank {rank} has {b!r}, rank 0 has {a!r}. Give all the same."
