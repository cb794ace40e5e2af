"""Small tensors that belong to a stream: counters at rest, flags ready for use."""

import torch
from torch import Tensor
from triton.runtime import driver

from gradwire.kernels.turns_triton import WORDS

FLAGS = 256
_counters: dict[tuple[torch.device, int], Tensor] = {}
_scratch: dict[tuple[torch.device, int], Tensor] = {}
_flags: dict[tuple[torch.device, int], list[Tensor]] = {}


def capturing(device: torch.device) -> bool:
    """Whether the current stream is being captured into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> tuple[torch.device, int]:
    if device.type != "cuda":
        return device, 0
    return device, driver.active.get_current_stream(device.index)


def counters(device: torch.device) -> Tensor:
    """The counters of `turns_triton` for the current stream: zero now, and when a launch is over.

    One launch at a time may use them, which the stream sees to. A graph may be replayed on any
    stream, so it gets counters of its own.
    """
    if capturing(device):
        return torch.zeros(WORDS, dtype=torch.int32, device=device)
    here = _stream(device)
    if here not in _counters:
        _counters[here] = torch.zeros(WORDS, dtype=torch.int32, device=device)
    return _counters[here]


def flag(device: torch.device) -> Tensor:
    """A 0-d bool that is True and that nobody else has; a launch is needed for one in FLAGS."""
    if capturing(device):
        return torch.ones((), dtype=torch.bool, device=device)
    here = _stream(device)
    ready = _flags.get(here)
    if not ready:
        ready = _flags[here] = list(torch.ones(FLAGS, dtype=torch.bool, device=device).unbind())
    return ready.pop()


def scratch(words: int, device: torch.device) -> Tensor:
    """At least that many int32, whatever they hold; the next launch on the stream may use them."""
    if capturing(device):
        return torch.empty(words, dtype=torch.int32, device=device)
    here = _stream(device)
    kept = _scratch.get(here)
    if kept is None or kept.numel() < words:
        kept = _scratch[here] = torch.empty(words, dtype=torch.int32, device=device)
    return kept
