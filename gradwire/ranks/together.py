"""Words between ranks, and errors that all ranks raise together.

Words travel as JSON, because reading a pickle may run a program.
"""

import json
from typing import Any

import torch

from gradwire.errors import ExchangeError, GradwireError
from gradwire.ranks.group import Group


def gather_words(group: Group, value: Any, device: torch.device | None = None) -> list[Any]:
    """Return every rank's `value`, plain enough for JSON, in rank order. A collective call."""
    device = device or group.device
    text = json.dumps(value, sort_keys=True, default=repr).encode()
    length = torch.tensor([len(text)], dtype=torch.int64, device=device)
    longest = int(group.all_gather(length).max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    rows = group.all_gather(padded.to(device)).cpu()
    return [_parse_words(rank, row.numpy().tobytes()) for rank, row in enumerate(rows)]


def _parse_words(rank: int, row: bytes) -> Any:
    """Return the value in one rank's row, which zeros fill up."""
    try:
        return json.loads(row.rstrip(b"\0"))
    except (ValueError, RecursionError) as error:
        raise ExchangeError(
            f"rank {rank} sent {row[:16]!r}, which is no JSON: run one gradwire on all ranks"
        ) from error


def raise_together(
    group: Group,
    failure: GradwireError | None,
    kind: type[GradwireError],
    device: torch.device | None = None,
    who: str = "rank {rank}",
) -> None:
    """Raise on every rank when one of them failed, so that no rank waits. A collective call.

    A rank that failed raises its own error. The others raise a `kind` with the first failure, in
    which `who` names the rank.
    """
    texts = gather_words(group, "" if failure is None else str(failure), device)
    for rank, text in enumerate(texts):
        if text:
            raise failure or kind(f"{who.format(rank=rank)}: {text}")
