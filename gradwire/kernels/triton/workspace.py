"""Small tensors that belong to a stream: counters at rest, flags ready for use."""

import torch
from torch import Tensor

from gradwire.kernels.triton.launch import driver
from gradwire.kernels.triton.select.turns import WORDS

FLAGS = 256
_kept: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}
_flags: dict[tuple[torch.device, int], list[Tensor]] = {}


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> tuple[torch.device, int]:
    if device.type != "cuda":
        return device, 0
    return device, driver.active.get_current_stream(device.index)


def workspace(words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The counters of `turns_triton`, zero now and when a launch is over, and scratch of `words`.

    Both belong to the current stream, which sees to it that one launch at a time uses them. A graph
    may be replayed on any stream, so it gets its own.
    """
    if capturing(device):
        zero = torch.zeros(WORDS, dtype=torch.int32, device=device)
        return zero, torch.empty(words, dtype=torch.int32, device=device)
    here = _stream(device)
    kept = _kept.get(here)
    if kept is None or kept[1].numel() < words:
        zero = torch.zeros(WORDS, dtype=torch.int32, device=device) if kept is None else kept[0]
        kept = _kept[here] = zero, torch.empty(words, dtype=torch.int32, device=device)
    return kept


def flag(device: torch.device) -> Tensor:
    """A 0-d bool that is True and that nobody else has; a launch is needed for one in FLAGS."""
    if capturing(device):
        return torch.ones((), dtype=torch.bool, device=device)
    here = _stream(device)
    ready = _flags.get(here)
    if not ready:
        ready = _flags[here] = list(torch.ones(FLAGS, dtype=torch.bool, device=device).unbind())
    return ready.pop()
