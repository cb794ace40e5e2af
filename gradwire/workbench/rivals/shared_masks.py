"""Shared masks in front of AdamS: a reconstruction of SCAPE (2607.01678) from its abstract."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.encode.format import index_bytes
from gradwire.workbench.rivals.exchange import RivalExchange, Shape


class SharedMaskExchange(RivalExchange):
    """Entries that all workers send together, chosen by the momentum one step before.

        u = gradient + residual,   update = mean of u in the mask and 0 elsewhere
        m = beta m + (1 - beta) update,   residual = u without what was sent
        the next mask: worker r takes the largest |beta m + (1 - beta) u| of its 1/P of the entries

    All workers send the same places, so the values are one all-reduce in bf16. Masks are gathered
    with packed indices. The first `start` steps send everything in fp32.

    The abstract says: masks from the first moment, cut over the workers as the optimiser is, and
    used one step late. That waiting entries are kept, and the first steps, are ours.
    """

    def __init__(
        self,
        workers: int,
        shapes: Sequence[Shape],
        device: torch.device,
        *,
        density: float = 0.01,
        beta: float = 0.9,
        start: int = 10,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(workers, shapes, device)
        self.density, self.beta, self.start = density, beta, start
        self.steps = 0
        self.momentum = torch.zeros(self.entries, dtype=dtype, device=device)
        self.residual = torch.zeros(workers, self.entries, dtype=dtype, device=device)
        cuts = [worker * self.entries // workers for worker in range(workers + 1)]
        self.parts = [slice(*pair) for pair in itertools.pairwise(cuts)]
        """Entries whose mask each worker chooses."""
        self.counts = [max(1, round(density * (part.stop - part.start))) for part in self.parts]
        self.mask = torch.zeros(sum(self.counts), dtype=torch.int64, device=device)
        """Places that are sent in the next step."""

    def tensors(self) -> dict[str, Tensor]:
        named = {"momentum": self.momentum, "residual": self.residual, "mask": self.mask}
        return super().tensors() | named

    def average(self, vectors: Tensor, lr: float) -> Tensor:
        self.steps += 1
        offered = vectors + self.residual
        if self.steps <= self.start:
            update = offered.mean(0)
            self.residual.zero_()
            self.count_reduce(4 * self.entries)
        else:
            update = self._send_masked(offered)
        moments = torch.cat(
            [
                torch.lerp(self.momentum[part], offered[worker, part], 1 - self.beta)
                for worker, part in enumerate(self.parts)
            ]
        )
        self.momentum.mul_(self.beta).add_(update, alpha=1 - self.beta)
        if self.steps >= self.start:
            self._choose_mask(moments.abs())
        return update

    def _send_masked(self, offered: Tensor) -> Tensor:
        """Return the mean in the mask, rounded to bf16 before and after the sum."""
        sent = offered[:, self.mask].bfloat16().to(offered.dtype)
        exact = sent.mean(0)
        mean = exact.bfloat16().to(offered.dtype)
        self.residual.copy_(offered)
        self.residual[:, self.mask] -= sent
        # Every worker is short of the rounding of the mean.
        self.count_energy((exact - mean) * self.workers**0.5, offered)
        self.count_reduce(2 * len(self.mask))
        return torch.zeros_like(self.momentum).scatter_(0, self.mask, mean)

    def _choose_mask(self, sizes: Tensor) -> None:
        """Take the largest of every worker's part, and count the gather of the places."""
        chosen = [
            sizes[part].topk(count, sorted=False).indices + part.start
            for part, count in zip(self.parts, self.counts, strict=True)
        ]
        self.mask.copy_(torch.cat(chosen))
        for part, count in zip(self.parts, self.counts, strict=True):
            size = index_bytes("packed", part.stop - part.start, count)
            self.bytes_sent += (self.workers - 1) * size

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, saved: dict[str, object]) -> None:
        super().load_state_dict(saved)
        steps = saved["steps"]
        assert isinstance(steps, int)
        self.steps = steps
