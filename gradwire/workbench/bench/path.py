"""Calls that time the whole local path: from a gradient to the mean of four ranks, no network."""

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


class _ReplayGroup(VirtualGroup):
    """A group of RANKS as rank 0 sees it; the messages of the other ranks have already arrived."""

    def __init__(self, gathered: Tensor) -> None:
        super().__init__(VirtualRanks(RANKS), rank=0)
        self._gathered = gathered

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._gathered[0].copy_(tensor)
        return self._gathered


def local_path_calls(
    pairs: Sequence[tuple[Bundle, Tensor]], skipped: Tensor, density: float
) -> tuple[list[Callable[[], object]], list[Callable[[], object]]]:
    """Return calls that take one gradient each through the path, and calls of their floor.

    The floor is 16 bytes per entry: read gradient and residual, write residual, write the mean.
    """
    config = Config(method="topk", density=density)
    choice = choose(pairs[0][0], config, 0, RANKS, False)
    messages = [_message_of_noise(pairs[0][0], choice.k, config, seed) for seed in range(RANKS)]
    group = _ReplayGroup(torch.stack(messages))
    floor_mean = torch.empty(pairs[0][0].size + 1, dtype=torch.float32, device=skipped.device)

    def step(bundle: Bundle, gradient: Tensor) -> Callable[[], object]:
        bundle.buffer.zero_()
        bundle.pending = None
        pieces = [(0, gradient)]

        def run() -> None:
            into = Target(bundle.size, skipped.device)
            path.average(path.Step(bundle, pieces, choice, config, group, skipped, into))

        return run

    def floor(bundle: Bundle, gradient: Tensor) -> Callable[[], object]:
        residual = bundle.buffer[: gradient.numel()]
        return lambda: (residual.add_(gradient), floor_mean.zero_())

    return [step(*pair) for pair in pairs], [floor(*pair) for pair in pairs]


def _message_of_noise(bundle: Bundle, k: int, config: Config, seed: int) -> Tensor:
    """Return the message of another rank: the largest entries of noise."""
    device = bundle.buffer.device
    generator = torch.Generator(device).manual_seed(seed + 1)
    u = torch.randn(bundle.size, dtype=torch.float32, device=device, generator=generator)
    sparse = METHODS[config.method].run(u, k, bundle.memory, None)
    finite = torch.ones((), dtype=torch.bool, device=device)
    return encode(sparse, finite, config.encoding).buffer
