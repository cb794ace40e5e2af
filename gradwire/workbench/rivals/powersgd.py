"""PowerSGD (Vogels et al., 1905.13727), as PyTorch's hook does it: gradients of low rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.plan.powersgd import split_shapes
from gradwire.workbench.rivals.exchange import RivalExchange, Shape

_TINY = 1e-8


class PowerSgdExchange(RivalExchange):
    """Gradients M of shape n x m as P Q^T of a few columns, with error feedback and warm start.

        M = gradient + residual,   P = orthogonal(sum of M Q),   Q = mean of M^T P
        update = P Q^T,   residual = M - update

    Q is that of the step before; at first it is normal numbers that are the same on all workers.
    Parameters that would not shrink to less than half go whole, and so does all in the first
    `start` steps. Two ring all-reduces of fp32 a step, and one for what goes whole.
    """

    def __init__(
        self,
        workers: int,
        shapes: Sequence[Shape],
        device: torch.device,
        *,
        rank: int = 4,
        start: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(workers, shapes, device)
        self.rank, self.start = rank, start
        self.steps = 0
        self.residual = torch.zeros(workers, self.entries, dtype=dtype, device=device)
        self.groups: dict[tuple[int, int], list[int]] = {}
        """First entries of the matrices of one size."""
        begin = 0
        for shape, size in zip(self.shapes, self.sizes, strict=True):
            if split_shapes([shape], rank)[3]:
                self.groups.setdefault((shape[0], size // shape[0]), []).append(begin)
            begin += size
        generator = torch.Generator().manual_seed(0)
        self.q = {
            (n, m): torch.randn(
                len(begins), m, min(n, m, rank), generator=generator, dtype=torch.float32
            ).to(device, dtype)
            for (n, m), begins in self.groups.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        named = {f"q.{n}.{m}": q for (n, m), q in self.q.items()}
        return super().tensors() | {"residual": self.residual} | named

    def average(self, vectors: Tensor, lr: float) -> Tensor:
        self.steps += 1
        if self.steps <= self.start:
            self.count_reduce(4 * self.entries)
            return vectors.mean(0)
        offered = vectors + self.residual
        update, self.residual = offered.mean(0), torch.zeros_like(offered)
        for (n, m), begins in self.groups.items():
            size = n * m
            each = torch.stack([offered[:, b : b + size] for b in begins]).unflatten(-1, (n, m))
            p = orthonormal((each @ orthonormal(self.q[n, m]).unsqueeze(1)).sum(1))
            q = (each.mT @ p.unsqueeze(1)).mean(1)
            self.q[n, m] = q
            sent = p @ q.mT
            left = (each - sent.unsqueeze(1)).flatten(-2)
            for begin, part, rest in zip(begins, sent.flatten(-2), left, strict=True):
                update[begin : begin + size] = part
                self.residual[:, begin : begin + size] = rest
        self.count_reduce(4 * sum(split_shapes(self.shapes, self.rank)[:3]))
        return update

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, saved: dict[str, object]) -> None:
        super().load_state_dict(saved)
        steps = saved["steps"]
        assert isinstance(steps, int)
        self.steps = steps


def orthonormal(matrices: Tensor) -> Tensor:
    """Return matrices whose few columns are orthogonal and of length 1, by Gram and Schmidt."""
    columns: list[Tensor] = []
    for column in matrices.unbind(-1):
        for before in columns:
            column = column - (before * column).sum(-1, keepdim=True) * before
        columns.append(column / (column.norm(dim=-1, keepdim=True) + _TINY))
    return torch.stack(columns, -1)
