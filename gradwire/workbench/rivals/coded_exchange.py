"""CodedExchange: encoded differences of weights, for SparseLoCo, MuLoCo and Streaming DiLoCo."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.workbench.rivals.codes import Code
from gradwire.workbench.rivals.exchange import RivalExchange, Shape, in_bytes


class CodedExchange(RivalExchange):
    """Differences of each worker, encoded parameter by parameter, and their mean.

        e = decay e + difference,   q = what arrives of e,   e = e - q,   update = mean of q

    decay: 0 keeps no residual; what does not arrive is forgotten.
    mean: "all" workers, or "senders", those that sent an entry.
    twice: the mean is encoded again, as an owner of a part would send it to all; what that takes
    away is forgotten, as in MuLoCo's released code. Without it every message goes to all workers.
    """

    def __init__(
        self,
        workers: int,
        shapes: Sequence[Shape],
        device: torch.device,
        *,
        code: Code,
        decay: float = 1.0,
        mean: str = "all",
        twice: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(workers, shapes, device)
        if mean not in ("senders", "all"):
            raise ConfigError(f"mean must be 'all' or 'senders', got {mean!r}")
        self.code, self.decay, self.mean, self.twice = code, decay, mean, twice
        kept = self.entries if decay else 0
        self.residual = torch.zeros(workers, kept, dtype=dtype, device=device)

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"residual": self.residual}

    def average(self, vectors: Tensor, lr: float) -> Tensor:
        offered = vectors + self.decay * self.residual if self.decay else vectors
        arrived, means, bits, back_bits = [], [], 0, 0
        for shape, part in zip(self.shapes, offered.split(self.sizes, 1), strict=True):
            coded = self.code(part.unflatten(1, shape))
            divisor: Tensor | int = self.workers
            if self.mean == "senders" and coded.sent is not None:
                divisor = coded.sent.sum(0).clamp(min=1)
            update = coded.values.sum(0) / divisor
            arrived.append(coded.values)
            bits += coded.bits
            if self.twice:
                again = self.code(update.view(1, *shape))
                back_bits += again.bits
                # Every worker is short of the rounding of the mean.
                self.count_energy((update - again.values[0]) * self.workers**0.5, update[:0])
                update = again.values[0]
            means.append(update)
        left = offered - torch.cat(arrived, 1)
        if self.decay:
            self.count_energy((1 - self.decay) * self.residual, offered)
            self.residual.copy_(left)
        else:
            self.count_energy(left, offered)
        if self.twice:
            self.count_two_halves(in_bytes(bits), in_bytes(back_bits))
        else:
            self.count_gather(in_bytes(bits))
        return torch.cat(means)
