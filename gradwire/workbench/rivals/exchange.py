"""RivalExchange: the mean of P workers' vectors as a rival forms it, with its bytes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


class RivalExchange(ABC):
    """A way to exchange vectors of P workers that are simulated on one device.

    What a worker offers is u: its vector and its residual. `forgotten` counts the energy that is
    in neither the update nor a residual, and the energy of all u.

    All sizes are known beforehand, so counting the bytes never waits for the device.
    """

    def __init__(self, workers: int, shapes: Sequence[Shape], device: torch.device) -> None:
        self.workers, self.shapes, self.device = workers, list(shapes), device
        self.sizes = [prod(shape) for shape in shapes]
        self.entries = sum(self.sizes)
        self.bytes_sent = 0
        """Bytes that all workers together have sent."""
        self.energy = torch.zeros(2, dtype=torch.float64, device=device)

    @property
    def forgotten(self) -> float:
        """Energy that was forgotten, over the energy of all that workers offered."""
        lost, offered = self.energy.tolist()
        return lost / offered if offered else 0.0

    @abstractmethod
    def average(self, vectors: Tensor, lr: float) -> Tensor:
        """Return the update [entries] of these vectors [workers, entries]."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name; `load_state_dict` copies into these tensors."""
        return {"energy": self.energy}

    def state_dict(self) -> dict[str, Any]:
        """Return all that the next average depends on."""
        kept = {name: tensor.clone() for name, tensor in self.tensors().items()}
        return {"bytes_sent": self.bytes_sent, "tensors": kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.bytes_sent = saved["bytes_sent"]
        for name, tensor in self.tensors().items():
            tensor.copy_(saved["tensors"][name])

    def count_energy(self, lost: Tensor, offered: Tensor) -> None:
        """Add the energy of what is forgotten and of what was offered."""
        for place, part in enumerate((lost, offered)):
            self.energy[place] += torch.linalg.vector_norm(part, dtype=torch.float64).square()

    def count_gather(self, message: int) -> None:
        """Count an all-gather: every worker sends its message to all others."""
        self.bytes_sent += self.workers * (self.workers - 1) * message

    def count_reduce(self, size: int) -> None:
        """Count a ring all-reduce of `size` bytes."""
        self.bytes_sent += 2 * (self.workers - 1) * size

    def count_two_halves(self, there: int, back: int) -> None:
        """Count messages to the owners of parts, and the owners' means to all.

        there: bytes of one worker's whole message. back: bytes of the whole mean.
        """
        self.bytes_sent += (self.workers - 1) * (there + back)


def in_bytes(bits: int) -> int:
    """Return the whole bytes that hold these bits."""
    return -(-bits // 8)


def as_flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return the entries of all tensors as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
