"""A group without a network, to measure the work that a rank does itself.

Every other rank is assumed to hold the same tensors as this one.
"""

import torch
from torch import Tensor

from gradwire.ranks.group import Group
from gradwire.stages import stage


class EchoGroup(Group):
    """Rank 0 of `size` equal ranks. Each arriving tensor is a copy of the one that was sent.

    For measuring times. When every rank owns a part of the vector, only this rank's part of the
    result is right.
    """

    def __init__(self, size: int, on_stream: bool = True) -> None:
        self.rank, self.size, self.on_stream = 0, size, on_stream
        self.bytes_sent = self.rounds = 0
        self.device = torch.device("cpu")

    def all_gather(self, tensor: Tensor) -> Tensor:
        with stage("exchange"):
            return tensor.view(1, -1).repeat(self.size, 1)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with stage("exchange"):
            return tensor.mul_(self.size)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        with stage("exchange"):
            return tensor[:1].repeat(self.size, *[1] * (tensor.dim() - 1))

    def swap(self, tensor: Tensor, to: int | None, source: int | None) -> Tensor | None:
        with stage("exchange"):
            return None if source is None else torch.clone(tensor)

    def split(self, local: int) -> "tuple[EchoGroup, EchoGroup]":
        return EchoGroup(local), EchoGroup(self.size // local)

    def agree(self, operation: str, **fields: float) -> None:
        """Do nothing: an echo always agrees."""
