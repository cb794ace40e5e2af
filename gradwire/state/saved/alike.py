"""What all parts of one checkpoint have alike, as digests that ranks compare."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gradwire.errors import StateError
from gradwire.state.saved.check_bundles import ALIKE

IN_COMMON = (
    "run", "config", "learning rate or flush", "shared weights", "last step", "methods' memory",
    "order of parameters",
)  # fmt: skip
"""Names of the things that all parts of one checkpoint have alike.

The order of parameters is last, because it differs between the shards of a sharded model.
"""


def common_digests(saved: Mapping[str, Any]) -> list[str]:
    """Return a digest of each of IN_COMMON, which must be equal in all parts of a checkpoint."""
    words = [
        json.dumps(field, sort_keys=True, default=repr)
        for field in (
            [saved.get("run"), saved["steps"]],
            dict(saved["config"]),
            [saved.get("worth"), bool(saved.get("flush"))],
            _shared_weights(saved.get("local", {})),
            # What became of it, and the number of bundles that it has delivered.
            [
                bool(saved.get("skipped", saved.get("user_skip"))),
                sum(sent is not None for sent in saved["delivered"]),
            ],
            [_shared_memory(memory) for memory in saved["memory"]],
            [saved["bundles"], saved.get("strides")],
        )
    ]
    return [hashlib.sha256(text.encode()).hexdigest() for text in words]


def _shared_memory(memory: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the part of a bundle's memory that is alike on all ranks."""
    return {key: memory[key].tolist() for key in ALIKE if key in memory}


def compare_digests(rows: Sequence[Sequence[str]]) -> None:
    """Raise StateError unless all ranks have the same `common_digests`."""
    for rank, other in enumerate(rows):
        for field, mine, first in zip(IN_COMMON, other, rows[0], strict=True):
            if mine != first:
                raise StateError(
                    f"the parts of ranks 0 and {rank} differ in their {field}: they are not of one "
                    f"checkpoint"
                )


def _shared_weights(local: Mapping[str, Any]) -> list[Any]:
    """Return the values that local steps keep alike on all ranks, with tensors as their sha256."""
    out: list[Any] = [local.get("inner_steps")]
    for field in ("reference", "velocity"):
        for name, tensor in sorted(local.get(field, {}).items()):
            content = tensor.detach().contiguous().cpu().numpy().tobytes()
            out.append([field, name, hashlib.sha256(content).hexdigest()])
    return out
