"""DeMo (Peng et al., 2411.19870): the largest cosine coefficients of every worker's momentum."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire.workbench.rivals.chunks import SIDE, Chunks, Cosine, index_bits
from gradwire.workbench.rivals.exchange import RivalExchange, Shape, in_bytes

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DemoExchange(RivalExchange):
    """Momentum d of each worker, whose largest coefficients are sent and taken away.

        d = decay d + lr g,   q = the `keep` largest of DCT(each 64 x 64 chunk of d)
        d = d - subtract IDCT(q),   update = IDCT(mean of q)

    The optimiser takes the update's sign, for instance. What `decay` takes away is forgotten. With
    `subtract` below 1 a part of what was sent is sent again later.

    rate_inside: lr is in the momentum, as released. Without it d takes (1 - decay) g, as in the
    paper. mean: "senders", over the workers that sent a coefficient, as released; "all", over all.

    A coefficient takes an index into its chunk, 12 bits for 64 x 64, and a value.
    """

    def __init__(
        self,
        workers: int,
        shapes: Sequence[Shape],
        device: torch.device,
        *,
        keep: int = 32,
        decay: float = 0.999,
        subtract: float = 1.0,
        mean: str = "senders",
        values: str = "bf16",
        rate_inside: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(workers, shapes, device)
        if mean not in ("senders", "all") or values not in FLOATS:
            raise ConfigError(f"DeMo: no mean {mean!r} or no values {values!r}")
        self.keep, self.decay, self.subtract, self.mean = keep, decay, subtract, mean
        self.dtype, self.rate_inside = FLOATS[values], rate_inside
        self.chunks, self.transform = Chunks(shapes, SIDE), Cosine()
        self.momentum = torch.zeros(workers, self.entries, dtype=dtype, device=device)
        self.message = in_bytes(self._message_bits())
        """Bytes of one worker's message."""

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"momentum": self.momentum}

    def average(self, vectors: Tensor, lr: float) -> Tensor:
        lost = (1 - self.decay) * self.momentum
        self.momentum.mul_(self.decay).add_(
            vectors, alpha=lr if self.rate_inside else 1 - self.decay
        )
        self.count_energy(lost, self.momentum)
        sent, means = {}, {}
        for size, chunks in self.chunks.cut(self.momentum).items():
            values, chosen = self._largest(self.transform.forward(chunks).flatten(-2))
            total, count = values[0].clone(), chosen[0].to(values.dtype)
            # In rank order, so that a run repeats on every device.
            for value, mask in zip(values[1:], chosen[1:], strict=True):
                total += value
                count += mask
            divisor = count.clamp(min=1) if self.mean == "senders" else self.workers
            sent[size] = self.transform.back(values.unflatten(-1, size))
            means[size] = self.transform.back((total / divisor).unflatten(-1, size))
        self.momentum.sub_(self.chunks.join(sent), alpha=self.subtract)
        self.count_gather(self.message)
        return self.chunks.join(means)

    def _largest(self, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values that are sent, zero elsewhere, and where they are."""
        places = self._kept(coefficients.shape[-1])
        indices = coefficients.abs().topk(places, dim=-1, sorted=False).indices
        values = coefficients.gather(-1, indices).to(self.dtype).to(coefficients.dtype)
        sent = torch.zeros_like(coefficients).scatter_(-1, indices, values)
        chosen = torch.zeros_like(coefficients, dtype=torch.bool).scatter_(-1, indices, True)
        return sent, chosen

    def _kept(self, entries: int) -> int:
        return min(self.keep, entries)

    def _message_bits(self) -> int:
        bits = 0
        for (height, width), places in self.chunks.groups.items():
            count = sum(place.down * place.across for place in places)
            each = index_bits(height * width) + 8 * self.dtype.itemsize
            bits += count * self._kept(height * width) * each
        return bits
