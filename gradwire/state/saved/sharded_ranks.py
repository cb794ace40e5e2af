"""Calls of all replicas and shards of a sharded model together."""

from typing import Any

import torch.distributed as dist

from gradwire.errors import GradwireError, one_line
from gradwire.ranks.group import uncounted
from gradwire.ranks.together import gather_words
from gradwire.state.saved.cuts import ShardedState
from gradwire.state.saved.draft import Draft


def groups_of(wire: ShardedState) -> list[Any]:
    """Return the replicas of this rank's shard, then the shards of this rank's replica."""
    return [wire.group, *wire.inner_groups]


def agree_on(wire: ShardedState, operation: str) -> None:
    """Raise on every rank unless all run `operation`. Before a load the steps may differ."""
    for group in groups_of(wire):
        with uncounted(group):
            group.agree(operation, steps=wire.steps if operation == "save" else 0)


def gather_over(wire: ShardedState, value: Any) -> list[Any]:
    """Return `value` of every rank: of all replicas of shard 0, then of shard 1, and so on.

    A collective call.
    """
    values = [value]
    for group in groups_of(wire):
        with uncounted(group):
            rows = gather_words(group, values, wire.device)
        values = [word for row in rows for word in row]
    return values


def raise_over(
    wire: ShardedState,
    failure: BaseException | None,
    kind: type[GradwireError],
    draft: Draft | None = None,
) -> None:
    """Undo the draft and raise on every rank when one of them failed.

    A rank that failed raises its own error. The others raise a `kind` with the first failure.
    """
    words = ""
    if failure is not None:
        words = f"rank {dist.get_rank()}: {str(failure) or one_line(failure)}"
    first = next((text for text in gather_over(wire, words) if text), None)
    if first is not None:
        if draft is not None:
            draft.undo()
        raise failure or kind(first)
