"""Answers of a rank: the outcome of one operation, and a look at the rank from outside."""

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.errors import GradwireError

PLANNED = "raised on purpose"
"""The words of an exception that the plan asked for."""
_CLEAR = re.compile(r"rank \d+, step \d+|rank \d+ (of \d+|is in)|the wire was closed|for gradwire")
"""Words of gradwire in an error of another kind: autograd passes on text, but no kind."""

Vector = np.ndarray[Any, Any]
"""A flat vector, fp32: all parameters one after the other."""


@dataclass(frozen=True)
class Look:
    """One rank, seen from outside.

    optimizer: a digest of its state. residual: None without a wire. steps: the wire's.
    broken: the wire takes no more steps. stopped: the wire was closed, or left its model.
    shared: the weights that ranks of local steps share.
    """

    parameters: Vector
    optimizer: str
    residual: Vector | None
    steps: int
    broken: bool = False
    stopped: bool = False
    shared: Vector | None = None


@dataclass
class Answer:
    """The outcome of one operation on one rank.

    came: this rank's finite gradient. out: the update that it was given, None for no step.
    taken: the optimiser took the step. more: other things, by operation.
    """

    look: Look | None = None
    error: str = ""
    kind: str = ""
    clear: bool = False
    came: Vector | None = None
    out: Vector | None = None
    taken: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def note_error(self, error: BaseException) -> None:
        """Note an error, and that it is clear: one that gradwire raised, or gave its words to."""
        self.error, self.kind = str(error), type(error).__name__
        self.clear = isinstance(error, GradwireError) or bool(_CLEAR.search(self.error))

    @property
    def planned(self) -> bool:
        return PLANNED in self.error


def flat(tensors: list[Tensor]) -> Vector:
    """Return tensors as one flat fp32 vector, each in the order of its shape."""
    if not tensors:
        return np.zeros(0, np.float32)
    parts = [local(t).detach().reshape(-1).to(torch.float32) for t in tensors]
    return torch.cat(parts).cpu().numpy().copy()


def local(tensor: Any) -> Tensor:
    """Return a DTensor's part of this rank, and any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def put(vector: Vector, tensors: list[Tensor]) -> None:
    """Copy a flat vector into tensors, in place."""
    place = 0
    with torch.no_grad():
        for tensor in map(local, tensors):
            part = torch.from_numpy(vector[place : place + tensor.numel()].copy())
            tensor.copy_(part.view(tensor.shape))
            place += tensor.numel()


def digest_of(optimizer: Optimizer) -> str:
    """Return a digest of an optimiser's state and settings."""
    sha = hashlib.sha256()
    for group in optimizer.param_groups:
        sha.update(repr([(k, v) for k, v in sorted(group.items()) if k != "params"]).encode())
        for parameter in group["params"]:
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                content = flat([value]).tobytes() if isinstance(value, Tensor) else repr(value)
                sha.update(key.encode())
                sha.update(content if isinstance(content, bytes) else content.encode())
    return sha.hexdigest()[:16]
