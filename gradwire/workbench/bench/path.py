"""The whole local path: gradient in, mean of four ranks' messages out, no network between."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire import path
from gradwire.accumulate.bundle import Bundle
from gradwire.compress import METHODS
from gradwire.config import Config
from gradwire.encode import encode
from gradwire.kernels.side_stream import Target
from gradwire.ranks.virtual import VirtualGroup, VirtualRanks
from gradwire.state.choice import choose

RANKS = 4


class Replay(VirtualGroup):
    """A group of RANKS whose other members have already sent; this one is the first."""

    def __init__(self, gathered: Tensor) -> None:
        super().__init__(VirtualRanks(RANKS), rank=0)
        self._gathered = gathered

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._gathered[0].copy_(tensor)
        return self._gathered


def local_path(
    sets: Sequence[tuple[Bundle, Tensor]], never: Tensor, density: float
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Calls that take one gradient through the pipeline, and calls of their floor.

    The floor, 16 bytes an entry: read gradient and residual, write residual, write the mean.
    """
    config = Config(method="topk", density=density)
    choice = choose(sets[0][0], config, 0, RANKS, False)
    messages = [_message(sets[0][0], choice.k, config, seed) for seed in range(RANKS)]
    group = Replay(torch.stack(messages))
    outs = [
        torch.empty(bundle.size + 1, dtype=torch.float32, device=never.device)
        for bundle, _ in sets[:1]
    ]

    def step(bundle: Bundle, gradient: Tensor) -> Callable[[], object]:
        bundle.buffer.zero_()
        bundle.pending = None
        pieces = [(0, gradient)]

        def run() -> None:
            into = Target(bundle.size, never.device)
            path.average(path.Step(bundle, pieces, choice, config, group, never, into))

        return run

    def floor(bundle: Bundle, gradient: Tensor) -> Callable[[], object]:
        residual = bundle.buffer[: gradient.numel()]
        return lambda: (residual.add_(gradient), outs[0].zero_())

    return [step(*pair) for pair in sets], [floor(*pair) for pair in sets]


def _message(bundle: Bundle, k: int, config: Config, seed: int) -> Tensor:
    """What another rank would send: the largest entries of noise."""
    device = bundle.buffer.device
    generator = torch.Generator(device).manual_seed(seed + 1)
    u = torch.randn(bundle.size, dtype=torch.float32, device=device, generator=generator)
    sparse = METHODS[config.method].run(u, k, bundle.memory, None)
    finite = torch.ones((), dtype=torch.bool, device=device)
    return encode(sparse, finite, config.encoding).buffer
